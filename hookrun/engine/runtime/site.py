"""One hook at one module or parameter: its counts, and what its action works with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from hookrun.engine.actions.base import RECORD_KEYS, HookContext, Keeper, TokenRows
from hookrun.engine.actions.user_code import Recorded
from hookrun.engine.plan.attention_points import lacks_points
from hookrun.engine.plan.outside import FaultList, PendingRun
from hookrun.engine.runtime.checkpointing import repeating
from hookrun.engine.runtime.faults import Draw, Faulty
from hookrun.engine.runtime.part import TensorPart
from hookrun.engine.runtime.rng import derived_seed
from hookrun.engine.runtime.site_folds import SiteFolds
from hookrun.engine.runtime.site_module import SiteModule
from hookrun.engine.runtime.site_values import SiteValues
from hookrun.errors import HookError, reason


class HookSite(SiteFolds, SiteValues, SiteModule):
    """One hook at one module or parameter, see `hookrun.engine.actions.base`; each installation creates new ones.

    fired:     how often the hook fired here (its schedule let it through)
    idle:      firings in which the hook found nothing to act on
    fired_in_graphs: the same inside compiled graphs, a 0-dimensional tensor that they add to
    target_was_none: the target was None in a firing
    let_through: an action on the call itself did not take place in some call
    changed:   how many of the `total` elements its edits changed, counted while `clock.counting`
    by_step:   of logged steps of a training: the step, how many elements its edits changed, and of how many
    passes_on: other hooks take what it sees, as it sees it
    passed_part: the part of it that they take, also of positions that a generation computes again; None: all of it
    """

    fired = 0
    fired_in_graphs: Tensor | None = None
    idle = 0
    _idle_at = 0
    target_was_none = False
    passes_on = False
    passed_part: TensorPart | None = None
    let_through = False
    changed: Tensor | int = 0
    total = 0
    by_step: Sequence[Sequence[int]] = ()

    def fail(self, what: str) -> None:
        """The hook cannot do its work here: raises HookError; a trial run collects the message instead."""
        self.sink.fail(self, what)

    def keep(self) -> Keeper:
        """A function that gives captured values to the sink; under `tokens` with the sample and token of each row."""
        self._require("keep")
        keep = self.sink.keeper(self)
        if self.spec.keys.tokens is None and not self.spec.chooses_samples:
            return keep
        current = self.current

        def keep_rows(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            chosen = current.chosen
            matching = current.matching
            if matching is not None:
                rows = matching if rows is None else matching[rows]
            if chosen is None:
                keep(value, rows)
                return
            tokens = chosen.rows if rows is None else chosen.rows.at(rows)
            keep(value, tokens.samples, tokens)

        return keep_rows

    @property
    def firings(self) -> int:
        """How often the hook fired here, also inside compiled graphs."""
        if self.fired_in_graphs is None:
            return self.fired
        return self.fired + int(self.fired_in_graphs)

    @property
    def why_idle(self) -> str | None:
        """Why the hook did nothing here, or a part of its list of faults; None if it never fired, or did all."""
        given = self._values.get("faults")
        if isinstance(given, FaultList) and 0 < self.firings < given.fired:
            return f"fired {self.firings:,} times, and its list has the faults of {given.fired:,}"
        if not self.fired or self.idle < self.fired:
            return None
        if not self.target_was_none:
            samples = self.spec.keys.when.of_samples
            if samples:
                return f"fired and found no sample with {samples}"
            return "fired and found no tensor for its action"
        why = f"fired and its target {self.spec.keys.target} is None"
        if lacks_points(self.module):
            why += " (model.args.attention=points gives patterns)"
        return why

    def found_nothing(self) -> None:
        """Count the current firing as idle: it found nothing for its action."""
        if self._idle_at != self.fired:
            self._idle_at = self.fired
            self.idle += 1

    def untouched(self, x: Tensor) -> Tensor | None:
        """Nothing in x is for the action; None, or x with gradients of 0 for the parameters that the hook trains.

        Other ranks may have something for it, and sharded gradients are reduced only if each rank has them.
        """
        self.found_nothing()
        trained = list(self._hook.new_parameters)
        action = self.spec.action
        if action.trains:
            trained.append(str(action.adds(self.hook_name)))
        if not trained or not torch.is_grad_enabled():
            return None
        nothing = torch.cat([getattr(self.module, name).flatten()[:0] for name in trained])
        return x + nothing.sum().to(x)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Firings inside the block are not counted."""
        counts = (self.fired, self.idle, self.changed, self.total)
        in_graphs = self.fired_in_graphs
        before = None if in_graphs is None else in_graphs.clone()
        was_uncounted = self.is_uncounted
        self.is_uncounted = True
        try:
            yield
        finally:
            self.is_uncounted = was_uncounted
            self.fired, self.idle, self.changed, self.total = counts
            if in_graphs is not None and before is not None:
                in_graphs.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        """The counts, the positions of the random draws, and the `state_dict()` of the user's own objects."""
        state = {
            "fired": self.fired,
            "idle": self.idle,
            "changed": int(self.changed),
            "total": self.total,
            "draws": self._draws.state_dict(),
            "calls": None if self.calls is None else {"total": self.calls.total},
            "held": [self._of_object(own, "state_dict") for own in self._held],
            "in_graphs": self.firings - self.fired,
        }
        if self.by_step:
            state["by_step"] = list(self.by_step)
        if self.fold is not None:
            state["fold"] = self.fold.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.fired = state["fired"]
        self.idle = state["idle"]
        self.changed = state["changed"]
        self.total = state["total"]
        self.by_step = state.get("by_step", ())
        self._draws.load_state_dict(state["draws"])
        if self.calls is not None and state["calls"] is not None:
            self.calls.go_on_from(state["calls"]["total"])
        if self.fired_in_graphs is None:  # it cannot be in a graph now
            self.fired += state["in_graphs"]
        else:
            self.fired_in_graphs.fill_(state["in_graphs"])
        if self.fold is not None and "fold" in state:
            self.fold.load_state_dict(state["fold"])
        # for another plan there may be more or fewer states than objects
        for own, held in zip(self._held, state["held"], strict=False):
            self._of_object(own, "load_state_dict", held)

    def _of_object(self, own: Any, method: str, *args: Any) -> Any:
        try:
            return getattr(own, method)(*args)
        except Exception as error:
            raise HookError(f"{self.where}: {type(own).__name__}.{method} failed: {reason(error)}") from error

    @contextmanager
    def context(self) -> Iterator[HookContext]:
        """What a user's own function may know about the current firing."""
        clock = self.clock
        keys = self.spec.keys
        recorded = Recorded()
        yield HookContext(
            self.hook_name,
            self.hook_type.name,
            self.path,
            self.module,
            clock.mode,
            clock.epoch,
            clock.step,
            self.call,
            self.current.within or str(keys.target or ""),
            self.generator,
            recorded.add,
            self.current.args,
        )
        numbers = recorded.numbers
        recorded.numbers = None
        if numbers:
            self.emit(numbers)

    def flipped(self, x: Tensor, bits: Sequence[int], draw: Draw, *, by_sample: bool) -> Tensor:
        self._require("flipped")
        given = self._values.get("faults")
        clock = self.clock
        sink = self.sink
        index = None
        dim = self.batch.of(self.current.path) if x.dim() else None
        if self.part is not None and given is None:
            # elements are numbered with the batch first; the part is one of the tensor as the module has it
            places = torch.arange(x.numel(), device="cpu").view(x.shape).movedim(0, dim or 0)
            if self.part.nothing_of(places):
                self.found_nothing()
                return x.clone()
            index = self.part.of(places).reshape(-1)
        # a rank without rows of the batch: NaN in its pass would reach the gradients of the others
        of_ranks = distributed.is_available() and distributed.is_initialized()
        without_rows = clock.is_dummy_pass and clock.rows is None and self.hook_type.sees_batch and of_ranks
        if not self.has_values or without_rows:
            return x.clone()
        if isinstance(given, PendingRun):
            return self._unknown(given, x)
        samples = clock.samples if clock.samples is not None else sink.counted
        there = Faulty(
            x,
            clock.rows if self.hook_type.sees_batch else None,
            samples if self.hook_type.batch and dim is not None else None,
            {**dict(zip(RECORD_KEYS, self.record_start(), strict=True)), "split": sink.split},
        )
        number = self._draws.next()
        if isinstance(given, FaultList):
            faults = there.listed(given.at(number, self.fired if repeating() is None else 0))
        else:
            faults = there.drawn(index, bits, draw, derived_seed(self.seed, *number), by_sample)
        new, records = there.flipped(faults)
        for record in records:
            self.emit({"split": sink.split, **record, "draw": list(number)})
        return new
