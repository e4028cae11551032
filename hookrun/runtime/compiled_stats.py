"""`stats` of a module's output by a compiled function that also makes the record: the fastest way."""

from __future__ import annotations

from typing import Any

import torch

from hookrun.actions.stats import Stats
from hookrun.hook_types import FORWARD
from hookrun.kernels.statistics import prepare
from hookrun.runtime.apply_action import Op
from hookrun.runtime.records import RecordSink
from hookrun.runtime.site import PlacedHook

_dispatch_modes = torch._C._len_torch_dispatch_stack


def with_compiled_stats(site: PlacedHook, otherwise: Op) -> Op:
    """The op of a site: a compiled function where it applies, `otherwise` for all other sites and values."""
    sink, action = site.sink, site.spec.action
    if type(action) is not Stats or not isinstance(sink, RecordSink) or not sink.has_values:
        return otherwise
    prepare()  # compile at installation, not in the first step
    if site.hook_type is not FORWARD or site.part is not None or site.spec.keys.target is not None:
        return otherwise
    measure: Any = type(sink).measure
    if measure is not RecordSink.measure:  # the sink handles statistics itself
        return otherwise
    start: dict[str, Any] = {
        "hook": site.hook_name,
        "module": site.path,
        "path": "",
        "action": action.action_name,
    }
    of = tuple(action.of)
    start |= dict.fromkeys(("mode", "epoch", "step", "call", *of))
    record = sink.recording(of, start)
    if record is None:
        return otherwise
    clock, model, calls = site.clock, site.clock.model, site.calls

    def observe(value: Any) -> Any:
        if sink.muted or _dispatch_modes():  # such as fake-tensor mode
            return otherwise(value)
        call = 0 if calls is None else calls.now.number
        made = record(value, "train" if model.training else "eval", clock._epoch, clock._step, call)
        if made is None:
            return otherwise(value)
        site.fired += 1
        if not made:
            sink.settle()
        return value

    return observe
