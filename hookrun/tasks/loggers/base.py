"""The base class of loggers, which pass a run's metrics to another library. Imports no torch."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from hookrun.runtime.site import HookSite
    from hookrun.store.records import Of


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger logs.

    path:   the run directory; a logger writes its files only here
    config: the experiment, as plain values
    """

    path: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the directory; for a job of a sweep, also the name of the sweep's directory."""
        name = self.path.name
        return f"{self.path.parent.name}-{name}" if name.isdecimal() else name


class RunLogger(ABC):
    """Base of the loggers. Each subclass with a `logger_name` is a logger, created when a run begins.

    logger_name: its name in `task.loggers`
    package:     the package that it needs, which is also the name of hookrun's extra
    reached:     the training step at which the current evaluation began; steps of its batches are counted from it
    """

    logger_name: ClassVar[str]
    package: ClassVar[str]

    reached: int = 0

    @abstractmethod
    def __init__(self, run: LoggedRun) -> None:
        """Open the logger and log the experiment's config."""

    @abstractmethod
    def metrics(self, split: str, values: Mapping[str, float], step: int, of: Of | None = None) -> None:
        """Log a line of metrics.jsonl, each value under ``split/name``; see `tag`."""

    def record(self, record: dict[str, Any]) -> None:  # noqa: B027 a logger need not show it
        """Log a line of stats.jsonl."""

    def value(self, site: HookSite, value: Any) -> None:  # noqa: B027 a logger need not show it
        """Log a captured value."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Write what is buffered, at the end of the run."""


@contextmanager
def unless_set(**variables: str) -> Iterator[None]:
    """Set these environment variables within the block, except those that the user has set."""
    mine = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


def tag(split: str, name: str, of: Of | None) -> str:
    """``split/name``; the mean of a training epoch is ``train/name/epoch``, to keep it apart from single batches."""
    return f"{split}/{name}/epoch" if split == "train" and of == "epoch" else f"{split}/{name}"


def flat(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """The key path (such as ``model.name``) and value of each entry of a nested mapping."""
    for key, value in config.items():
        path = f"{within}.{key}" if within else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, path)
        else:
            yield path, value
