"""Whether operations are computed directly: not under torch's dispatch modes, traces and function transforms.

Under one of these an operation becomes part of a traced graph, returns a fake tensor, or is refused because it writes a
tensor that the transformed function did not create.
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
    """Whether operations in this thread are computed directly now."""
    return (
        not _dispatch_modes()
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
        with _disable_current_modes(), torch._C._DisableFuncTorch():
            yield
    finally:
        _set_jit_trace(trace)
