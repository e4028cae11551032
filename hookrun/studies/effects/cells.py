"""Computes the cells of a grid batch by batch: several cells in one forward pass, each in its copy of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from hookrun.engine.hook_types import FORWARD_PRE
from hookrun.engine.runtime.tokens.calls import DECODER_IDS, parameters_of
from hookrun.engine.values.containers import members, rebuild, tensors
from hookrun.engine.values.tensors import read_together
from hookrun.errors import Problem, SpecError, counted, first_lines
from hookrun.studies.effects.circuit import KeptCells
from hookrun.studies.effects.grid import Trial
from hookrun.studies.effects.moved import Activation, MovedHook
from hookrun.studies.effects.parts import parts_of
from hookrun.studies.effects.records import (
    CLEAN,
    CLEAN_OF_SAMPLES,
    EXACT,
    GRADIENT,
    OF_SAMPLES,
    PLACEBO,
    PLAIN,
    PLAIN_OF_SAMPLES,
    RESTORED,
    SEEDS,
    Effects,
)
from hookrun.studies.effects.replay import Replay, repeated
from hookrun.studies.kit.passes import (
    LOSS,
    PERPLEXITY,
    SECONDS,
    Batch,
    BatchRows,
    Measuring,
    Prepared,
    RunContext,
    RunValues,
    Split,
    as_call,
    generator_states,
    own_token_scores,
    predicted_rows,
    row_values,
    set_generators,
)

MOST_NUMBERS = {"cpu": 2**20}
"""Device type -> how many numbers the largest activation of a pass may have, over all copies; see `copies`."""
ON_ACCELERATORS = 2**27
MOST_COPIES = 64
MOST_FAULTS = 1_000
"""How many faults of cells the file of the effects lists."""
_SAVED = ("plain", "clean", "values")


class MetricReader:
    """Computes the metric for the samples of a batch.

    head: the linear layer that computes the scores for tokens; it runs at the tokens only at which the metric is read.
          None: the model's whole output is computed
    """

    def __init__(self, prepared: Prepared, measuring: Measuring, head: nn.Module | None) -> None:
        self.metric = prepared.metrics[0]
        self._loss = prepared.loss
        self._reader = prepared.loss.reader
        self._measuring = measuring
        self._head = head
        self._source: BatchRows
        self._sizes: set[int]

    def begin(self, batch: Batch, others: Any) -> None:
        """Set the batch; `others` is the output without hooks, if the metric compares with it."""
        self._batch = batch
        self._others = others
        if self._head is not None:
            shape = (*batch.target.shape, next(self._head.parameters()).shape[0])
            self._choose(torch.empty(1, 1, 1, device=batch.target.device).expand(shape))

    def see(self, output: Any) -> None:
        """Take note of the output of the unedited pass."""
        named = self._reader.named(output, self.metric.of)
        self._sizes = {tensor.shape[0] for tensor in tensors(named) if tensor.dim()}
        if self._head is None:
            self._choose(output)

    def _choose(self, output: Any) -> None:
        rows = self._measuring.rows(output, self._batch, self._others)
        rows = rows.of_paths.get(self.metric.of, rows)
        if self.metric.needs_target(of_tokens=rows.samples is not None):
            rows = rows.with_targets
        self._source = rows

    @contextmanager
    def of_rows_only(self, copies: int) -> Iterator[None]:
        """Within the block the head computes only the rows of which the metric is read."""
        if self._head is None:
            yield
            return
        chosen = self._source.chosen

        def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
            hidden: Tensor = args[0]
            rows = hidden.reshape(copies, -1, hidden.shape[-1])[:, chosen]
            return (rows.flatten(0, 1),)

        handle = self._head.register_forward_pre_hook(take)
        try:
            yield
        finally:
            handle.remove()

    def copies_of(self, output: Any, copies: int, *, whole: bool = False) -> list[Any]:
        """What the metric is computed from, for each copy: the scores [n, classes] of the chosen tokens, or the output.

        whole: the output has the scores of all tokens, not only of those in `of_rows_only`
        """
        source = self._source
        output = self._reader.named(output, self.metric.of)
        if source.samples is None:
            return [output] if copies == 1 else parts_of(output, copies, self._sizes)
        scores = own_token_scores(output)
        assert scores is not None  # else the rows could not have been chosen
        if self._head is not None and not whole:
            return list(scores.unflatten(0, (copies, -1)).unbind())
        return [part[source.chosen] for part in scores.flatten(0, 1).chunk(copies)]

    def rows(self, copy: Any) -> BatchRows:
        """The rows of which the metric is computed."""
        source = self._source
        if source.samples is None:
            scores = None if source.scores is None else self._reader.scores(copy, source.targets)
            return replace(source, scores=scores, output=copy)
        others = None if source.others is None else source.others[source.chosen]
        return replace(source, scores=copy, others=others, chosen=None)

    def values(self, copy: Any) -> Tensor:
        """[B]: the metric of each sample, the mean over its tokens; NaN for a sample without a token to read.

        A metric or loss of the user's own that has one value for a batch has it for each of its samples.
        """
        source = self._source
        places = source.samples
        if places is None:
            places = source.chosen
        values = self._of_rows(self.rows(copy))
        if places is not None:
            places = places.to(values.device)
            counts = values.new_zeros(len(self._batch.ids)).index_add(0, places, torch.ones_like(values))
            values = torch.zeros_like(counts).index_add(0, places, values) / counts
        if self.metric.name == PERPLEXITY:
            values = values.exp()
        return values

    def _of_rows(self, rows: BatchRows) -> Tensor:
        """[n]: the metric of each row."""
        metric = self.metric
        if not len(rows):
            return torch.zeros(0)
        if metric.name == LOSS and self._loss.code is not None:
            return self._loss(*rows.whole()).expand(len(rows))
        if metric.name == LOSS:
            return rows.one_by_one(self._loss)
        column = row_values([metric], rows).get(metric.name)
        if column is None:
            raise metric.misfit(rows)
        column = column.expand(len(rows))
        return column if column.is_floating_point() else column.float()


def usable_head(prepared: Prepared, head: str | None) -> str | None:
    """The head of a model of tokens, unless a hook sees its input, its output, or the output of a module around it."""
    if head is None or prepared.data.tokenizer is None or DECODER_IDS in parameters_of(prepared.model):
        return None
    if prepared.settings.train.output is not None or prepared.metrics[0].of is not None:
        return None
    callers = {head.rsplit(".", up)[0] for up in range(head.count(".") + 1)} | {""}
    for hook in prepared.plan.hooks:
        for match in hook.matches:
            sees_output = match.path in callers and hook.spec.hook_type is not FORWARD_PRE
            if sees_output or match.path == head:
                return None
    return head


def same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two outputs are equal but for rounding."""
    pairs = zip(tensors(left), tensors(right), strict=True)
    return all(_close(a, b) for a, b in pairs if a.is_floating_point())


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not b.numel():
        return True
    scale = float(b.abs().nan_to_num(0.0, 0.0).max())
    share = 2e-5 if b.dtype in (torch.float32, torch.float64) else 3e-2
    return torch.allclose(a, b, rtol=share, atol=share * scale, equal_nan=True)


