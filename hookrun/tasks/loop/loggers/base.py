"""What a logger is: a library's own client that a run's metrics go to as well. Imports no torch."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from hookrun.runtime.site import PlacedHook
    from hookrun.store.records import Of


@dataclass(frozen=True)
class LoggedRun:
    """What a logger starts from.

    path:   the run directory, below which everything that it writes itself lies
    config: the experiment, as plain values
    """

    path: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the directory, with that of its sweep where it is a job of one."""
        name = self.path.name
        return f"{self.path.parent.name}-{name}" if name.isdecimal() else name


class RunLogger(ABC):
    """Base of the loggers. One subclass with a `logger_name` is one logger; it is made when the run begins.

    logger_name: the word in `task.loggers`
    package:     what has to be installed, which is also the name of hookrun's extra

    reached: the step of training at which an evaluation began; the steps of its batches count from there
    """

    logger_name: ClassVar[str]
    package: ClassVar[str]

    reached: int = 0

    @abstractmethod
    def __init__(self, run: LoggedRun) -> None:
        """Open it; the experiment goes to it at once."""

    @abstractmethod
    def metrics(self, split: str, values: Mapping[str, float], step: int, of: Of | None = None) -> None:
        """A line of metrics.jsonl, each value under ``split/name``; see `tag`."""

    def record(self, record: dict[str, Any]) -> None:  # noqa: B027 a logger need not show it
        """A line of stats.jsonl."""

    def value(self, site: PlacedHook, value: Any) -> None:  # noqa: B027 a logger need not show it
        """A captured value."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Write what is buffered; the run is over."""


@contextmanager
def unless_set(**variables: str) -> Iterator[None]:
    """Within it these environment variables are set, unless the user has set them."""
    mine = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


def tag(split: str, name: str, of: Of | None) -> str:
    """``split/name``; the mean of a training epoch has a name of its own, ``train/loss/epoch``: it is not a batch."""
    return f"{split}/{name}/epoch" if split == "train" and of == "epoch" else f"{split}/{name}"


def flat(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """``model.name`` and so on, and the value of each."""
    for key, value in config.items():
        path = f"{within}.{key}" if within else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, path)
        else:
            yield path, value
