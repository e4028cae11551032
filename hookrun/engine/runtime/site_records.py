"""What a site records and captures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookrun.engine.actions.base import RECORD_KEYS, Measured
from hookrun.engine.actions.check import LOSS, verdict
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.rules import Place, Rules
from hookrun.engine.runtime.checkpointing import repeating
from hookrun.engine.runtime.rng import kept_samples
from hookrun.engine.runtime.site_draws import SiteDraws
from hookrun.engine.runtime.snapshot import copied
from hookrun.engine.values.containers import plain, readable
from hookrun.errors import CheckFailed, HookError, HookrunWarning

if TYPE_CHECKING:
    from hookrun.engine.actions.fields import Keep


class SiteRecords(SiteDraws):
    """What a hook records and captures at one module or parameter; see actions/base.py.

    rules:        those of a check over steps
    in_step:      of the firings in this step at each place: how the record begins, the sum of the numbers, how many
    is_uncounted: firings do not count now, so that they are not added to the step either
    is_unknown_told: the user has been told that the loss of a step was not known
    """

    rules: Rules | None = None
    in_step: dict[Place, tuple[tuple[Any, ...], Any, int]]
    is_uncounted = False
    is_unknown_told = False

    def emit(
        self, data: Mapping[str, Any] | Measured, path: str | None = None, *, show: bool = False
    ) -> None:
        # an edit acts again in a recomputed call, and in passes that the task makes for itself
        if self.spec.action.observes or (repeating() is None and not self.clock.is_dummy_pass):
            self.sink.emit(self.record_start(path), data, show=show)

    def record_start(self, path: str | None = None) -> tuple[Any, ...]:
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
        if result is None and self.has_values and not ok.is_meta:  # the model is being traced
            return
        # under `torch.vmap` there is one result for each mapped element
        if result is not None and result is not ok:
            with torch._C._DisableFuncTorch():
                ok = result.all()
                least = plain(least).min()
                largest = plain(largest).max()
        record = {"ok": ok, "message": message, "policy": policy, "least": least, "largest": largest}
        record |= self.about_check() if self.current.in_graph else self._checked()
        if policy != "error" or not self.has_values or self.current.in_graph:
            self.emit(record)
            return
        record["ok"] = bool(ok)  # read once: the host waits for it
        self._require_passed(record)

    def about_check(self) -> dict[str, Any]:
        place = self._checked()
        cls = place.pop("class")
        return {**place, "where": self.where, "class": cls}  # `where` is for the message; it is not stored

    def _checked(self) -> dict[str, Any]:
        """What a record says of the place of a check, beside RECORD_KEYS."""
        clock = self.clock
        place: dict[str, Any] = {}
        if self.hook_type.sees_batch and clock.rows is not None and clock.samples is not None:
            place["samples"] = clock.samples.tolist()  # of this rank
        place["class"] = self.class_name
        return place

    def _require_passed(self, record: dict[str, Any]) -> None:
        """Raise CheckFailed, and emit the record, if its check did not pass."""
        checked = {**dict(zip(RECORD_KEYS, self.record_start(), strict=True)), **record}
        record["last_good"] = self.sink.last_good.before(checked)
        if not record["ok"]:
            self.emit(record)
            at = f" at {self.current.at}" if self.current.at else ""
            clock = self.clock
            raise CheckFailed(
                f"{self.where} ({record['class']}){at}, epoch {clock.epoch}, step {clock.step}: {verdict(record)}"
            )

    # ---- rules of a statistic ----------------------------------------------------------------------------------

    def judging(self, rules: Rules) -> Callable[[Tensor], None]:
        if rules.steps is not None:
            if self.rules is None:
                self.rules = rules
                self.in_step = {}
                self._held.append(rules)
                self.clock.reads_loss |= rules.of == LOSS
                self.clock.ending.append(self._end_step)
            rules = self.rules  # a graph and what is outside of it have the same windows
        return partial(self._judge, rules, self.spec.action.value_of(Meaning.POLICY))

    def _judge(self, rules: Rules, policy: str, numbers: Tensor) -> None:
        """Judge numbers now (policy `error`), when they are read (others), or with those of the whole step."""
        if not numbers.numel():  # an empty tensor passes
            return
        start = self.record_start()
        rules.require_width(_place_of(start), len(numbers))
        seen = readable(numbers)
        if seen is None or not self.has_values:  # the model is being traced, or a trial run
            return
        if seen.shape != numbers.shape:
            raise ValueError(
                "under torch.vmap a statistic has a number for each mapped element: check it without `of`"
            )
        if rules.steps is not None:
            self._add_to_step(start, seen)
            return
        about = self.about_check() if self.current.in_graph else self._checked()
        record = {"numbers": seen, "judge": rules.judge, "policy": policy, **about}
        if policy != "error" or self.current.in_graph:
            self.emit(record)
            return
        record["numbers"] = seen.cpu()
        for judged in rules.judge({**dict(zip(RECORD_KEYS, start, strict=True)), **record}):
            self._require_passed(judged)

    def _add_to_step(self, start: tuple[Any, ...], numbers: Tensor) -> None:
        """Add the numbers of a firing to those of the step at the same place."""
        if not self.is_uncounted:
            _, total, count = self.in_step.get(_place_of(start), (start, 0, 0))
            self.in_step[_place_of(start)] = start, total + numbers, count + 1

    def _end_step(self) -> None:
        """Let the rules judge the mean over the firings of the step."""
        rules = self.rules
        assert rules is not None
        firings = list(self.in_step.values())
        self.in_step = {}
        policy = self.spec.action.value_of(Meaning.POLICY)
        if rules.of == LOSS:
            firings = firings[:1]  # it is one number, however many tensors the model returns
        for start, total, count in firings:
            numbers = self.clock.loss if rules.of == LOSS else total / count
            if numbers is None:
                self._tell_unknown_loss()
                continue
            about = {"judge": rules.judge, "policy": policy, "class": self.class_name}
            self.sink.emit(start, {"numbers": numbers, **about})

    def _tell_unknown_loss(self) -> None:
        if not self.is_unknown_told:
            self.is_unknown_told = True
            warnings.warn(
                f"{self.where}: the loss of step {self.clock.step} is not known, and such steps are not checked: set "
                "`hooks.loss = loss` before a step ends, or leave them out with `when`",
                HookrunWarning,
                stacklevel=2,
            )

    def rebuild(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        return copied(value, change)


def _place_of(start: tuple[Any, ...]) -> Place:
    """Which window a firing belongs to. start: the values of RECORD_KEYS of its record"""
    of = dict(zip(RECORD_KEYS, start, strict=True))
    return of["mode"], of["path"], of["call"]
