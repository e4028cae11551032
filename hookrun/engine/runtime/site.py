"""One hook at one module or parameter: its counts, its records and captures; and the sinks that take these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from hookrun.engine.actions.base import RECORD_KEYS, HookContext, Keeper, Measured, TokenRows
from hookrun.engine.actions.check import LastPassed, verdict
from hookrun.engine.actions.user_code import Recorded
from hookrun.engine.actions.values import InlineFunction
from hookrun.engine.plan.attention_points import lacks_points
from hookrun.engine.plan.outside import FaultList, PendingRun
from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.runtime.call_stack import Calls
from hookrun.engine.runtime.checkpointing import repeating
from hookrun.engine.runtime.clock import Clock, CurrentCall
from hookrun.engine.runtime.faults import Draw, Faulty
from hookrun.engine.runtime.part import TensorPart
from hookrun.engine.runtime.rng import derived_seed, kept_samples
from hookrun.engine.runtime.site_values import SiteValues
from hookrun.engine.runtime.snapshot import copied
from hookrun.engine.trust.load import Trusted
from hookrun.engine.values.containers import plain, readable
from hookrun.errors import CheckFailed, HookError, reason

if TYPE_CHECKING:
    from hookrun.engine.actions.fields import Keep


class Sink:
    """Where records and captured values go; this one drops them.

    There is one for the run directory, one for memory and one for trial runs.

    wants_calls: it needs the number of each module call within the forward pass
    has_values:  tensors hold real values, which may be read; False in a trial run
    stores_rows: it stores captures by sample
    stop:        why a check with policy `stop` asks for the end of the run, or None
    last_good:   where each check passed last; only if it `has_values`
    split:       the split of the current batch; None: not known
    counted:     [B], row numbers for a batch whose sample ids are not known; None: they are not numbered
    """

    wants_calls = False
    has_values = True
    stores_rows = False
    stop: str | None = None
    last_good: LastPassed
    split: str | None = None
    counted: Tensor | None = None

    def keeper(self, site: HookSite) -> Keeper:
        """A function that stores the values that the site captures."""
        return lambda value, rows=None, tokens=None: None

    def emit(self, start: tuple[Any, ...], data: Mapping[str, Any] | Measured, *, show: bool = False) -> None:
        """Take a record, whose tensors may be read later. `show`: print it at once.

        start: the values of RECORD_KEYS, with which the record begins
        """

    def settle(self) -> None:
        """Read the tensors of pending records."""

    def fail(self, site: HookSite, what: str) -> None:
        """A site cannot do what its hook asks for: raises HookError that names both; a trial run notes it."""
        raise HookError(f"{site.where}: {what}")

    def guard(self, site: HookSite, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op of a site, whose exceptions end the run; in a trial run a version that notes them."""
        return op

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""


