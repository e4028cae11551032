"""The tensors inside a captured value, each with its path in the grammar of `target`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for each tensor in nested tuples, lists, dicts, namedtuples and dataclasses.

    The path is ``""`` for a bare tensor, else such as ``[0]``, ``logits``, ``[0].logits``, ``['a key'][1]``.
    What is no tensor (None, a flag among the arguments) is no leaf.
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    for step, item in _items(value):
        yield from leaves(item, f"{path}.{step}" if path and not step.startswith("[") else path + step)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # before dataclasses: some model outputs are both
        for key, item in value.items():
            yield key if isinstance(key, str) and key.isidentifier() else f"[{key!r}]", item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        for position, item in enumerate(value):
            yield f"[{position}]", item
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield field.name, getattr(value, field.name)
