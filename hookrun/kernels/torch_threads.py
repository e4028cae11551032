"""The threads that torch computes with on the CPU, for compiled functions."""

from __future__ import annotations

import ctypes

import torch


def parallel() -> int | None:
    """The address of the function that runs a task in torch's own threads (``GOMP_parallel``); None if unknown.

    These threads spin for a while after each operation of torch, so that other threads would find no free core.
    """
    if not torch.backends.openmp.is_available():
        return None
    try:
        function = ctypes.PyDLL(torch._C.__file__).GOMP_parallel  # found in the libraries that torch links
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