class HookSite(SiteValues):
    """One hook at one module or parameter, see `hookrun.engine.actions.base`; each installation creates new ones.

    fired:     how often the hook fired here (its schedule let it through)
    idle:      firings in which the hook found nothing to act on
    fired_in_graphs: the same inside compiled graphs, a 0-dimensional tensor that they add to
    target_was_none: the target was None in a firing
    let_through: an action on the call itself did not take place in some call
    changed:   how many of the `total` elements its edits changed, counted while `clock.counting`
    passes_on: other hooks take what it sees, as it sees it
    passed_part: the part of it that they take, also of positions that a generation computes again; None: all of it
    tokenizer: for the text of tokens; None: not known
    zeros_of:  name of a parameter of the module -> its KeptZero, while an `apply` hook runs
    """

    zeros_of: Callable[[str], Any]

    def __init__(
        self,
        hook: PlannedHook,
        path: str,
        module: nn.Module,
        clock: Clock,
        sink: Sink,
        seed: int,
        calls: Calls | None = None,
        current: CurrentCall | None = None,
    ) -> None:
        super().__init__(hook, path, module, clock, seed, calls, current, has_values=sink.has_values)
        self.sink = sink
        self.stores_rows = sink.stores_rows
        self.fired = 0
        self.fired_in_graphs: Tensor | None = None
        self.idle = 0
        self._idle_at = 0
        self.target_was_none = False
        self.passes_on = False
        self.passed_part: TensorPart | None = None
        self.let_through = False
        self.changed: Tensor | int = 0
        self.total = 0
        self.tokenizer = hook.tokenizer
        self.reads_arguments = "args" in self.spec.action.uses
        self._held = list[Any]()

    @property
    def call(self) -> int:
        """The number of the module's call within the forward pass, from 0; a gradient has the number of its call."""
        of_call = self.current.of_call
        if of_call is not None:
            return of_call
        return 0 if self.calls is None else self.calls.now.number

    @property
    def firings(self) -> int:
        """How often the hook fired here, also inside compiled graphs."""
        return self.fired if self.fired_in_graphs is None else self.fired + int(self.fired_in_graphs)

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
            none = f"sample with {samples}" if samples else "tensor for its action"
            return f"fired and found no {none}"
        hint = " (model.args.attention=points gives patterns)" if lacks_points(self.module) else ""
        return f"fired and its target {self.spec.keys.target} is None{hint}"

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
        trained, action = list(self._hook.new_parameters), self.spec.action
        if action.trains:
            trained.append(str(action.adds(self.hook_name)))
        if not trained or not torch.is_grad_enabled():
            return None
        nothing = torch.cat([getattr(self.module, name).flatten()[:0] for name in trained])
        return x + nothing.sum().to(x)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Firings inside the block are not counted."""
        counts, in_graphs = (self.fired, self.idle, self.changed, self.total), self.fired_in_graphs
        before = None if in_graphs is None else in_graphs.clone()
        try:
            yield
        finally:
            self.fired, self.idle, self.changed, self.total = counts
            if in_graphs is not None and before is not None:
                in_graphs.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        """The counts, the positions of the random draws, and the `state_dict()` of the user's own objects."""
        return {
            "fired": self.fired,
            "idle": self.idle,
            "changed": int(self.changed),
            "total": self.total,
            "draws": self._draws.state_dict(),
            "calls": None if self.calls is None else {"total": self.calls.total},
            "held": [self._of_object(own, "state_dict") for own in self._held],
            "in_graphs": self.firings - self.fired,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.fired, self.idle = state["fired"], state["idle"]
        self.changed, self.total = state["changed"], state["total"]
        self._draws.load_state_dict(state["draws"])
        if self.calls is not None and state["calls"] is not None:
            self.calls.go_on_from(state["calls"]["total"])
        if self.fired_in_graphs is None:  # it cannot be in a graph now
            self.fired += state["in_graphs"]
        else:
            self.fired_in_graphs.fill_(state["in_graphs"])
        # for another plan there may be more or fewer states than objects
        for own, held in zip(self._held, state["held"], strict=False):
            self._of_object(own, "load_state_dict", held)

    def _of_object(self, own: Any, method: str, *args: Any) -> Any:
        try:
            return getattr(own, method)(*args)
        except Exception as error:
            raise HookError(f"{self.where}: {type(own).__name__}.{method} failed: {reason(error)}") from error

    # ---- what only some actions ask for --------------------------------------------------------------------------

    def function(self, field: str) -> Trusted | InlineFunction:
        """The user's own function that the field names."""
        return self._hook.functions[field]

    @contextmanager
    def context(self) -> Iterator[HookContext]:
        """What a user's own function may know about the current firing."""
        clock, keys, recorded = self.clock, self.spec.keys, Recorded()
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
        numbers, recorded.numbers = recorded.numbers, None
        if numbers:
            self.emit(numbers)

    def register_state(self, own: Any) -> None:
        """Include the state of this object, which the action keeps between firings, in `state_dict`."""
        self._held.append(own)

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the current module call: the positional ones, then the others."""
        self._require("args")
        inputs = self.current.args
        return tuple(inputs.values()) if isinstance(inputs, dict) else inputs or ()

    def flipped(self, x: Tensor, bits: Sequence[int], draw: Draw, *, by_sample: bool) -> Tensor:
        self._require("flipped")
        given, clock, sink, index = self._values.get("faults"), self.clock, self.sink, None
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
        without_rows = clock.stands_in and clock.rows is None and self.hook_type.of_rows and of_ranks
        if not self.has_values or without_rows:
            return x.clone()
        if isinstance(given, PendingRun):
            return self._unknown(given, x)
        samples = clock.samples if clock.samples is not None else sink.counted
        there = Faulty(
            x,
            clock.rows if self.hook_type.of_rows else None,
            samples if self.hook_type.batch and dim is not None else None,
            {**dict(zip(RECORD_KEYS, self._start(), strict=True)), "split": sink.split},
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

    def rebuild(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        return copied(value, change)

    def keep_zero(self, parameter: str, choose: Callable[[Tensor], Tensor]) -> None:
        zeros = self.zeros_of(parameter)
        if self.hook_name not in zeros.chosen_by:  # another module may have the same parameter
            zeros.chosen_by.add(self.hook_name)
            zeros.free = choose(zeros.free)
            zeros.fill()
            self.register_state(zeros)

    # ---- records and captures ----------------------------------------------------------------------------------

    def emit(
        self, data: Mapping[str, Any] | Measured, path: str | None = None, *, show: bool = False
    ) -> None:
        # an edit acts again in a recomputed call, and in passes that the task makes for itself
        if self.spec.action.observes or (repeating() is None and not self.clock.stands_in):
            self.sink.emit(self._start(path), data, show=show)

    def _start(self, path: str | None = None) -> tuple[Any, ...]:
        """The values of RECORD_KEYS for a record about the tensor at `path`, by default the one that is acted on."""
        clock, current = self.clock, self.current
        at = current.within + (current.at if path is None else path)
        action = self.spec.action.action_name
        return self.hook_name, self.path, at, action, clock.mode, clock._epoch, clock._step, self.call

    def fail(self, what: str) -> None:
        """The hook cannot do its work here: raises HookError; a trial run collects the message instead."""
        self.sink.fail(self, what)

    def keep(self) -> Keeper:
        """A function that gives captured values to the sink; under `tokens` with the sample and token of each row."""
        self._require("keep")
        keep, keys, current = self.sink.keeper(self), self.spec.keys, self.current
        if keys.tokens is None and not keys.when.of_samples:
            return keep

        def keep_rows(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            chosen, holding = current.chosen, current.holding
            if holding is not None:
                rows = holding if rows is None else holding[rows]
            if chosen is None:
                keep(value, rows)
                return
            tokens = chosen.rows if rows is None else chosen.rows.at(rows)
            keep(value, tokens.samples, tokens)

        return keep_rows

    def chosen(self, keep: Keep) -> Callable[[Sequence[int]], Tensor]:
        """A function shape -> the row numbers of the samples that `keep` chooses; in a trial run of all rows."""
        if not self.has_values:
            return lambda shape: torch.arange(*shape[:1] or (1,), device="cpu")
        is_kept = kept_samples(keep, self.clock, self._hook_seed, self.where)

        def rows(shape: Sequence[int]) -> Tensor:
            kept, chosen, holding = is_kept(), self.current.chosen, self.current.holding
            places = None if chosen is None else chosen.rows.samples
            if holding is not None:
                places = holding if places is None else places[holding]
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
        result, clock = readable(ok), self.clock
        if result is None and self.has_values and not ok.is_meta:  # the model is being traced
            return
        # under `torch.vmap` there is one result for each mapped element
        if result is not None and result is not ok:
            with torch._C._DisableFuncTorch():
                ok, least, largest = result.all(), plain(least).min(), plain(largest).max()
        record = {"ok": ok, "message": message, "policy": policy, "least": least, "largest": largest}
        if self.hook_type.of_rows and clock.rows is not None and clock.samples is not None:
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
