"""Computes the statistics of many small tensors together: for them the call of a reduction costs more than its work.

A small tensor is copied into a row of a buffer when the hook fires, so later writes to the tensor do not matter. The
rows of one shape are measured together when the buffer is full or the records are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from hookrun.engine.actions.base import RECORD_KEYS
from hookrun.engine.actions.statistics import DEFINITIONS, Rows, sizes_of
from hookrun.engine.actions.stats import LEAST_SQUARE, MOST_LOST
from hookrun.engine.runtime.fast import private
from hookrun.engine.values.tensors import holds_data

NAMES = (
    "_C._len_torch_dispatch_stack",
    "_C._functorch.maybe_current_level",
    "_C._get_tracing_state",
    "_C._set_tracing_state",
    "_C._dispatch_tls_is_dispatch_key_included",
    "_C.DispatchKey.PreDispatch",
    "_C._dispatch_keys",
    "_C._set_grad_enabled",
    "_C._DisableFuncTorch",
    "autograd.forward_ad._current_level",
    "utils._python_dispatch._disable_current_modes",
)
(
    _dispatch_modes,
    _functorch_level,
    _traced_by_jit,
    _set_jit_trace,
    _dispatched_by,
    _BEFORE_AUTOGRAD,  # where torch.export traces
    _dispatch_keys,
    _set_grad_enabled,
    _without_functorch,
    _,
    _disable_modes,
) = private(*NAMES)
_is_usable = _dispatch_modes is not None

LARGEST = 1 << 13
"""Most elements of a small tensor; too few for torch to split a row over threads, so that the result of a row does not
depend on the number of rows."""
_BUFFER = 1 << 18  # elements: they fit into the cache of a core
_MOST_ROWS = 64
_PART = 512
_MOST_BUFFERS = 32
_MEASURED_IN = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
"""dtype of a tensor -> dtype in which its statistics are computed."""

Waiting = list[Any]
"""A list with one element: first the tuple of values with which the record begins, later the whole record, a dict."""


@dataclass(eq=False)
class SmallTensors:
    """Holds copies of small tensors until `measure` computes the statistics of all of them. It is thread-safe."""

    _lock: RLock = field(default_factory=RLock)
    _buffers: dict[Any, _Buffer] = field(default_factory=dict)

    def add(self, x: Tensor, of: tuple[str, ...], start: tuple[Any, ...]) -> Waiting | None:
        """Copy the tensor; returns its record, which `measure` completes, or None if it is not a small plain tensor.

        of:    the statistics for the record
        start: the values of RECORD_KEYS, with which the record begins
        """
        if not _is_plain(x):
            return None
        key = x.shape, x.dtype, of
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None:
                if x.numel() == 0 or x.numel() > LARGEST:
                    return None
                if len(self._buffers) == _MOST_BUFFERS:  # for example with sequences of many lengths
                    self.measure()
                    self._buffers.clear()
                buffer = self._buffers[key] = _Buffer(x, of)
            return buffer.add(x, start)

    def measure(self) -> None:
        """Complete all records that wait for their statistics."""
        if not self._buffers:
            return
        with self._lock, computing():
            for buffer in self._buffers.values():
                buffer.measure()


_known_keys = set[int]()
"""The dispatch keys of the plain tensors seen so far; they depend on device, layout and wrappers of a tensor."""


def _is_plain(x: Tensor) -> bool:
    """Whether it is an ordinary strided CPU tensor whose values can be copied now."""
    kind = type(x)
    if (kind is not Tensor and kind is not Parameter) or forward_ad._current_level >= 0 or not computes():
        return False
    keys = _dispatch_keys(x).raw_repr()
    if keys not in _known_keys:
        if not (x.is_cpu and x.layout is torch.strided and not x.is_nested and holds_data(x)):
            return False
        _known_keys.add(keys)
    return x.dtype in _MEASURED_IN


class _Buffer:
    """A row for each tensor of one shape, and the records that wait for them."""

    def __init__(self, x: Tensor, of: tuple[str, ...]) -> None:
        self._of = of
        self._keys = (*RECORD_KEYS, *of)
        self._shape = x.shape
        self._dtype = x.dtype
        self._sizes = sizes_of(x)
        self._capacity = max(1, min(_MOST_ROWS, _BUFFER // x.numel()))
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            self._rows = torch.empty(self._capacity, x.numel(), dtype=_MEASURED_IN[x.dtype], device="cpu")
        self._places = list[Tensor]()
        self._waiting = list[Waiting]()

    def add(self, x: Tensor, start: tuple[Any, ...]) -> Waiting:
        """Copy the tensor into the next row; returns its record, which `measure` completes."""
        number = len(self._waiting)
        if number == len(self._places):
            with torch.inference_mode(False):
                self._places.append(self._rows[number].view(self._shape))
        if x.requires_grad and torch.is_grad_enabled():
            _set_grad_enabled(False)
            try:
                self._places[number].copy_(x)
            finally:
                _set_grad_enabled(True)
        else:
            self._places[number].copy_(x)
        waiting: Waiting = [start]
        self._waiting.append(waiting)
        if number + 1 == self._capacity:
            self.measure()
        return waiting

    def measure(self) -> None:
        """Complete the records and free the rows."""
        records = self._waiting
        self._waiting = []
        if not records:
            return
        rows = self._rows[: len(records)]
        statistics = SmallRows(rows.view(-1, *self._shape), rows, self._dtype)
        statistics.update(self._sizes)
        columns = [
            column.tolist() if isinstance(column, Tensor) else repeat(column, len(records))
            for column in map(statistics.__getitem__, self._of)
        ]
        for record, values in zip(records, zip(*columns, strict=True), strict=True):
            record[0] = dict(zip(self._keys, record[0] + values, strict=True))


def _norm(rows: Rows) -> Tensor:
    """[R]: the norm of each row. Long rows are reduced in parts, because torch sums a row in few accumulators."""
    flat = rows.flat
    if rows.n > _PART and rows.n % _PART == 0:
        flat = torch.linalg.vector_norm(flat.view(len(flat), -1, _PART), dim=2)
    return torch.linalg.vector_norm(flat, dim=1)


def _variance(rows: Rows) -> Tensor:
    """[R]: the variance; where E[x²] - E[x]² loses digits, around the mean in float64.

    From Python's numbers: with so few rows a call of torch takes longer than the arithmetic.
    """
    n = rows.n
    means = rows["mean"].tolist()
    squares = [norm * norm for norm in rows["norm"].tolist()]
    spreads = [square - mean * mean * n for mean, square in zip(means, squares, strict=True)]
    spread = torch.tensor(spreads, dtype=torch.float64, device="cpu")
    least = n * LEAST_SQUARE
    is_exact = [least < square < spread * MOST_LOST for square, spread in zip(squares, spreads, strict=True)]
    if not all(is_exact):
        around = rows.flat - rows.flat.double().mean(1, keepdim=True)
        spread = torch.where(torch.tensor(is_exact, device="cpu"), spread, around.square_().sum(1))
    return spread / (n - 1)


class SmallRows(Rows):
    """Rows [R, n] of small tensors; what takes few calls of torch is defined in another way."""

    definitions = {
        **DEFINITIONS,
        "norm": _norm,
        "var": _variance,
        "std": lambda rows: rows["var"].sqrt(),
        "min": lambda rows: rows.flat.amin(1),  # amin and amax together are faster than aminmax
        "max": lambda rows: rows.flat.amax(1),
    }


def computes() -> bool:
    """Whether operations in this thread are computed directly now: no mode, trace or transform sees them.

    Under one of these an operation becomes part of a traced graph, returns a fake tensor, or is refused because it
    writes a tensor that the transformed function did not create.
    """
    return (
        _is_usable
        and not _dispatch_modes()
        and _functorch_level() is None
        and _traced_by_jit() is None
        and not _dispatched_by(_BEFORE_AUTOGRAD)
    )


@contextmanager
def computing() -> Iterator[None]:
    """Compute operations inside the block directly, whatever mode, trace or transform is active."""
    if computes():
        yield
        return
    trace = _traced_by_jit()
    _set_jit_trace(None)
    try:
        with _disable_modes(), _without_functorch():
            yield
    finally:
        _set_jit_trace(trace)
