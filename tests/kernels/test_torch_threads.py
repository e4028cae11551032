"""The function of torch's threads is found where torch computes with OpenMP, and nowhere else."""

from __future__ import annotations

import ctypes

import pytest
import torch

from hookrun.kernels.torch_threads import parallel


def test_the_address_is_of_gomp_parallel_of_torch_s_own_libraries() -> None:
    function = getattr(ctypes.PyDLL(torch._C.__file__), "GOMP_parallel", None)
    known = function is not None and torch.backends.openmp.is_available()
    assert parallel() == (ctypes.cast(function, ctypes.c_void_p).value if known else None)


def test_without_openmp_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.openmp, "is_available", lambda: False)
    assert parallel() is None
    monkeypatch.undo()
    monkeypatch.setattr(torch._C, "__file__", "/nowhere/_C.so")
    assert parallel() is None
