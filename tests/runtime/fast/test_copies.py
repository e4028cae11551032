"""Copies of tensors do not change the original, and share memory only where that has no effect."""

from __future__ import annotations

import numpy as np
import torch

from hookrun.runtime.fast.copies import held_bytes, owned, snapshot_of_tensor


def test_memory_visible_outside_torch_is_copied_at_once() -> None:
    array = np.zeros(4, dtype=np.float32)
    seen = torch.zeros(4)
    view = seen.numpy()
    exported = torch.zeros(4)
    capsule = torch.utils.dlpack.to_dlpack(exported)  # type: ignore[attr-defined]
    assert owned(torch.zeros(4)) and not owned(torch.nn.Parameter(torch.zeros(4)).to_sparse())
    for tensor in (
        torch.from_numpy(array),
        seen,
        exported,
        torch.frombuffer(bytearray(16), dtype=torch.float32),
    ):
        place = tensor.data_ptr()
        copied = snapshot_of_tensor(tensor)
        tensor += 1
        assert tensor.data_ptr() == place, "the memory that others see is still its own"
        assert (copied == tensor - 1).all()
    assert array[0] == view[0] == 1 and capsule is not None


def test_a_copy_of_torchs_own_memory_takes_no_memory_until_written() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    copied, part = snapshot_of_tensor(x), snapshot_of_tensor(x[:1])
    assert torch._C._is_cow_tensor(copied) and not torch._C._is_cow_tensor(part), "a part holds no whole"  # type: ignore[attr-defined]
    x.mul_(2)
    assert copied.tolist() == [[0, 1, 2], [3, 4, 5]] and part.tolist() == [[0, 1, 2]]


def test_bytes_are_those_of_the_memory_in_use() -> None:
    assert held_bytes(torch.ones(1).expand(1_000)) == 4
    assert held_bytes(torch.ones(3, dtype=torch.float64)) == 24
    assert held_bytes(torch.eye(3).to_sparse()) == 3 * 4 + 2 * 3 * 8
