"""Less work for torch on a machine without a GPU, in each test the same."""

from __future__ import annotations

import sys
from types import SimpleNamespace


def quick_torch() -> None:
    """Let torch count the GPUs once, and not note where each seed is set; torch has to be imported.

    Every model of fake tensors asks for their number, for which torch looks for a library each time. The stack of each
    seed is formatted, for an error of a GPU that is used later.
    """
    cuda = sys.modules["torch.cuda"]
    cuda._cached_device_count = cuda.device_count()  # type: ignore[attr-defined]
    if not cuda._cached_device_count:
        for name in ("torch.cuda", "torch.xpu"):
            sys.modules[name].traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]
