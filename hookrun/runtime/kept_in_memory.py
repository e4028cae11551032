"""Captured values in memory: copies that later in-place writes do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.rows import TokenRows
from hookrun.actions.tensors import holds_data
from hookrun.snapshot import in_reach, snapshot
from hookrun.tensor_copies import OF_GRADIENT, functorch_level, lazy_clone, not_exported, owned

_DECIDED = torch.empty(0)
"""Replaces the first captured value once it is no longer needed."""


class KeptInMemory:
    """Appends copies of the values captured at one module to a list.

    It copies on write or clones at once; both give the same values. Copy-on-write costs almost nothing if the value is
    not written later, and more than a clone if it is (the copy runs on one thread). Whether the first value gets
    written decides for all later ones. Shared memory and views of larger memory are always cloned.
    """

    def __init__(self, values: list[Any]) -> None:
        # the functions do not refer to self: no reference cycle keeps the captures alive
        append = values.append
        is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
        copy, first, version = lazy_clone, None, 0

        def keep(value: Any) -> None:
            if type(value) is Tensor and owned(value, whole=True):
                keep_owned(value)
            else:
                _keep_any(append, value)

        def keep_new(value: Any) -> None:
            if type(value) is not Tensor or functorch_level() is not None or not not_exported(value):
                _keep_any(append, value)
            elif first is not _DECIDED or value.requires_grad:
                keep_owned(value)
            else:
                try:
                    append(copy(value))
                except RuntimeError:  # as in keep_owned, inlined to save a call
                    append(value.detach().clone())

        def keep_gradient(value: Any) -> None:
            if type(value) is Tensor and owned(value, whole=True, references=OF_GRADIENT):
                keep_owned(value)
            else:
                _keep_any(append, value)

        def keep_owned(value: Tensor) -> None:
            nonlocal copy, first, version
            if first is not _DECIDED:
                if first is None and not value.is_inference():  # inference tensors have no version
                    first, version = value.detach(), value._version
                else:
                    copy = torch.clone if first is not None and first._version != version else lazy_clone
                    first = _DECIDED
            try:
                if not value.requires_grad:
                    append(copy(value))
                    return
                grad = is_grad_enabled()
                set_grad_enabled(False)  # costs half as much as a detached alias
                try:
                    append(copy(value))
                finally:
                    set_grad_enabled(grad)
            except RuntimeError:  # shared memory, or memory of another library's allocator
                append(value.detach().clone())

        self.keep = keep
        """Append any value."""
        self.keep_new = keep_new
        """Append the output of a torch module that returns a new tensor (unless torch's function was replaced)."""
        self.keep_gradient = keep_gradient
        """Append a gradient that a tensor hook received."""

    def __call__(self, value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
        """Append any value."""
        self.keep(value)


def _keep_any(append: Callable[[Any], None], value: Any) -> None:
    if type(value) is Tensor and functorch_level() is None and holds_data(value):
        append(value.detach().clone() if value.requires_grad else value.clone())
    elif (value := in_reach(value)) is not None:
        with torch._C._DisableFuncTorch():
            append(snapshot(value))
