"""Identifies a callable for a plan, by its qualified name and a hash of its code. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

MOST_DEEP = 12
"""How many levels of closures and attributes the hash of a callable includes."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


@dataclass(frozen=True, slots=True)
class Code:
    """A callable by name.

    name:   ``package.module:function``
    sha256: hash of its code
    hashed: text that says what the hash includes
    """

    name: str
    sha256: str
    hashed: str

    @property
    def package(self) -> str:
        """The first part of the name."""
        return self.name.partition(":")[0].partition(".")[0]

    def to_dict(self) -> dict[str, str]:
        """Plain data for plan.json."""
        return {"function": self.name, "sha256": self.sha256, "hashed": self.hashed}


def qualified_name(target: object) -> str:
    """``package.module:function``; for a callable object that of its class."""
    target = _unwrapped(target)
    own = target if hasattr(target, "__qualname__") else type(target)
    return f"{module_name(own)}:{getattr(own, '__qualname__', type(own).__name__)}"


def code_of_name(target: object, name: str) -> Code:
    """A callable that was found by name, with a hash of the source of the module that defines it.

    Code in other modules is not included. Without Python source (a builtin, a compiled extension) the hash is of the
    qualified name and the version of the package.
    """
    defined = _unwrapped(target)
    if not hasattr(defined, "__module__") or not hasattr(defined, "__qualname__"):
        defined = type(defined)
    text = _source_of_module(defined)
    if text is None:
        return _without_source(defined, name)
    return Code(name, _sha(text), f"the source of the module {module_name(defined)}")


def code_of_class(cls: type) -> Code | None:
    """The class of an extension, such as an action, as by `code_of_name`; None for hookrun's own."""
    if cls.__module__.partition(".")[0] == "hookrun":
        return None
    return code_of_name(cls, f"{cls.__module__}:{cls.__qualname__}")


def code_of_given(target: Callable[..., Any]) -> Code:
    """A callable that was passed as an object, with a hash of the source of its module and of what it holds.

    It holds the values in its closure, its defaults and its attributes: plain values, tensors and functions are
    hashed by content, other objects by type and attributes. Of a lambda the bytecode is hashed as well.
    """
    defined = _unwrapped(target)
    if _is_builtin(defined):
        return _without_source(defined, qualified_name(defined))
    described = json.dumps(_described(target), sort_keys=True)
    return Code(qualified_name(target), _sha(described), "its source and the values that it uses")


def tensor_digest(tensor: Any) -> str:
    """SHA-256 of a tensor's dtype, shape and elements."""
    import torch

    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    content = f"{tensor.dtype}{list(tensor.shape)}".encode() + bytes(flat.view(torch.uint8).numpy())
    return hashlib.sha256(content).hexdigest()


def is_tensor(value: object) -> bool:
    """Whether it is a tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def place_of(error: BaseException, package: str) -> str:
    """The last line of a package in the traceback: `` (at FILE:LINE)``; empty if there is none."""
    places = [
        f" (at {frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).split(".")[0] == package
    ]
    return places[-1] if places else ""


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _unwrapped(target: Any) -> Any:
    """The function inside decorators that use `functools.wraps`."""
    try:
        return inspect.unwrap(target) if callable(target) else target
    except ValueError:  # a cycle of wrappers
        return target


def module_name(target: object) -> str:
    """The module that defines it; for torch's builtins that of the class they are bound to."""
    name = getattr(target, "__module__", None)
    if name is None:
        bound = getattr(target, "__self__", None)
        name = getattr(bound if isinstance(bound, type) else type(bound), "__module__", None)
    return str(name)


def _is_builtin(target: object) -> bool:
    return inspect.isbuiltin(target) or inspect.ismethoddescriptor(target)


def _source_of_module(target: object) -> str | None:
    """The source of the module that defines it, else its own, as in a notebook; None without any."""
    module = sys.modules.get(module_name(target))
    for defined in (module, target):
        try:
            return inspect.getsource(defined)  # type: ignore[arg-type]
        except (OSError, TypeError):
            continue
    return None


def _without_source(target: object, name: str) -> Code:
    package = module_name(target).split(".")[0]
    release = f"Python {sys.version.split()[0]}"
    if package not in sys.stdlib_module_names:
        try:
            release = f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            release = f"{package}, of which no version is known"
    return Code(name, _sha(f"{name} {release}"), f"its name and {release}: it has no Python source")


def _described(value: Any, within: tuple[int, ...] = ()) -> Any:
    """The value as plain data, which changes with its content.

    within: the ids of the objects that hold it
    """
    if isinstance(value, _PLAIN):
        return [type(value).__name__, repr(value)]
    if id(value) in within or len(within) > MOST_DEEP:
        return ["again", type(value).__qualname__]

    def of(part: Any) -> Any:
        return _described(part, (*within, id(value)))

    if is_tensor(value):
        readable = str(value.layout) == "torch.strided" and not value.is_meta
        return ["tensor", tensor_digest(value) if readable else f"{value.dtype}{list(value.shape)}"]
    match value:
        case Mapping():
            return ["mapping", [[of(key), of(member)] for key, member in value.items()]]
        case list() | tuple():
            return [type(value).__name__, list(map(of, value))]
        case set() | frozenset():
            return ["set", sorted(json.dumps(of(member)) for member in value)]
        case functools.partial():
            return ["partial", of([value.func, value.args, value.keywords])]
        case MethodType():
            return ["method", of(value.__func__), of(value.__self__)]
        case ModuleType():
            return ["module", value.__name__]
        case CodeType():  # of a lambda, beside which its line may have others
            return ["code", value.co_code.hex(), of(value.co_names), of(value.co_consts)]
        case FunctionType():
            source = _source_of_module(value)
            held = [value.__defaults__, value.__kwdefaults__, *map(_content_of, value.__closure__ or ())]
            if source is None or value.__name__ == "<lambda>":
                held.append(value.__code__)
            return ["function", qualified_name(value), source, of(held), of(vars(value))]
        case type():
            return ["class", qualified_name(value), _source_of_module(value)]
    if _is_builtin(value):
        return ["builtin", _without_source(value, qualified_name(value)).sha256]
    return ["object", of(type(value)), of(getattr(value, "__dict__", {}))]


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
