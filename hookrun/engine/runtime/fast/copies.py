"""Copies of tensors and captured values: copy-on-write where the original is not affected, real copies elsewhere.

A write to a copy-on-write tensor moves it to other memory. Every torch tensor that shares the storage moves with it; a
NumPy array, a DLPack import, another process or a mapped file does not, and would stop sharing the memory. So only a
storage that nothing outside torch is known to share becomes copy-on-write. Addresses taken as plain numbers
(`data_ptr()`, `__cuda_array_interface__`) leave no trace in a tensor and cannot be detected; those that torch itself
takes in `allow_mutation_on_saved_tensors` are known, so nothing is copy-on-write there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, graph
from torch.nn import Parameter

from hookrun.engine.actions.base import TokenRows
from hookrun.engine.runtime.fast import private
from hookrun.engine.values.containers import functorch_level

NAMES = (
    "_lazy_clone",
    "_C._set_grad_enabled",
    "_C._storage_Use_Count",
    "_C._is_cow_tensor",
    "Tensor._use_count",
    "autograd.graph._allow_mutation_on_saved_tensors_enabled",
    "autograd.forward_ad._current_level",
)
lazy_clone, set_grad_enabled, storage_holders, _is_copy_on_write, use_count, *_ = private(*NAMES)
_is_usable = lazy_clone is not None


def _alone() -> tuple[int, int, int]:
    """torch's reference counts of a storage with one tensor, of that tensor, and of a base with one view."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    references = use_count(tensor)
    holders = storage_holders(storage._cdata)
    view = tensor.view(1)
    base = view._base
    return holders, references, use_count(base) if base is not None else 0


ALONE, UNSHARED, _BASE_OF_ONE = _alone() if _is_usable else (0, 0, 0)
"""torch's reference counts of a storage that has one tensor, and of a tensor that DLPack has not exported."""

OF_GRADIENT = UNSHARED + 1
"""torch's reference count of a gradient in a tensor hook: the backward pass refers to it too."""


def owned(tensor: Tensor, *, whole: bool = False) -> bool:
    """Whether the tensor's memory may become copy-on-write: nothing outside torch is known to share it.

    False for memory that torch did not allocate or that NumPy or DLPack shares, for tensors without their own storage
    (sparse, wrapped by `torch.func`), for those that hold more than a storage (a quantizer, a tangent of forward-mode
    differentiation), and if the answer would be expensive to find.

    whole: whether the storage must also be no larger than the tensor, so that a copy holds nothing else
    """
    kind = type(tensor)
    if (
        not _is_usable
        or (kind is not Tensor and kind is not Parameter)
        or tensor.is_quantized
        or functorch_level() is not None
        or forward_ad._current_level >= 0
        or graph._allow_mutation_on_saved_tensors_enabled
    ):
        return False
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # sparse, mkldnn
        return False
    # Not resizable: `numpy()`, `from_numpy`, `frombuffer`, a mapped file.
    if not storage.resizable() or (whole and storage.nbytes() > tensor.nbytes):
        return False
    holders = storage_holders(storage._cdata)
    if holders == ALONE and use_count(tensor) == UNSHARED:  # the usual case
        return True
    # An export after the memory became copy-on-write would have ended copy-on-write.
    return _is_copy_on_write(tensor) or held_by_torch_alone(tensor, holders)


def _unexported(tensor: Tensor, references: int) -> bool:
    """Whether DLPack has not exported the tensor: an export holds a reference, and none may require a gradient."""
    computed = tensor.grad_fn is not None and tensor._version == 0
    return computed or use_count(tensor) <= references


def held_by_torch_alone(tensor: Tensor, holders: int) -> bool:
    """Whether only the tensor, its base, and autograd's saved copies of them refer to the storage."""
    base = tensor._base
    known = ALONE + _saved_results(tensor)
    if base is None:
        return holders == known and _unexported(tensor, UNSHARED)
    if not _unexported(tensor, UNSHARED) or not _unexported(base, _BASE_OF_ONE):
        return False
    return holders == known + 1 + _saved_results(base)


def _saved_results(tensor: Tensor) -> int:
    """1 if the operation that computed the tensor saved it for the backward pass, as ReLU and softmax do; else 0."""
    return int(tensor.grad_fn is not None and hasattr(type(tensor.grad_fn), "_raw_saved_result"))


