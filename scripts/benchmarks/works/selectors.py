"""Matching 100 selectors against 5,000 module names."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.measure import OURS, Result, Settings, Timing

FORMS = (
    "blocks.{n}.*",
    "blocks[{n}:{m}].attn",
    "**.{n}.mlp",
    r"re:blocks\.{n}\..*",
    "blocks.{n}.{{attn,mlp}}",
)


def compile_selectors(settings: Settings) -> Result:
    """The time to compile hooks with selectors of all forms. Its target is in seconds, not a ratio."""
    import statistics

    import hookrun

    model, spec = model_of(1000), spec_of(100)
    hookrun.compile({}, model)  # its imports
    seconds = []
    for _ in range(settings.slow()):
        start = time.perf_counter()
        plan = hookrun.compile(spec, model)
        seconds.append(time.perf_counter() - start)
    count = len(list(model.modules()))
    took = statistics.median(seconds)
    work = f"compile {len(plan.hooks)} selectors against {count:,} modules, seconds"
    return Result(work, "one second", 1.0, (Timing("one second", 1.0, 1.0), Timing(OURS, took, took)))


def model_of(blocks: int) -> Any:
    """A model with five modules in each block."""
    from torch import nn

    names = ("attn", "mlp", "norm", "proj")
    parts = nn.ModuleList(nn.ModuleDict({name: nn.Identity() for name in names}) for _ in range(blocks))
    return nn.ModuleDict({"blocks": parts})


def spec_of(hooks: int) -> dict[str, Any]:
    """A spec with this many hooks, equally many of each selector form."""
    names = [FORMS[n % len(FORMS)].format(n=n, m=n + 10) for n in range(hooks)]
    return {f"h{n}": {"select": name, "hook": "forward", "action": "print"} for n, name in enumerate(names)}


ROWS = (compile_selectors,)
