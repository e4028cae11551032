"""The form of a value: its containers as constants, without its tensors, which a compiled graph gives by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from hookrun.engine.values.containers import children

Form = Any
"""`Tensor` for a tensor; (class, ((key, form of the member), ...)) of a container; None, numbers and texts as they are;
the class of any other object."""


def form_of(value: Any, tensors: list[Tensor]) -> Form:
    """The form of a value, whose tensors are added to the list, detached. torch.compile traces it."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return Tensor
    members = children(value)
    if members or isinstance(value, (tuple, list, dict)):
        return type(value), tuple([(key, form_of(member, tensors)) for key, member in members])
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value)


def unknown_class(form: Form) -> type | None:
    """The class of an object in the value that is neither a container nor a constant, or None."""
    if isinstance(form, type):
        return None if form is Tensor else form
    if not isinstance(form, tuple):
        return None
    found = (unknown_class(member) for _, member in form[1])
    return next((each for each in found if each is not None), None)


def value_of(form: Form, tensors: Iterator[Tensor]) -> Any:
    """The value of a form, with the next of these tensors."""
    if form is Tensor:
        return next(tensors)
    if not isinstance(form, tuple):
        return form
    kind, described = form
    members = {key: value_of(member, tensors) for key, member in described}
    if hasattr(kind, "_make"):
        return kind._make(members.values())
    if is_dataclass(kind):
        return kind(**members)
    return kind(members if issubclass(kind, dict) else members.values())
