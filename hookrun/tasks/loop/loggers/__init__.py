"""The loggers of `task.loggers`. Each module here that defines a RunLogger subclass registers it. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec

from hookrun.discovery import discovered
from hookrun.errors import Problem
from hookrun.tasks.loop.loggers.base import RunLogger


@cache
def loggers() -> Mapping[str, type[RunLogger]]:
    """Every logger class by its name."""
    return discovered(sys.modules[__name__], RunLogger, "logger_name")  # type: ignore[type-abstract]


def not_installed(names: Iterable[str]) -> list[Problem]:
    """A problem for each of these loggers whose library is not installed."""
    packages = dict.fromkeys(loggers()[name].package for name in names)
    return [
        Problem("task.loggers", f"{package} is not installed", f"pip install 'hookrun[{package}]'")
        for package in packages
        if not _is_there(package)
    ]


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module in sys.modules that has no __spec__
        return False
