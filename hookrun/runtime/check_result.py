"""The result of a check: a record that is read later, or an error at once; and the last place where it passed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookrun.actions.check import finding, verdict
from hookrun.errors import CheckFailed
from hookrun.values.containers import plain, readable


class CheckedTensor(NamedTuple):
    """Names a tensor that was checked.

    module: its path
    cls:    its class
    at:     path of the tensor in the module's value
    call:   of the module within the forward
    when:   mode, epoch and step
    """

    module: str
    cls: str
    at: str
    call: int
    when: tuple[str, int, int]

    def __str__(self) -> str:
        return f"{self.module or '(root)'} ({self.cls})"


class LastPassed:
    """The tensors that passed each check in the current pass through the model.

    A new pass begins with a new step, or when the same tensor is checked again.
    """

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        self._passed = dict[str, dict[CheckedTensor, None]]()

    def passed(self, hook: str, checked: CheckedTensor) -> None:
        """Note that the tensor passed the check."""
        since = self._since(hook, checked)
        since[checked] = None

    def before(self, hook: str, checked: CheckedTensor) -> str | None:
        """Path and class of the module where the check passed last before this tensor; None: nowhere in this pass."""
        since = self._since(hook, checked)
        return str(next(reversed(since))) if since else None

    def _since(self, hook: str, checked: CheckedTensor) -> dict[CheckedTensor, None]:
        since = self._passed.setdefault(hook, {})
        if since and (checked in since or next(iter(since)).when != checked.when):
            since.clear()
        return since


def check_result(site: Any, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
    """Report the result of a check: policy `error` reads it and raises CheckFailed, the others emit a record with it.

    site:    the `HookSite` that is firing
    ok:      a boolean tensor: whether the check passed
    message: of the check, for the record
    least, largest: the smallest and largest element of the checked tensor
    """
    result = readable(ok)
    if result is None and site.sink.has_values and not ok.is_meta:  # the model is being traced
        return
    # under `torch.vmap` there is one result for each mapped element
    if result is not None and result is not ok:
        with torch._C._DisableFuncTorch():
            ok, least, largest = result.all(), plain(least).min(), plain(largest).max()
    clock, samples = site.clock, None
    if site.hook_type.of_rows and clock.rows is not None and clock.samples is not None:  # this rank's samples
        samples = clock.samples.tolist()
    record = finding(ok, message, policy, least, largest, samples)
    record["class"] = type(site.module).__name__
    if policy != "error" or not site.sink.has_values:
        site.emit(record)
        return
    path, when = site.current.within + site.current.at, (clock.mode, clock.epoch, clock.step)
    checked = CheckedTensor(site.path, record["class"], path, site.call, when)
    if ok:
        site.sink.last_good.passed(site.hook_name, checked)
        return
    record["last_good"] = site.sink.last_good.before(site.hook_name, checked)
    site.emit(record)
    at = f" at {site.current.at}" if site.current.at else ""
    step = f"epoch {clock.epoch}, step {clock.step}"
    raise CheckFailed(f"{site.where} ({record['class']}){at}, {step}: {verdict(record)}")
