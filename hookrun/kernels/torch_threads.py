"""The threads that torch computes with on the CPU, for compiled functions."""

from __future__ import annotations

import ctypes

import torch


def parallel() -> int | None:
    """The address of the function that runs a task in torch's own CPU threads; None if it is not known.

    These threads spin for a while after each torch operation, so additional threads would compete with them for cores.
    """
    if not torch.backends.openmp.is_available():
        return None
    try:
        function = ctypes.PyDLL(
            torch._C.__file__
        ).GOMP_parallel  # found in the libraries that torch is linked with
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
