"""Checks of the values that a user's own loop logs: metrics are numbers, steps are counts, splits are short texts."""

from __future__ import annotations

from typing import Any

from hookrun.errors import HookrunError
from hookrun.store.records import MOST_COUNT, MOST_NAME


def number(name: str, value: Any) -> int | float:
    """The value of a metric as a Python number. HookrunError, naming the metric, for anything but one number."""
    if len(name) > MOST_NAME:
        raise HookrunError(f"log: a name of {len(name):,} characters, at most {MOST_NAME:,} are kept")
    found = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        try:
            found = value.item()
        except RuntimeError as error:  # a meta tensor
            raise HookrunError(f"log: {name}: its value cannot be read: {error}") from error
    if not isinstance(found, int | float):
        shape = getattr(value, "shape", None)
        what = f"a {type(value).__name__}" + (f" of shape {list(shape)}" if shape is not None else "")
        hint = "log one number, for example its mean" if shape is not None else "log numbers only"
        raise HookrunError(
            f"log: {name}: found {what}, expected a number or a tensor of no dimensions: {hint}"
        )
    if isinstance(found, int) and abs(found) > MOST_COUNT:
        raise HookrunError(f"log: {name}: a whole number beyond 2**53 is not kept exactly: log it as a float")
    return found


def counted(name: str, value: Any) -> int:
    """A step or an epoch. HookrunError if it is not an integer of at least 0."""
    found = number(name, value)
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise HookrunError(f"log: {name}: found {value!r}, expected a whole number from 0")
    return found


def split_name(split: Any) -> str:
    """The split. HookrunError if it is not a short text."""
    if not isinstance(split, str) or len(split) > MOST_NAME:
        raise HookrunError(
            f"log: split: found {split!r:.100}, expected a short text such as 'train' or 'val'"
        )
    return split
