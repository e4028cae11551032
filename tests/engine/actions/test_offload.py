"""`offload`: saved tensors are stored elsewhere until the backward pass needs them."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_site import build
from safetensors import SafetensorError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hookrun.engine.actions.base import Packed
from hookrun.engine.actions.offload import Offload
from hookrun.errors import HookrunError

TENSORS = {
    "float32": torch.randn(3, 4),
    "bfloat16": torch.randn(3, 4).bfloat16(),
    "integers": torch.arange(6).view(2, 3),
    "truth values": torch.tensor([True, False]),
    "a single number": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "not contiguous": torch.randn(3, 4).t(),
    "expanded": torch.randn(1, 4).expand(3, 4),
    "a part": torch.randn(9, 4)[2:5, ::2],
    "requires grad": torch.randn(3, requires_grad=True),
    "complex": torch.randn(3, dtype=torch.complex128),
    "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj().t(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_a_tensor_is_restored_unchanged_from_disk(x: Tensor, folder: Path) -> None:
    packed = build(Offload(to="disk"))(x)
    assert isinstance(packed, Packed)
    assert packed.tensor is None
    for _ in range(2):  # a retained graph restores it again
        restored = packed.undo(None)
        assert torch.equal(restored, x)
        assert (restored.dtype, restored.device, restored.requires_grad) == (x.dtype, x.device, False)


def test_the_file_exists_as_long_as_the_packed_tensor(folder: Path) -> None:
    offload = build(Offload(to="disk"))
    first = offload(torch.ones(2))
    second = offload(torch.zeros(2))
    assert len(list(folder.iterdir())) == 2
    restored = first.undo(None)
    del first
    gc.collect()
    assert len(list(folder.iterdir())) == 1
    assert restored.tolist() == [1, 1]
    del second
    gc.collect()
    assert list(folder.iterdir()) == []


def test_a_forked_child_leaves_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = build(Offload(to="disk"))(torch.ones(2))
    monkeypatch.setattr(os, "getpid", lambda: 0)
    del packed
    gc.collect()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("error", [OSError(28, "device is full"), SafetensorError("device is full")])
def test_a_failed_write_leaves_no_file(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: str) -> None:
        raise type(error)(*error.args)  # one that is raised keeps its frames

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises((OSError, HookrunError), match=r"full.*hookrun-saved-|hookrun-saved-.*full.*TMPDIR"):
        build(Offload(to="disk"))(torch.ones(2))
    gc.collect()
    assert list(folder.iterdir()) == []


def test_a_cpu_tensor_stays_unchanged() -> None:
    assert build(Offload(to="cpu"))(torch.ones(2)) is None


def test_the_tensor_of_another_device_comes_back() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, device="cuda")
        packed = build(Offload(to="cpu"))(x)
        assert packed.tensor.device.type == "cpu"
        assert packed.undo(packed.tensor).device == x.device


def test_a_fake_tensor_leaves_nothing_on_disk(folder: Path) -> None:
    with FakeTensorMode():
        assert build(Offload(to="disk"))(torch.ones(2)) is None
    assert list(folder.iterdir()) == []
