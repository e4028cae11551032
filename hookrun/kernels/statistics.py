"""The statistics of a tensor in one pass, by a compiled function: the Python interface of `statistics.c`."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from hookrun.actions.stats import Statistic
from hookrun.kernels import SWITCH, NoLibrary
from hookrun.kernels.torch_threads import parallel

NAMES: tuple[str, ...] = get_args(Statistic)
"""Every statistic, in the order of `Statistic` in statistics.c."""

Measure = Callable[[Tensor], tuple[Any, ...] | None]
"""The statistics of a tensor in the requested order; None where torch has to compute them.

Supported are plain CPU tensors of at least two floating-point numbers that fill one block of memory without gaps.
Sums are computed in float64, and returned in float32 unless the tensor is of float64.
"""

Record = Callable[[Tensor, str, int, int, int], bool | None]
"""Append a record of a tensor, with mode, epoch, step and call. None: no record was made; False: enough are pending."""


def prepare() -> None:
    """Compile and load the library now, if possible: half a second, once per machine."""
    _kernel()


def measuring(of: Sequence[str]) -> Measure | None:
    """A function that computes these statistics of a tensor; None without a compiled library."""
    return None if (kernel := _kernel()) is None else kernel.function(of)


def recording(of: Sequence[str], start: dict[str, Any], pending: list[Any], most: int) -> Record | None:
    """A function that appends a list with one record to `pending`; None without a compiled library.

    start: the values of the record that are the same at every firing, in the order of its keys
    most:  the number of pending records above which the function returns False
    """
    return None if (kernel := _kernel()) is None else kernel.function(of, start, pending, most)


class _Kernel:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self._exchange = _exchange()
        self._parallel = parallel()
        self._library = ctypes.PyDLL(str(path))
        make = self._library.measuring
        make.restype = ctypes.py_object
        make.argtypes = (
            ctypes.c_void_p,
            ctypes.py_object,
            ctypes.py_object,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.py_object,
            ctypes.py_object,
            ctypes.py_object,
            ctypes.c_ssize_t,
        )
        self._make = make

    def function(
        self,
        of: Sequence[str],
        start: dict[str, Any] | None = None,
        pending: list[Any] | None = None,
        most: int = 0,
    ) -> Any:
        """The function of `measuring`, or with `start` and `pending` that of `recording`."""
        names = bytes(map(NAMES.index, of))
        keys = None if start is None else ("mode", "epoch", "step", "call", *of)
        threads = torch.get_num_threads()
        return self._make(
            self._exchange,
            Tensor,
            Parameter,
            names,
            len(names),
            threads,
            self._parallel,
            keys,
            start,
            pending,
            most,
        )


@cache
def _kernel() -> _Kernel | None:
    """The compiled library, loaded once per process; None if there is none."""
    try:
        if os.environ.get(SWITCH) == "0":
            raise NoLibrary(f"{SWITCH} is 0")
        _require_python()
        from hookrun.kernels.build import library

        kernel = _Kernel(library(Path(__file__).with_name("statistics.c")))
        _require_right(kernel)
    except (NoLibrary, OSError, AttributeError) as error:  # AttributeError: a missing function
        logging.getLogger(__name__).debug("statistics are computed by torch: %s", error)
        return None
    return kernel


def _require_python() -> None:
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise NoLibrary("statistics.c needs CPython with its global interpreter lock")
    if sys.byteorder != "little" or sys.platform not in ("linux", "darwin"):
        raise NoLibrary(f"statistics.c does not support {sys.platform}")


def _exchange() -> int:
    """The address of torch's DLPack functions that export a tensor read-only. Raises NoLibrary before torch 2.15."""
    from torch.utils import dlpack

    wrapper = getattr(dlpack, "ReadOnlyTensorWrapper", None)  # from torch 2.15 on
    if wrapper is None:
        raise NoLibrary(f"torch {torch.__version__} cannot export a tensor read-only through DLPack")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address: int = pointer(wrapper.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    return address


def _require_right(kernel: _Kernel) -> None:
    """Raise NoLibrary unless the statistics of a small tensor are correct."""
    measure = kernel.function(("mean", "var", "min", "max", "sum", "numel"))
    with _disable_current_modes():
        x = torch.tensor([[1.0, 2.0], [3.0, 8.0]], dtype=torch.float64, device="cpu")
        found = None if measure is None else measure(x)
    if found != (3.5, 29 / 3, 1.0, 8.0, 14.0, 4):
        raise NoLibrary(f"the compiled function gives wrong results: {found}")
