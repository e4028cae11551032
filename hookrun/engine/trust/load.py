"""A user's own Python by name, ``package.module:name``, for models, data, losses, metrics, optimizers and actions.

Experiment files are shared, so naming a function in a file must not be enough to run it. Trust is given on the command
line, in the environment or by an installed package, and is checked before anything is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hookrun.engine.trust import VARIABLE, of_environment
from hookrun.engine.trust.callables import Code, code_of_name, module_name, place_of
from hookrun.errors import SpecError, nearest, reason, refused_at, spec_error


@dataclass(frozen=True, slots=True)
class Kind:
    """What is named, for the messages.

    example: of the form ``package.module:name``
    returns: hint if the name refers to something else
    group:   entry-point group by which an installed package is trusted and defines short names; None: any of hookrun's
    """

    example: str
    returns: str
    group: str | None


MODELS = Kind("mypkg.models:build", "name a function or class that returns the module", "hookrun.models")
DATA = Kind("mypkg.data:build", "name a function or class that returns the data of a split", "hookrun.data")
COLLATES = Kind(
    "mypkg.data:collate",
    "name a function that takes a list of samples and returns (inputs, targets)",
    DATA.group,
)
LOSSES = Kind("mypkg.losses:mine", "name a function or class that computes the loss", "hookrun.losses")
METRICS = Kind("mypkg.metrics:mine", "name a function or class that computes the metric", "hookrun.metrics")
ACTIONS = Kind("mypkg.hooks:soften", "name a function or class that takes the value", "hookrun.actions")
OPTIMIZERS = Kind("mypkg.optim:Mine", "name a subclass of torch.optim.Optimizer", None)
SCHEDULERS = Kind("mypkg.optim:Mine", "name a subclass of torch.optim.lr_scheduler.LRScheduler", None)

EXAMPLES = "hookrun.examples"
"""The one module of hookrun whose functions a file may name; they need no trust."""

_GROUPS = tuple(kind.group for kind in (MODELS, DATA, LOSSES, METRICS, ACTIONS))
_FORM = re.compile(r"(?P<package>[^\W\d]\w*)(\.[^\W\d]\w*)*:(?P<name>[^\W\d]\w*)")
_SHORT = re.compile(r"[^\W\d][\w.-]*")


@dataclass(frozen=True, slots=True)
class Trusted:
    """A callable of a package that the user trusts.

    text:    ``package.module:name``
    by_hand: trusted on the command line or in the environment; False: by an installed entry point
    """

    text: str
    target: Callable[..., Any]
    code: Code
    by_hand: bool

    @property
    def name(self) -> str:
        """The name of the function or class alone."""
        return self.text.partition(":")[2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, with the current directory on the import path. Raises what it raises."""
        with _current_directory(self.by_hand):
            return self.target(*args, **kwargs)

    def failure(self, error: BaseException) -> str:
        """An exception of it in one line, with the line of its package that led to it."""
        return f"'{self.text}' failed: {reason(error)}{place_of(error, self.code.package)}"

    def refused(self, where: str) -> AbstractContextManager[None]:
        """A block that calls it, in which any exception becomes a SpecError at the key of its arguments."""
        return refused_at(where, "correct it, or its arguments", kinds=Exception, tell=self.failure)


def short_names(kind: Kind) -> list[str]:
    """The short names that installed packages define for objects of this kind."""
    return sorted({point.name for point in _entry_points() if point.group == kind.group})


def load(text: str, kind: Kind, where: str, trust: frozenset[str] = frozenset()) -> Trusted:
    """The callable that `text` names: ``package.module:name``, or the short name that an installed package gives it.

    where: the key path, for errors
    trust: packages that are trusted beside those that the environment trusts

    Raises SpecError if it is not trusted, does not exist, or is not a function or class; nothing is imported before
    trust is checked.
    """
    by_name = _SHORT.fullmatch(text) is not None
    full = _installed_as(text, kind, where) if by_name else text
    match = _FORM.fullmatch(full)
    if match is None:
        raise spec_error(
            where, f"'{full}' is not of the form package.module:function", f"write it as {kind.example}"
        )
    package = match["package"]
    name = match["name"]
    module = full.partition(":")[0]
    if package in sys.stdlib_module_names:
        raise spec_error(
            where,
            f"the package '{package}' is not trusted: it belongs to Python itself, with which a file could run "
            "anything",
            "name a function of a package of your own",
        )
    if name.startswith("__"):
        raise spec_error(
            where, f"'{name}' is a name that Python reserves", "name a function or class of the package"
        )
    by_hand = package in trust | of_environment() and not by_name
    if module != EXAMPLES and not by_hand and package not in _installed_packages(kind):
        group = f", or install it with an entry point in the group '{kind.group}'" if kind.group else ""
        raise spec_error(
            where,
            f"the package '{package}' is not trusted, and naming a function of it runs its code",
            f"if you trust it, type +trust=[{package}] on the command line, set {VARIABLE}={package} in the "
            f"environment{group}",
        )
    owner = EXAMPLES if module == EXAMPLES else package
    with _current_directory(by_hand):
        target = _function(_imported(module, where), name, owner, kind, where)
    return Trusted(full, target, code_of_name(target, full), by_hand)


