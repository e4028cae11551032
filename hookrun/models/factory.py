"""A user's own model, `name: python`: the factory function of a package that the user trusts.

Experiment files are exchanged between people, so a file that names a function must not be enough to run it. Trust is
given on the command line, in the environment or by an installed package, and is checked before anything is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hookrun.arguments import missing_arguments, parameters, unknown_arguments
from hookrun.errors import Problem, SpecError, nearest, reason
from hookrun.models.arguments import ModelCall

if TYPE_CHECKING:
    from hookrun.spec.experiment import Model

VARIABLE = "HOOKRUN_TRUST"
GROUP = "hookrun.models"
_WHERE = "model.factory"
_ARGS = "model.args"
_FACTORY = re.compile(r"(?P<package>[^\W\d]\w*)(\.[^\W\d]\w*)*:[^\W\d]\w*")


def prepare(config: Model, trust: frozenset[str]) -> ModelCall:
    """The factory with its arguments, imported. Raises SpecError if it is not trusted, not there, or not a factory."""
    text = config.factory or ""
    match = _FACTORY.fullmatch(text)
    if match is None:
        what = f"'{text}' is not of the form package.module:function"
        raise SpecError([Problem(_WHERE, what, "write it as mypkg.models:build")])
    package = match["package"]
    by_hand = package in trust | _environment()
    if not by_hand and package not in _installed():
        what = f"the package '{package}' is not trusted, and a factory runs its code"
        hint = (
            f"if you trust it, type +trust=[{package}] on the command line, set {VARIABLE}={package} in the "
            f"environment, or install it with an entry point in the group '{GROUP}'"
        )
        raise SpecError([Problem(_WHERE, what, hint)])
    module, _, name = text.partition(":")
    with _current_directory(by_hand):
        factory = _function(_imported(module), name, package)
    found = parameters(factory)
    problems: list[Problem] = []
    if found is not None:
        problems += unknown_arguments(config.args, found, _ARGS, text)
        problems += missing_arguments(config.args, found, _ARGS, text)

    def call(**args: Any) -> object:
        with _current_directory(by_hand):
            try:
                return factory(**args)
            except Exception as error:
                what = f"'{text}' failed: {_traced(error, package)}"
                raise SpecError([Problem(_ARGS, what, "correct it, or its arguments")]) from error

    return ModelCall(call, config.args, tuple(problems))


def _environment() -> set[str]:
    return {name.strip() for name in os.environ.get(VARIABLE, "").split(",")}


def _installed() -> set[str]:
    """The packages that installed entry points of the group name, without those found in the current directory.

    `python -m` puts the current directory on the path, and anybody may have left package metadata there.
    """
    here = Path.cwd().resolve()
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    return {
        point.module.split(".")[0]
        for distribution in importlib.metadata.distributions(path=path)
        for point in distribution.entry_points
        if point.group == GROUP
    }


@contextmanager
def _current_directory(importable: bool) -> Iterator[None]:
    """Put the current directory on the import path, where `python -m` has it and the console script does not.

    importable: False for a package that is trusted because it is installed: another package of the same name in the
                current directory must not take its place
    """
    here = str(Path.cwd())
    if not importable or "" in sys.path or here in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(module, error) from error  # the module exists; something that it imports does not
        parent, _, last = error.name.rpartition(".")
        if not parent:
            what = f"there is no package '{error.name}', neither installed nor in {Path.cwd()}"
            raise SpecError(
                [Problem(_WHERE, what, "install it, or start from the folder that holds it")]
            ) from error
        inside = [each.name for each in pkgutil.iter_modules(getattr(sys.modules[parent], "__path__", []))]
        what = f"'{parent}' has no module '{last}'; {nearest(last, inside)}"
        raise SpecError([Problem(_WHERE, what, "correct the name")]) from error
    except Exception as error:
        raise _failed(module, error) from error


def _failed(module: str, error: Exception) -> SpecError:
    what = f"importing '{module}' failed: {_traced(error, module.split('.')[0])}"
    return SpecError([Problem(_WHERE, what, f"see that `import {module}` works")])


def _function(module: ModuleType, name: str, package: str) -> Callable[..., object]:
    """The factory, which must be defined in the trusted package: a module's namespace also holds what it imports."""

    def ours(value: object) -> bool:
        return callable(value) and str(getattr(value, "__module__", "")).split(".")[0] == package

    value: Any = getattr(module, name, None)
    if ours(value):
        factory: Callable[..., object] = value
        return factory
    if value is None:
        options = [each for each, candidate in vars(module).items() if ours(candidate)]
        what = f"'{module.__name__}' has no function or class '{name}'; {nearest(name, options)}"
        raise SpecError([Problem(_WHERE, what, "correct the name")])
    if not callable(value):
        what = f"'{module.__name__}:{name}' is {type(value).__qualname__}, neither a function nor a class"
        raise SpecError([Problem(_WHERE, what, "name a function or class that returns the module")])
    origin = getattr(value, "__module__", type(value).__module__)
    what = f"'{module.__name__}:{name}' comes from '{origin}', and only '{package}' is trusted"
    raise SpecError([Problem(_WHERE, what, f"wrap it in a function of '{package}'")])


def _traced(error: Exception, package: str) -> str:
    """The exception in one line, with the innermost line of the package that led to it."""
    places = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).split(".")[0] == package
    ]
    return reason(error) + (f" (at {places[-1]})" if places else "")
