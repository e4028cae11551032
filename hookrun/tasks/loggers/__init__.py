"""The loggers of `task.loggers`. Each module here that defines a RunLogger subclass registers it. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

from hookrun.discovery import Registry
from hookrun.errors import Problem, reason
from hookrun.tasks.loggers.base import LoggedRun, RunLogger


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
        if find_spec(package) is None
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
        what = f"WARNING: the logger {name} failed and is not used further: {reason(error)}"
        print(f"{what}\n  the run continues: metrics.jsonl has every line", file=sys.stderr, flush=True)
