"""Captured values in memory: copies that later in-place writes do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookrun.actions.site import TokenRows
from hookrun.runtime.fast.copies import (
    ALONE,
    UNSHARED,
    held_by_torch_alone,
    lazy_clone,
    owned,
    set_grad_enabled,
    storage_holders,
)
from hookrun.runtime.snapshot import in_reach, snapshot
from hookrun.values.containers import functorch_level
from hookrun.values.tensors import holds_data

if TYPE_CHECKING:
    from hookrun.runtime.site import HookSite

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
        is_grad_enabled = torch.is_grad_enabled
        copy, first, version = lazy_clone, None, 0

        def keep(value: Any, references: int = UNSHARED) -> None:
            if type(value) is Tensor and owned(value, whole=True, references=references):
                keep_owned(value)
            else:
                _keep_any(append, value)

        def observer(
            site: HookSite,
            otherwise: Callable[[Any], Any],
            *,
            references: int = UNSHARED,
            new: bool = False,
        ) -> Callable[[Any], Any]:
            def observe(value: Any) -> Any:
                # The usual case of `owned`, and the copy, in one function: each call would cost as much as two checks.
                if first is not _DECIDED or type(value) is not Tensor or functorch_level() is not None:
                    return otherwise(value)
                try:
                    storage = value.untyped_storage()
                    if value._use_count() != references or not storage.resizable():
                        return otherwise(value)
                    if not new:
                        holders = storage_holders(storage._cdata)
                        if holders != ALONE and not held_by_torch_alone(value, holders):
                            return otherwise(value)
                        if storage.nbytes() > value.nbytes:
                            return otherwise(value)
                    if value.requires_grad:
                        grad = is_grad_enabled()
                        set_grad_enabled(False)  # costs half as much as a detached alias
                        try:
                            kept = copy(value)
                        finally:
                            set_grad_enabled(grad)
                    else:
                        kept = copy(value)
                except RuntimeError:  # sparse, shared memory, or memory of another library's allocator
                    return otherwise(value)
                site.fired += 1
                append(kept)
                return value

            return observe

        def keep_owned(value: Tensor) -> None:
            nonlocal copy, first, version
            if first is not _DECIDED:
                if first is None and not value.is_inference():  # inference tensors have no version
                    first, version = value.detach(), value._version
                else:
                    copy = torch.clone if first is not None and first._version != version else lazy_clone
                    first = _DECIDED
            try:
                append(copy(value.detach() if value.requires_grad else value))
            except RuntimeError:  # shared memory, or memory of another library's allocator
                append(value.detach().clone())

        self.keep = keep
        """Append any value; references: see `observer`."""
        self.observer = observer
        """A faster op of a site than `otherwise`, its op for any value, which it calls for unusual values.

        references: torch's reference count of a tensor to which only Python and the caller of the hook refer
        new:        the values are outputs of a torch module that returns a new tensor (unless torch's function was
                    replaced)
        """

    def __call__(self, value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
        """Append any value."""
        self.keep(value)


def _keep_any(append: Callable[[Any], None], value: Any) -> None:
    if type(value) is Tensor and functorch_level() is None and holds_data(value):
        append(value.detach().clone() if value.requires_grad else value.clone())
    elif (value := in_reach(value)) is not None:
        with torch._C._DisableFuncTorch():
            append(snapshot(value))
