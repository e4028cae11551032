"""Copies of tensors: copy-on-write where the original is not affected, real copies elsewhere.

A write to a copy-on-write tensor moves it to other memory. Every torch tensor that shares the storage moves with it; a
NumPy array, a DLPack import, another process or a mapped file does not, and would stop sharing the memory. So only a
storage that nothing outside torch is known to share becomes copy-on-write. Addresses taken as plain numbers
(`data_ptr()`, `__cuda_array_interface__`) leave no trace in a tensor and cannot be detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from hookrun.runtime.fast import private
from hookrun.values.containers import functorch_level

NAMES = (
    "_lazy_clone",
    "_C._set_grad_enabled",
    "_C._storage_Use_Count",
    "_C._is_cow_tensor",
    "Tensor._use_count",
)
lazy_clone, set_grad_enabled, storage_holders, _is_copy_on_write, _ = private(*NAMES)
_is_usable = lazy_clone is not None


def _alone() -> tuple[int, int, int]:
    """torch's reference counts of a storage with one tensor, of that tensor, and of a base with one view."""
    tensor = torch.empty(1, device="cpu")
    storage, references = tensor.untyped_storage(), tensor._use_count()
    holders = storage_holders(storage._cdata)
    view = tensor.view(1)
    base = view._base
    return holders, references, base._use_count() if base is not None else 0


ALONE, UNSHARED, _BASE_OF_ONE = _alone() if _is_usable else (0, 0, 0)
"""torch's reference counts of a storage that has one tensor, and of a tensor that DLPack has not exported."""

OF_GRADIENT = UNSHARED + 1
"""torch's reference count of a gradient in a tensor hook: the backward pass refers to it too."""


def owned(tensor: Tensor, *, whole: bool = False, references: int = UNSHARED) -> bool:
    """Whether the tensor's memory may become copy-on-write: nothing outside torch is known to share it.

    False for memory that torch did not allocate or that NumPy or DLPack shares, for tensors without their own storage
    (sparse, wrapped by `torch.func`), and if the answer would be expensive to find.

    whole:      whether the storage must also be no larger than the tensor, so that a copy holds nothing else
    references: torch's reference count of a tensor to which only torch and Python refer
    """
    kind = type(tensor)
    if not _is_usable or (kind is not Tensor and kind is not Parameter) or functorch_level() is not None:
        return False
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # sparse, mkldnn
        return False
    # Not resizable: `numpy()`, `from_numpy`, `frombuffer`, a mapped file.
    if not storage.resizable() or (whole and storage.nbytes() > tensor.nbytes):
        return False
    holders = storage_holders(storage._cdata)
    if holders == ALONE and tensor._use_count() == references:  # the usual case
        return True
    # An export after the memory became copy-on-write would have ended copy-on-write.
    return _is_copy_on_write(tensor) or held_by_torch_alone(tensor, holders)


def _unexported(tensor: Tensor, references: int) -> bool:
    """Whether DLPack has not exported the tensor: an export holds a reference, and none may require a gradient."""
    computed = tensor.grad_fn is not None and tensor._version == 0
    return computed or tensor._use_count() <= references


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
            copied: Tensor = lazy_clone(tensor.detach())
            return copied
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
