"""Whether a module's output belongs to nobody but the call that hands it to a forward hook, which may overwrite it.

Python counts the references to an object, but how many of them are those of the call itself depends on the version of
Python and of torch. So it is found by experiment: values that only the call refers to, and values that something else
refers to as well, go through the same lines. Where the counts do not tell the two apart, nothing is ever overwritten.
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
"""Of each kind, in the experiment: after some of them Python runs the same lines in a faster way."""

_EXPERIMENTS = 3
"""How often it is tried: the first one may come while a compiler or a debugger has changed how Python calls."""

_MOST = 4
"""References that a call has: torch's variable and the hook's, and two arguments. What makes them more may also end."""


class _Trial(local):
    """The experiments of one thread.

    probe:  the hooked module
    counts: what its hook saw in the calls under way: the references to the output, and the code of the caller
    """

    probe: _Probe | None = None
    counts: list[tuple[int, CodeType]] | None = None


class SoleReference:
    """Tells outputs that only the call refers to, for one way in which forward hooks are called.

    register: put a hook on a module that is called in that way, asks `overwritable` about the module's output, and
              leaves it as it is
    size:     how many elements the outputs have that the hook asks about
    """

    def __init__(self, register: Callable[[nn.Module], object], size: int) -> None:
        self._register = register
        self._size = size
        self._trial = _Trial()
        self._lock = Lock()
        self._left = 0 if _counts_are_deferred() else _EXPERIMENTS
        self._expected: tuple[int, CodeType] | None = None

    def overwritable(self, output: Tensor, references: int, caller: CodeType) -> bool:
        """Whether nobody can notice when the output is overwritten. It is a plain tensor.

        references: what `sys.getrefcount` says of it in the call of this function
        caller:     the code that called the hook
        """
        if self._trial.counts is not None:
            self._trial.counts.append((references, caller))
            return False
        if _has_any_global_hook():  # which would see the experiment's modules
            return False
        if self._expected is None and self._left:
            self._find_out()
        return (
            (references, caller) == self._expected
            and _is_untouched(output)
            and self._counts([False]) == [self._expected]  # also at this moment
        )

    def _find_out(self) -> None:
        with self._lock:
            if self._expected is None and self._left:
                self._left -= 1
                self._expected = self._experiment()

    def _experiment(self) -> tuple[int, CodeType] | None:
        """The count and the caller of a value that only the call refers to; None where they do not tell."""
        counts = self._counts([False, True] * _CALLS)
        if len(counts) != 2 * _CALLS or len({caller for _, caller in counts}) != 1:
            return None
        free, held = ({count for count, _ in counts[start::2]} for start in (0, 1))
        return counts[0] if len(free) == 1 and max(free) <= _MOST and min(held) > max(free) else None

    def _counts(self, keeps: Sequence[bool]) -> list[tuple[int, CodeType]]:
        """What the hook sees of new values, each of which the module keeps or not."""
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
    """Returns a new value at each call, and refers to it or not."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.keeps = False
        self.kept: Any = None

    def forward(self, x: Any) -> Tensor:
        value = torch.empty(self.size, device="cpu")  # nothing is written: it takes no memory
        self.kept = value if self.keeps else None
        return value


def _counts_are_deferred() -> bool:
    """Whether this Python may leave references uncounted: without the GIL, or compiling as it runs."""
    jit = getattr(sys, "_jit", None)
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED")) or (jit is not None and jit.is_enabled())


def _is_untouched(output: Tensor) -> bool:
    """Whether all that there is to say of the tensor is its elements, and no view or other holder has its memory."""
    return (
        not output.requires_grad
        and not output._is_view()
        and not output.is_neg()
        and output.is_inference() == torch.is_inference_mode_enabled()
        and not output.__dict__
        and not getweakrefcount(output)
        and alone_in_memory(output)
    )
