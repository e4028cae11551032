"""What may stand between an operation and its result: torch's dispatch modes, traces and transforms of functions.

Under one of them an operation on tensors of ours is not simply computed: it becomes a part of a traced graph, gives a
fake tensor, or is refused where it writes a tensor that the transformed function did not make.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.maybe_current_level
_traced_by_jit = torch._C._get_tracing_state
_set_jit_trace = torch._C._set_tracing_state  # type: ignore[attr-defined]
_dispatched_by = torch._C._dispatch_tls_is_dispatch_key_included
_BEFORE_AUTOGRAD = torch._C.DispatchKey.PreDispatch  # where torch.export traces


def computes() -> bool:
    """Whether operations are simply computed, in this thread, now."""
    return (
        not _dispatch_modes()
        and _functorch_level() is None
        and _traced_by_jit() is None
        and not _dispatched_by(_BEFORE_AUTOGRAD)
    )


@contextmanager
def computing() -> Iterator[None]:
    """Operations inside are simply computed, whatever is under way around them."""
    if computes():
        yield
        return
    trace = _traced_by_jit()
    _set_jit_trace(None)
    try:
        with _disable_current_modes(), torch._C._DisableFuncTorch():
            yield
    finally:
        _set_jit_trace(trace)
