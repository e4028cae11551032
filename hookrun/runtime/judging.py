"""The result of a check: a record that is read later, or an error at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookrun.actions.check import finding, verdict
from hookrun.containers import plain, readable
from hookrun.errors import CheckFailed
from hookrun.runtime.last_good import judged_at


def judge(site: Any, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
    """Judge a check: policy `error` reads the result and raises CheckFailed, the others emit a record with it.

    site:    the `PlacedHook` that is firing
    ok:      a boolean tensor: whether the check passed
    message: of the check, for the record
    least, largest: the smallest and largest element of the checked tensor
    """
    found = readable(ok)
    if found is None and site.sink.has_values and not ok.is_meta:  # the model is being traced
        return
    # under `torch.vmap` there is one result for each mapped element
    if found is not None and found is not ok:
        with torch._C._DisableFuncTorch():
            ok, least, largest = found.all(), plain(least).min(), plain(largest).max()
    samples = site.clock.own_samples if site.hook_type.of_rows else None
    record = finding(ok, message, policy, least, largest, samples)
    record["class"] = type(site.module).__name__
    if policy != "error" or not site.sink.has_values:
        site.emit(record)
    elif ok:
        site.clock.last_good.passed(site.hook_name, judged_at(site))
    else:
        record["last_good"] = site.clock.last_good.before(site.hook_name, judged_at(site))
        site.emit(record)
        at = f" at {site.at}" if site.at else ""
        when = f"epoch {site.clock.epoch}, step {site.clock.step}"
        raise CheckFailed(f"{site.where} ({record['class']}){at}, {when}: {verdict(record)}")