class Cells:
    """The values of all trials, with what has to be saved to go on from the middle of a batch.

    values: [trials, samples] the metric; of a metric over the whole split [trials, 1], filled at the end
    plain:  [samples] the metric without the hook
    clean:  [samples] the metric of the other run

    trials: what is computed
    again:  it is another pass over the samples, for circuits: no observer fires; the first trial keeps no cell, and the
            others start from what its pass has stored
    """

    def __init__(
        self,
        context: RunContext,
        moved: MovedHook,
        trials: Sequence[Trial | KeptCells],
        samples: int,
        against: str | None = None,
        *,
        again: bool = False,
    ) -> None:
        self.context = context
        self.moved = moved
        self._trials = trials
        self._again = again
        self._base = trials[0] if again else None  # the trial of the pass that is stored
        self.is_done = False
        self._start = self._draws()
        prepared = context.prepared
        scouted = moved.grid.scouted
        self._estimated = list[int]()  # the numbers of trials without a pass of their own
        paths_of = {cell.number: cell.paths for cell in moved.grid.cells}
        computed: dict[int, Set[str]] = {}
        for number, trial in enumerate(trials):
            if trial.kind == GRADIENT:
                self._estimated.append(number)
            elif trial is not self._base:
                cells = trial.cells if isinstance(trial, KeptCells) else [trial.cell.number]
                computed[number] = set[str]().union(*(paths_of[cell] for cell in cells))
        self._replay = Replay(context.model, scouted, computed, moved.grid.paths if again else ())
        head = usable_head(prepared, scouted.head)
        unembed = None
        self._largest = max(scouted.largest, scouted.scores)
        if head is not None:
            unembed = context.model.get_submodule(head)
            self._largest = scouted.largest
        self._reading = MetricReader(prepared, context.measuring, unembed)
        self._against = None
        if against is not None:
            self._against = RunValues.of(prepared.experiment).open(against)
        self._together = dict[str, bool]()
        self._done = 0
        self._over_split = self._reading.metric.over is not None
        nothing = torch.full((1 if self._over_split else samples,), torch.nan, dtype=torch.float64)
        self.plain = nothing.clone()
        self.clean = nothing.clone()
        self.values = nothing.repeat(len(trials), 1)
        self._columns = {str(number): row for number, row in enumerate(self.values)}
        self._columns |= {PLAIN: self.plain, CLEAN: self.clean}
        # The rows of a metric over the whole split: without the hook, of the other run, and of each trial.
        places = self._columns if self._over_split else ()
        self._rows = {place: context.measuring.average(share=len(places)) for place in places}
        self._notes = list[str]()

    # ---- saved states, results -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The values so far, and how many trials of the batch are done."""
        return {
            **{name: getattr(self, name) for name in _SAVED},
            "is_done": self.is_done,
            "start": self._start,
            "together": dict(self._together),
            "done": self._done,
            "rows": {place: average.state_dict() for place, average in self._rows.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for name in _SAVED:
            getattr(self, name).copy_(state[name])
        self.is_done = state["is_done"]
        self._start = state["start"]
        self._together = dict(state["together"])
        self._done = state["done"]
        for place, average in self._rows.items():
            average.load_state_dict(state["rows"][place])

    def end(self) -> None:
        """Call it after the last batch: another pass over the samples then draws the same random numbers."""
        self.is_done = True
        self._set_draws(self._start)

    def again(self, trials: Sequence[KeptCells]) -> Cells:
        """The values of other trials, for another pass over the samples."""
        others = Cells(self.context, self.moved, trials, len(self.plain), again=True)
        others.plain.copy_(self.plain)
        return others

    def means(self) -> Tensor:
        """[trials]: the metric, the mean over samples."""
        self._read_rows()
        return self.values.nanmean(-1)

    def _read_rows(self) -> None:
        """Compute a metric over the split from its rows."""
        for place, average in self._rows.items():
            if not average.samples:
                continue  # no other run
            values, notes = average.over_split()
            self._columns[place][:] = values[self._reading.metric.name]
            if place == PLAIN:
                self._notes = notes

    def effects(self, split: Split) -> Effects:
        """The means over samples, or the metric over the split, in the order of the axes."""
        self._read_rows()
        tensors = self._means()
        samples = range(0)
        if not self._over_split:
            tensors |= self._of_samples()
            samples = range(len(self.plain))
        grid = self.moved.grid
        axes = {axis.key: axis.labels for axis in grid.axes}
        about = {"hook": grid.hook.spec.name, "metric": self._reading.metric.name, "split": split}
        return Effects(tensors, axes, samples, about, first_lines(dict.fromkeys(self.faults()), MOST_FAULTS))

    def _means(self) -> dict[str, Tensor]:
        """What is known of each cell, and of the metric without the hook."""
        plain = self.plain.nanmean()
        means = {PLAIN: plain}
        exact = self._placed(EXACT).nanmean(-1)
        placebo = self._placed(PLACEBO)
        if len(exact):
            means[EXACT] = exact.mean(0)
        if len(exact) > 1:
            means[SEEDS] = exact
        if len(placebo):
            means[PLACEBO] = placebo.nanmean(-1)
        if self._estimated:
            means[GRADIENT] = self._placed(GRADIENT).nanmean(-1).mean(0)
        if self._against is not None:
            clean = self.clean.nanmean()
            means[CLEAN] = clean
            means[RESTORED] = (means[EXACT] - plain) / (clean - plain)
        return means

    def _of_samples(self) -> dict[str, Tensor]:
        """The metric of each sample."""
        tensors = {PLAIN_OF_SAMPLES: self.plain}
        exact = self._placed(EXACT)
        if len(exact):
            tensors[OF_SAMPLES] = exact.mean(0)
        if self._against is not None:
            tensors[CLEAN_OF_SAMPLES] = self.clean
        return tensors

    def faults(self) -> Iterator[str]:
        """Notes on the metric without the hook; a line for each trial that makes it NaN or infinite."""
        for note in self._notes:
            yield f"without the hook: {note}"
        metric = self._reading.metric.name
        wrong = (~self.values.isfinite() & self.plain.isfinite()).sum(1).tolist()
        for trial, count in zip(self._trials, wrong, strict=True):
            if count:
                samples = "" if self._over_split else f" for {counted(count, 'sample')}"
                name = self.moved.grid.name_of(trial)
                yield f"{name}: {metric} ({trial.kind}) is NaN or infinite{samples}"

    def _placed(self, kind: str) -> Tensor:
        """[repeats, *cells, samples] of the trials of a kind; NaN where there is none."""
        rows: dict[tuple[int, ...], Tensor] = {}
        for trial, row in zip(self._trials, self.values, strict=True):
            if isinstance(trial, Trial) and trial.kind == kind:
                rows[trial.number, *trial.cell.place] = row
        repeats = 1 + max((number for number, *_ in rows), default=-1)
        whole = torch.full((repeats, *self.moved.grid.sizes, len(self.plain)), torch.nan, dtype=torch.float64)
        for place, row in rows.items():
            whole[place] = row
        return whole

    # ---- one batch -------------------------------------------------------------------------------------------------

    def compute(self, batch: Batch) -> Any:
        """Compute every trial for a batch. Returns the output of the pass that is stored."""
        context = self.context
        moved = self.moved
        reading = self._reading
        clock = context.hooks.clock
        is_new = not self._done  # else the run was cut off in this batch: observers have seen it
        others = None
        if context.measuring.without_hooks:
            others = context.without_hooks(batch)
        context.set_batch(batch)
        reading.begin(batch, others)
        moved.begin()
        again = partial(self._set_draws, self._draws())
        records = is_new and not self._again
        clock.is_dummy_pass = not records
        with (
            moved.storing(record=records, on_fire=self._replay.note_fired),
            self._replay.storing(),
            nullcontext() if records else context.hooks.uncounted(),
        ):
            output = self._forward(batch, [self._base])
        clock.is_dummy_pass = True
        reading.see(output)
        (stored,) = reading.copies_of(output, 1)
        if is_new or not self._over_split:
            self._keep(["0" if self._again else PLAIN], batch, [stored])
        after = self._draws()
        if self._against is not None and is_new:
            scores = (
                predicted_rows(self._against, batch.split).of(batch.ids, Generator()).to(batch.target.device)
            )
            self._keep([CLEAN], batch, reading.copies_of(scores, 1, whole=True))
        if self._estimated and is_new:
            again()
            self._estimate(batch)
        for numbers, entry in self._passes(len(batch.ids)):
            self._pass(batch, numbers, entry, stored, again)
            self._done += len(numbers)
            again()
            context.resuming.point(context.resuming.seconds >= SECONDS)
        self._set_draws(after)
        self._done = 0
        clock.is_dummy_pass = False
        return output

    def _passes(self, samples: int) -> Iterator[tuple[list[int], str | None]]:
        """The trials of each pass that is still to be made, and the hooked module that runs first in it."""
        most = MOST_NUMBERS.get(self.context.prepared.device.type, ON_ACCELERATORS)
        copies = min(max(most // max(self._largest * samples, 1), 1), MOST_COPIES)
        done = self._done
        for entry, numbers in self._replay.groups().items():
            for at in range(done, len(numbers), copies):
                yield numbers[at : at + copies], entry
            done = max(done - len(numbers), 0)

    def _pass(
        self, batch: Batch, numbers: Sequence[int], entry: str | None, stored: Any, again: Callable[[], None]
    ) -> None:
        """Compute some trials in one pass, or each alone if the copies of the batch depend on each other.

        Whether they do is seen in the first passes from each entry: one more copy repeats the stored pass, and must
        have its output.
        """
        trials = [self._trials[number] for number in numbers]
        if entry is not None and self._together.get(entry, True) and not self.moved.uses_arguments:
            unknown = entry not in self._together
            again()
            try:
                copies = self._copies(batch, [*trials, self._base] if unknown else trials, entry)
                fits = not unknown or same(copies[-1], stored)
                if unknown and (not fits or any(not same(copy, stored) for copy in copies[:-1])):
                    self._together[entry] = fits
            except Exception:  # whatever the model's own code raises for more rows than the batch has
                fits = self._together[entry] = False
            if fits:
                self._keep(map(str, numbers), batch, copies[: len(numbers)])
                return
        for number, trial in zip(numbers, trials, strict=True):
            again()
            self._keep([str(number)], batch, self._copies(batch, [trial]))

    def _copies(
        self, batch: Batch, blocks: Sequence[Trial | KeptCells | None], entry: str | None = None
    ) -> list[Any]:
        """What the metric is computed from, for each trial, from one pass with a copy of the batch for each."""
        return self._reading.copies_of(self._forward(batch, blocks, entry), len(blocks))

    def _forward(
        self, batch: Batch, blocks: Sequence[Trial | KeptCells | None], entry: str | None = None
    ) -> Any:
        """The model's output for a copy of the batch for each trial, one after the other.

        entry: the hooked module that runs first, before which nothing has to be computed; None: not known
        """
        context = self.context
        passes = context.hooks.clock.passes
        copies = len(blocks)
        args, kwargs = as_call(rebuild(batch.inputs, partial(repeated, copies)), context.model)
        self.moved.blocks = blocks
        if passes is not None:
            passes.copies = copies
        try:
            with (
                self._replay.from_entry(entry, copies),
                context.autocast(),
                self._reading.of_rows_only(copies),
            ):
                return context.model(*args, **kwargs)
        finally:
            self.moved.blocks = (None,)
            if passes is not None:
                passes.copies = 1

    def _keep(self, places: Iterable[str], batch: Batch, copies: Sequence[Any]) -> None:
        """Keep the metric of each sample of a batch, or the rows of a metric over the whole split, for each copy."""
        reading = self._reading
        if self._over_split:
            for place, copy in zip(places, copies, strict=True):
                self._rows[place].add(None, reading.rows(copy), ids=batch.ids, split=batch.split)
            return
        for place, values in zip(places, read_together(map(reading.values, copies)), strict=True):
            self._columns[place][batch.ids] = values.double()

    # ---- random numbers --------------------------------------------------------------------------------------------

    def _draws(self) -> tuple[Mapping[str, Any], list[Any]]:
        """The states of torch's generators, and the positions of the random draws of all hooks."""
        return generator_states(python=False), [site.draws_place for site in self.context.hooks.sites]

    def _set_draws(self, draws: tuple[Mapping[str, Any], Sequence[Any]]) -> None:
        generators, places = draws
        set_generators(generators)
        for site, place in zip(self.context.hooks.sites, places, strict=True):
            site.draws_place = place

    # ---- the gradient ----------------------------------------------------------------------------------------------

    def _estimate(self, batch: Batch) -> None:
        """One forward and one backward pass: (value - activation) · d metric / d activation, for every trial."""
        moved = self.moved
        reading = self._reading
        moved.kept = kept = list[Activation]()
        try:
            with torch.enable_grad(), self.context.hooks.uncounted():
                (copy,) = self._copies(batch, (None,))
                total = reading.values(copy).nansum()
        finally:
            moved.kept = None
        if not total.requires_grad:
            what = (
                f"the metric {reading.metric.name!r} has no gradient with respect to the values of the hook"
            )
            hint = "use a metric that changes smoothly, such as loss, probability or logit_difference; or method: exact"
            raise SpecError([Problem("task.method", what, hint)])
        tensors: list[Tensor] = []
        for activation in kept:
            tensors += activation.tensors
        gradients = torch.autograd.grad(total, tensors, allow_unused=True)
        for number in self._estimated:
            trial = self._trials[number]
            assert isinstance(trial, Trial)
            value = self.plain[batch.ids]
            first = 0
            for activation in kept:
                of_tensors = gradients[first : first + len(activation.tensors)]
                first += len(activation.tensors)
                if activation.site.path in trial.cell.paths:
                    value = value + self._change(trial, activation, of_tensors, len(batch.ids))
            self.values[number, batch.ids] = value

    def _change(
        self, trial: Trial, activation: Activation, gradients: Sequence[Tensor | None], samples: int
    ) -> Tensor:
        """[B]: the change of the metric to first order in what the trial changes of the activation."""
        site = activation.site
        site.fired += 1
        op = self.moved.op(trial.hook, site.path, trial.seed)
        new = site.current.in_call(activation.call, activation.of_pass, op, activation.value)
        total = torch.zeros(samples, dtype=torch.float64)
        of_tensors = iter(gradients)
        for old, changed in zip(members(activation.value), members(new), strict=True):
            if not isinstance(old, Tensor) or not old.is_floating_point():
                continue
            gradient = next(of_tensors)
            if gradient is None or changed is old:
                continue
            products = ((changed - old) * gradient).to("cpu", torch.float64)
            if old.dim() and old.shape[0] % samples == 0:
                total += products.reshape(samples, -1).sum(1)
            else:  # all samples share the tensor
                total += products.sum() / samples
        return total