def load_class(text: str, base: type, kind: Kind, where: str) -> type:
    """The subclass of `base` that `text` names. Raises SpecError as `load` does, and for anything else."""
    target = load(text, kind, where).target
    if isinstance(target, type) and issubclass(target, base):
        return target
    raise spec_error(
        where,
        f"'{text}' is {_kind_of(target)}, not a subclass of {base.__module__}.{base.__qualname__}",
        kind.returns,
    )


def is_user_code(text: str, kind: Kind) -> bool:
    """Whether a name refers to the user's own Python: by its form, or because an installed package defines it."""
    return ":" in text or text in short_names(kind)


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    """Those of installed packages in hookrun's groups, without those found in the current directory.

    `python -m` puts the current directory on the path, and anybody may have left package metadata there.
    """
    folder = Path.cwd().resolve()
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    points: list[importlib.metadata.EntryPoint] = []
    for distribution in importlib.metadata.distributions(path=path):
        points += [point for point in distribution.entry_points if point.group in _GROUPS]
    return points


def _installed_packages(kind: Kind) -> set[str]:
    """The packages that installed entry points name."""
    return {point.module.split(".")[0] for point in _entry_points() if kind.group in (None, point.group)}


def _installed_as(short: str, kind: Kind, where: str) -> str:
    values = {point.value for point in _entry_points() if point.group == kind.group and point.name == short}
    if len(values) == 1:
        return re.sub(r"\s|\[.*", "", values.pop())
    if values:
        raise spec_error(
            where,
            f"several installed packages give the name '{short}': {', '.join(sorted(values))}",
            "write the one that you mean in full",
        )
    raise spec_error(
        where,
        f"'{short}' is not of the form package.module:function, and no installed package has an entry point "
        f"'{short}' in the group '{kind.group}'",
        f"write it as {kind.example}",
    )


@contextmanager
def _current_directory(importable: bool) -> Iterator[None]:
    """Put the current directory on the import path, where `python -m` has it and the console script does not.

    importable: False for a package that is trusted because it is installed: another package of the same name in the
                current directory must not take its place
    """
    folder = str(Path.cwd())
    if not importable or "" in sys.path or folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _imported(module: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            # the module exists; something that it imports does not
            raise _failed(module, where, error) from error
        parent, _, last = error.name.rpartition(".")
        if not parent:
            raise spec_error(
                where,
                f"there is no package '{error.name}', neither installed nor in {Path.cwd()}",
                "install it, or start from the folder that holds it",
            ) from error
        path = getattr(sys.modules[parent], "__path__", [])
        inside = [info.name for info in pkgutil.iter_modules(path)]
        raise spec_error(
            where, f"'{parent}' has no module '{last}'; {nearest(last, inside)}", "correct the name"
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(module, where, error) from error


def _failed(module: str, where: str, error: BaseException) -> SpecError:
    return spec_error(
        where,
        f"importing '{module}' failed: {reason(error)}{place_of(error, module.split('.')[0])}",
        f"check that `import {module}` works",
    )


def _function(module: ModuleType, name: str, owner: str, kind: Kind, where: str) -> Callable[..., Any]:
    """The function, which must be defined in the trusted package, not only imported there.

    owner: the trusted package, or the one module of it that is trusted
    """

    def ours(value: object) -> bool:
        return callable(value) and f"{module_name(value)}.".startswith(f"{owner}.")

    value: Any = getattr(module, name, None)
    if ours(value):
        return value
    if value is None:
        options = [option for option, candidate in vars(module).items() if ours(candidate)]
        raise spec_error(
            where,
            f"'{module.__name__}' has no function or class '{name}'; {nearest(name, options)}",
            "correct the name",
        )
    if not callable(value):
        raise spec_error(
            where,
            f"'{module.__name__}:{name}' is {_kind_of(value)}, neither a function nor a class",
            kind.returns,
        )
    trusted = "a package of your own" if owner == EXAMPLES else f"'{owner}'"
    raise spec_error(
        where,
        f"'{module.__name__}:{name}' comes from '{module_name(value)}', and only '{owner}' is trusted",
        f"wrap it in a function of {trusted}",
    )


def _kind_of(value: object) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else type(value).__qualname__