def snapshot_of_tensor(tensor: Tensor) -> Tensor:
    """A detached copy of the tensor, whose storage holds nothing else; copy-on-write where that is safe."""
    if owned(tensor, whole=True):
        try:
            return lazy_clone(tensor.detach())
        except RuntimeError:  # shared memory, an allocator of another library
            pass
    return tensor.detach().clone()


def held_bytes(tensor: Tensor) -> int:
    """The bytes that `snapshot_of_tensor` of the tensor holds: for an expanded tensor, those of its storage."""
    parts = _PARTS.get(tensor.layout)
    if parts is not None:
        return sum(held_bytes(getattr(tensor, part)()) for part in parts)
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if owned(tensor) else size


_BY_ROWS = ("crow_indices", "col_indices", "values")
_BY_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS: Mapping[torch.layout, Sequence[str]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
    torch.jagged: ("values",),
}
"""Layout of a tensor that consists of others -> the methods that return these."""


class KeptInMemory:
    """Appends copies of the values captured at one module to a list.

    It copies on write or clones at once; both give the same values. Copy-on-write costs almost nothing if the value is
    not written later, and more than a clone if it is (the copy runs on one thread). Whether the first value gets
    written decides for all later ones. Shared memory and views of larger memory are always cloned.

    append_copy: appends a copy of a value whose memory may not be shared, or that is not a tensor
    """

    def __init__(self, values: list[Any], append_copy: Callable[[list[Any], Any], None]) -> None:
        self._values = values
        self._append_copy = append_copy
        self._copy = lazy_clone
        self._is_decided = False
        self._first: Tensor | None = None  # the first value, until it is known whether it gets written
        self._version = 0

    def __call__(self, value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
        """Append any value."""
        if type(value) is not Tensor or not owned(value, whole=True):
            self._append_copy(self._values, value)
            return
        if not self._is_decided:
            self._decide(value)
        try:
            self._values.append(self._copy(value.detach() if value.requires_grad else value))
        except RuntimeError:  # shared memory, or memory of another library's allocator
            self._values.append(value.detach().clone())

    def _decide(self, value: Tensor) -> None:
        if self._first is None and not value.is_inference():  # inference tensors have no version
            self._first = value.detach()
            self._version = value._version
            return
        if self._first is not None and self._first._version != self._version:
            self._copy = torch.clone
        self._first = None
        self._is_decided = True

    def observer(
        self,
        site: Any,
        otherwise: Callable[[Any], Any],
        *,
        references: int = UNSHARED,
        new: bool = False,
    ) -> Callable[[Any], Any]:
        """A faster op of a site than `otherwise`, its op for any value, which it calls for unusual values.

        The usual case of `owned`, and the copy, in one function: each call would cost as much as two checks.

        site:       the `HookSite`, whose firings it counts
        references: torch's reference count of a tensor to which only Python and the caller of the hook refer
        new:        the values are outputs of a torch module that returns a new tensor (unless torch's function was
                    replaced)
        """
        if not _is_usable:
            return otherwise
        append = self._values.append
        is_grad_enabled = torch.is_grad_enabled

        def observe(value: Any) -> Any:
            if (
                type(value) is not Tensor
                or functorch_level() is not None
                or forward_ad._current_level >= 0
                or value.is_quantized
                or graph._allow_mutation_on_saved_tensors_enabled
            ):
                return otherwise(value)
            try:
                storage = value.untyped_storage()
                if use_count(value) != references or not storage.resizable():
                    return otherwise(value)
                if not new:
                    holders = storage_holders(storage._cdata)
                    is_shared = holders != ALONE and not held_by_torch_alone(value, holders)
                    if is_shared or storage.nbytes() > value.nbytes:
                        return otherwise(value)
                if not self._is_decided:
                    self._decide(value)
                if value.requires_grad:
                    grad = is_grad_enabled()
                    set_grad_enabled(False)  # costs half as much as a detached alias
                    try:
                        kept = self._copy(value)
                    finally:
                        set_grad_enabled(grad)
                else:
                    kept = self._copy(value)
            except RuntimeError:  # sparse, shared memory, or memory of another library's allocator
                return otherwise(value)
            site.fired += 1
            append(kept)
            return value

        return observe
