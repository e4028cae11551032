"""Finds out whether only the current call refers to a module's output, so that a forward hook may overwrite it.

Python counts the references to an object, but the number of references that the call itself holds depends on the
versions of Python and torch. It is found by experiment: values that only the call refers to, and values with one more
reference, go through the same code. If their counts do not differ, nothing is ever overwritten.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from threading import Lock, local
from types import CodeType
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from hookrun.tensor_copies import alone_in_memory

_CALLS = 24
"""Calls of each kind in one experiment: enough for Python's specializing interpreter to optimize the code."""

_EXPERIMENTS = 3
"""How many experiments are tried: the first may run while a compiler or a debugger has changed how Python calls."""

_MOST = 4
"""The most references that a call may hold: torch's variable, the hook's variable and two arguments. More would come
from something else, such as a debugger, that may end later."""


class _Trial(local):
    """The experiments of one thread.

    probe:  the hooked module
    counts: what its hook has seen: (references to the output, code of the caller) for each call; None: no experiment
    """

    probe: _Probe | None = None
    counts: list[tuple[int, CodeType]] | None = None


class SoleReference:
    """Recognizes outputs to which only the call refers, for one way of calling forward hooks.

    register: registers a hook on a module; the hook is called in that way, calls `overwritable` with the module's
              output and does not change it
    size:     the number of elements of the outputs in the experiment
    """

    def __init__(self, register: Callable[[nn.Module], object], size: int) -> None:
        self._register = register
        self._size = size
        self._trial = _Trial()
        self._lock = Lock()
        self._left = 0 if _counts_are_deferred() else _EXPERIMENTS
        self._expected: tuple[int, CodeType] | None = None

    def overwritable(self, output: Tensor, references: int, caller: CodeType) -> bool:
        """Whether the output, a plain tensor, can be overwritten without any effect elsewhere.

        references: `sys.getrefcount(output)`, evaluated in the argument list of this call
        caller:     the code object of the function that called the hook
        """
        if self._trial.counts is not None:
            self._trial.counts.append((references, caller))
            return False
        if _has_any_global_hook():  # a global hook would see the experiment's modules
            return False
        if self._expected is None and self._left:
            self._find_out()
        return (
            (references, caller) == self._expected
            and _is_untouched(output)
            and self._counts([False]) == [self._expected]  # the count is still the same now
        )

    def _find_out(self) -> None:
        with self._lock:
            if self._expected is None and self._left:
                self._left -= 1
                self._expected = self._experiment()

    def _experiment(self) -> tuple[int, CodeType] | None:
        """(count, caller) of a value that only the call refers to; None if the counts do not tell the kinds apart."""
        counts = self._counts([False, True] * _CALLS)
        if len(counts) != 2 * _CALLS or len({caller for _, caller in counts}) != 1:
            return None
        free, held = ({count for count, _ in counts[start::2]} for start in (0, 1))
        return counts[0] if len(free) == 1 and max(free) <= _MOST and min(held) > max(free) else None

    def _counts(self, keeps: Sequence[bool]) -> list[tuple[int, CodeType]]:
        """What the hook sees in calls of the probe, one for each of `keeps`: whether the probe keeps its output."""
        trial = self._trial
        if trial.probe is None:
            probe = _Probe(self._size)
            self._register(probe)
            trial.probe = probe
        trial.counts = counts = list[tuple[int, CodeType]]()
        try:
            with torch.no_grad():
                for trial.probe.keeps in keeps:
                    trial.probe(None)
        finally:
            trial.counts = None
        return counts


class _Probe(nn.Module):
    """Returns a new value at each call; with `keeps` it also keeps a reference to the value."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.keeps = False
        self.kept: Any = None

    def forward(self, x: Any) -> Tensor:
        value = torch.empty(self.size, device="cpu")  # never written, so the system gives it no memory pages
        self.kept = value if self.keeps else None
        return value


def _counts_are_deferred() -> bool:
    """Whether this Python may defer reference counts: without the GIL, or with the JIT."""
    jit = getattr(sys, "_jit", None)
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED")) or (jit is not None and jit.is_enabled())


def _is_untouched(output: Tensor) -> bool:
    """Whether the tensor has no autograd state, attributes or weak references, and nothing else uses its memory."""
    return (
        not output.requires_grad
        and not output._is_view()
        and not output.is_neg()
        and output.is_inference() == torch.is_inference_mode_enabled()
        and not output.__dict__
        and not getweakrefcount(output)
        and alone_in_memory(output)
    )
