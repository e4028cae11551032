"""Several edits of a large tensor in one pass, by a compiled function: the Python interface of `edits.c`."""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hookrun.actions.arithmetic import AddNumber, Arithmetic, ClampBetween, MultiplyBy
from hookrun.kernels import SWITCH, NoLibrary
from hookrun.kernels.torch_threads import parallel

_DTYPES = (torch.float32, torch.float64)
_PROCESS, _pool = os.getpid(), parallel()
"""The thread pool, and the process that has it: a forked process does not have the threads."""
_is_copy_on_write = torch._C._is_cow_tensor  # type: ignore[attr-defined]


def edited(functions: Sequence[Any], x: Tensor, out: Tensor) -> bool:
    """Apply all functions to x in order and write the result into out; returns whether that was done.

    False: nothing was written, and torch has to compute the result. x and out are plain contiguous CPU tensors of the
    same shape and dtype; out is x or does not overlap it. The elements are those that torch computes, bit for bit.
    """
    if x.dtype not in _DTYPES or x.is_neg() or not all(isinstance(each, Arithmetic) for each in functions):
        return False
    if x is not out and _is_copy_on_write(x):  # `data_ptr()` would copy it
        return False
    edits = _edits(functions, x.dtype)
    if edits is None or (library := _library()) is None:
        return False
    _run(library, edits, x, out)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return True


class _Edit(ctypes.Structure):
    _fields_ = (("operation", ctypes.c_int32), ("first", ctypes.c_double), ("second", ctypes.c_double))


def _edits(functions: Sequence[Arithmetic], dtype: torch.dtype) -> Any:
    """The edits as a C array; None where a number is NaN, which has several bit patterns."""
    edits = [_Edit(each.operation, *each.numbers(dtype)) for each in functions]
    return None if any(math.isnan(edit.first) for edit in edits) else (_Edit * len(edits))(*edits)


def _run(library: ctypes.CDLL, edits: Any, x: Tensor, out: Tensor) -> None:
    wide = x.dtype is torch.float64
    threads, pool = torch.get_num_threads(), _pool if os.getpid() == _PROCESS else None
    library.edit(edits, len(edits), wide, x.data_ptr(), out.data_ptr(), x.numel(), threads, pool)


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled library, loaded once per process; None if there is none."""
    try:
        if os.environ.get(SWITCH) == "0":
            raise NoLibrary(f"{SWITCH} is 0")
        from hookrun.kernels.build import library

        loaded = ctypes.CDLL(str(library(Path(__file__).with_name("edits.c"))))
        pointer, number = ctypes.c_void_p, ctypes.c_int
        loaded.edit.argtypes = (pointer, number, number, pointer, pointer, ctypes.c_int64, number, pointer)
        loaded.edit.restype = None
        _require_same_bits(loaded)
    except (NoLibrary, OSError, AttributeError) as error:  # AttributeError: a missing function
        logging.getLogger(__name__).debug("edits are computed by torch: %s", error)
        return None
    return loaded


def _require_same_bits(loaded: ctypes.CDLL) -> None:
    """Raise NoLibrary unless the results equal torch's on this machine, also for zeros, NaN and subnormal numbers."""
    chain = (
        MultiplyBy(1 / 3),
        AddNumber(0.1),
        ClampBetween(-0.7, 0.6),
        MultiplyBy(-0.0),
        ClampBetween(0.0, None),
        AddNumber(-1e-40),
    )
    with _disable_current_modes(), torch.no_grad():
        for dtype in _DTYPES:
            tiny = torch.finfo(dtype).tiny
            special = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, tiny, -tiny / 2, 0.7, -0.7, 3e38]
            x = torch.tensor(
                [*special, *(number / 7 for number in range(-30, 30))], dtype=dtype, device="cpu"
            )
            for functions in (*((each,) for each in chain), chain):
                wanted, found = x.clone(), torch.empty_like(x)
                for function in functions:
                    function(wanted, wanted)
                _run(loaded, _edits(functions, dtype), x, found)
                if not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
                    raise NoLibrary("the results of the compiled function differ from torch's")
