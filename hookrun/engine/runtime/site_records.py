"""What a site records and captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookrun.engine.actions.base import RECORD_KEYS, Measured
from hookrun.engine.actions.check import verdict
from hookrun.engine.runtime.checkpointing import repeating
from hookrun.engine.runtime.rng import kept_samples
from hookrun.engine.runtime.site_draws import SiteDraws
from hookrun.engine.runtime.snapshot import copied
from hookrun.engine.values.containers import plain, readable
from hookrun.errors import CheckFailed, HookError

if TYPE_CHECKING:
    from hookrun.engine.actions.fields import Keep


class SiteRecords(SiteDraws):
    """What a hook records and captures at one module or parameter; see actions/base.py."""

    def emit(
        self, data: Mapping[str, Any] | Measured, path: str | None = None, *, show: bool = False
    ) -> None:
        # an edit acts again in a recomputed call, and in passes that the task makes for itself
        if self.spec.action.observes or (repeating() is None and not self.clock.is_dummy_pass):
            self.sink.emit(self._start(path), data, show=show)

    def _start(self, path: str | None = None) -> tuple[Any, ...]:
        """The values of RECORD_KEYS for a record about the tensor at `path`, by default the one that is acted on."""
        clock = self.clock
        current = self.current
        at = current.within + (current.at if path is None else path)
        action = self.spec.action.action_name
        return self.hook_name, self.path, at, action, clock.mode, clock._epoch, clock._step, self.call

    def chosen(self, keep: Keep) -> Callable[[Sequence[int]], Tensor]:
        """A function shape -> the row numbers of the samples that `keep` chooses; in a trial run of all rows."""
        if not self.has_values:
            return lambda shape: torch.arange(*shape[:1] or (1,), device="cpu")
        is_kept = kept_samples(keep, self.clock, self._hook_seed, self.where)

        def rows(shape: Sequence[int]) -> Tensor:
            kept = is_kept()
            chosen = self.current.chosen
            matching = self.current.matching
            places = None if chosen is None else chosen.rows.samples
            if matching is not None:
                places = matching if places is None else places[matching]
            if places is not None:
                return kept[places].nonzero().squeeze(1)
            if not shape or shape[0] != len(kept):
                raise HookError(
                    f"{self.where}: it keeps only some samples and sees a tensor of shape {list(shape)} in a batch of "
                    f"{len(kept)}"
                )
            return kept.nonzero().squeeze(1)

        return rows

    def check_result(self, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
        """Judge a check: policy `error` reads the result and raises CheckFailed, others emit a record."""
        result = readable(ok)
        clock = self.clock
        if result is None and self.has_values and not ok.is_meta:  # the model is being traced
            return
        # under `torch.vmap` there is one result for each mapped element
        if result is not None and result is not ok:
            with torch._C._DisableFuncTorch():
                ok = result.all()
                least = plain(least).min()
                largest = plain(largest).max()
        record = {"ok": ok, "message": message, "policy": policy, "least": least, "largest": largest}
        if self.hook_type.sees_batch and clock.rows is not None and clock.samples is not None:
            record["samples"] = clock.samples.tolist()  # of this rank
        record["class"] = type(self.module).__name__
        if policy != "error" or not self.has_values:
            self.emit(record)
            return
        record["ok"] = passed = bool(ok)  # read once: the host waits for it
        checked = {**dict(zip(RECORD_KEYS, self._start(), strict=True)), **record}
        record["last_good"] = self.sink.last_good.before(checked)
        if not passed:
            self.emit(record)
            at = f" at {self.current.at}" if self.current.at else ""
            raise CheckFailed(
                f"{self.where} ({record['class']}){at}, epoch {clock.epoch}, step {clock.step}: {verdict(record)}"
            )

    def rebuild(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        return copied(value, change)
