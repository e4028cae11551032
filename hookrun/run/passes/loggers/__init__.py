"""The loggers of `task.loggers`, which pass a run's metrics to another library. Imports no torch.

Each module here that defines a subclass of RunLogger registers it.
"""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hookrun.engine.discovery import Registry
from hookrun.errors import Problem, reason

if TYPE_CHECKING:
    from hookrun.engine.runtime.site import HookSite
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
    package:     the package that it needs, which is also the name of hookrun's extra; empty: none
    reached:     the training step at which the current evaluation began; steps of its batches are counted from it
    """

    logger_name: ClassVar[str]
    package: ClassVar[str] = ""

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


def place_of(hook: str, module: str, path: str | None) -> str:
    """``hook/module``, where a record or a captured value comes from."""
    return f"{hook}/{module or 'root'}{path or ''}"


def histogram_of(name: str, value: Any) -> tuple[list[int], list[float]] | None:
    """The counts and the edges of the bins, one more, of what a record holds under a name; None if it has none.

    Those that keep a dimension have several, and no bin is between edges of NaN.
    """
    if name == "histogram" and isinstance(value, Mapping) and math.isfinite(value["edges"][0]):
        return value["counts"], value["edges"]
    if name == "counts" and isinstance(value, list) and value and isinstance(value[0], int):
        return value, list(map(float, range(len(value) + 1)))
    return None


@cache
def loggers() -> Mapping[str, type[RunLogger]]:
    """Every logger class by its name."""
    return Registry(sys.modules[__name__], RunLogger, "logger_name")  # type: ignore[type-abstract]


def not_installed(where: str, names: Iterable[str]) -> list[Problem]:
    """A problem for each of these loggers, named at the key path `where`, whose library is not installed."""
    packages = dict.fromkeys(loggers()[name].package for name in names)
    return [
        Problem(where, f"{package} is not installed", f"pip install 'hookrun[{package}]'")
        for package in packages
        if package and find_spec(package) is None
    ]


@dataclass
class Loggers:
    """Passes each call to all loggers that have not failed."""

    _working: list[RunLogger] = field(default_factory=list, init=False)

    @contextmanager
    def open(self, names: Sequence[str], run: LoggedRun) -> Iterator[None]:
        """Open these loggers, and close them after the block, even if it raises."""
        failed = True
        try:
            for name in dict.fromkeys(names):
                with _failure_shown(name):
                    self._working.append(loggers()[name](run))
            yield
            failed = False
        finally:
            for logger in self._working:
                with _failure_shown(logger.logger_name):
                    logger.close(failed=failed)
            self._working = []

    def reach(self, step: int) -> None:
        """Tell the loggers that an evaluation begins at this training step."""
        for logger in self._working:
            logger.reached = step

    def tell(self, call: Callable[[RunLogger], None]) -> None:
        """Make the call with each logger; one that fails is closed and used no more."""
        for logger in tuple(self._working):
            with _failure_shown(logger.logger_name):
                try:
                    call(logger)
                except Exception:
                    self._working.remove(logger)
                    with suppress(Exception):
                        logger.close(failed=True)
                    raise


@contextmanager
def _failure_shown(name: str) -> Iterator[None]:
    """Print an error of a logger as a warning: the run itself must not fail."""
    try:
        yield
    except Exception as error:  # any error of the library
        print(
            f"WARNING: the logger {name} failed and is not used further: {reason(error)}\n"
            "  the run continues: metrics.jsonl has every line",
            file=sys.stderr,
            flush=True,
        )
