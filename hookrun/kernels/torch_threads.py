"""The threads that torch computes with on the CPU, for compiled functions."""

from __future__ import annotations

import ctypes

import torch


def parallel() -> int | None:
    """The address of the function that gives a task to the threads that torch computes with; None: it is not known.

    These wait busily for a while after each of torch's operations, so that threads beside them would find no free core.
    """
    if not torch.backends.openmp.is_available():
        return None
    try:
        function = ctypes.PyDLL(torch._C.__file__).GOMP_parallel  # of the libraries that torch is linked with
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
