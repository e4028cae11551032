"""Captured values in memory: each is what the value was when it was captured."""

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
"""Stands for a first captured value that is no longer needed."""


class KeptInMemory:
    """Appends to a list what was captured at one module.

    Both ways to copy are right, whatever happens to the value. Copy-on-write costs next to nothing where nothing is
    written, and more than a clone where it is (its copy runs on one thread): the first value decides. Memory that
    others share, and views of larger memory, are always copied.
    """

    def __init__(self, values: list[Any]) -> None:
        append = values.append  # and nothing of self: what is kept is freed with the last reference to it
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
                except RuntimeError:  # as in keep_owned, which is a call more
                    append(value.detach().clone())

        def keep_gradient(value: Any) -> None:
            if type(value) is Tensor and owned(value, whole=True, references=OF_GRADIENT):
                keep_owned(value)
            else:
                _keep_any(append, value)

        def keep_owned(value: Tensor) -> None:
            nonlocal copy, first, version
            if first is not _DECIDED:
                if first is None and not value.is_inference():  # which keep no version
                    first, version = value.detach(), value._version
                else:
                    copy = torch.clone if first is not None and first._version != version else lazy_clone
                    first = _DECIDED
            try:
                if not value.requires_grad:
                    append(copy(value))
                    return
                grad = is_grad_enabled()
                set_grad_enabled(False)  # half the price of a detached alias
                try:
                    append(copy(value))
                finally:
                    set_grad_enabled(grad)
            except RuntimeError:  # shared memory, an allocator of another library
                append(value.detach().clone())

        self.keep = keep
        """Append any value."""
        self.keep_new = keep_new
        """Append what a module of torch's has returned: a new tensor, unless somebody has replaced torch's function."""
        self.keep_gradient = keep_gradient
        """Append a value that a tensor hook is given."""

    def __call__(self, value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
        """Append any value."""
        self.keep(value)


def _keep_any(append: Callable[[Any], None], value: Any) -> None:
    if type(value) is Tensor and functorch_level() is None and holds_data(value):
        append(value.detach().clone() if value.requires_grad else value.clone())
    elif (value := in_reach(value)) is not None:
        with torch._C._DisableFuncTorch():
            append(snapshot(value))
