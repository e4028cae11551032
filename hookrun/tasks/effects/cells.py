"""Computes the cells of a grid batch by batch: several cells in one forward pass, each in its copy of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Generator, Tensor

from hookrun.errors import spec_error
from hookrun.run_values import RunReferences
from hookrun.store.states.files import SECONDS
from hookrun.tasks.effects.moved import Activation, Job
from hookrun.tasks.effects.prepared import PreparedEffects
from hookrun.tasks.effects.reading import Reading, same, usable_head
from hookrun.tasks.effects.replay import Replay
from hookrun.tasks.metrics.measuring import predicted_rows
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.prepare import as_call
from hookrun.tasks.run.session import generator_states, set_generators
from hookrun.values.containers import members, rebuild

MOST_NUMBERS = {"cpu": 2**20}
"""Device type -> how many numbers the largest activation of a pass may have, over all copies; see `copies`."""
ON_ACCELERATORS = 2**27
MOST_COPIES = 64
_SAVED = ("plain", "clean", "values", "estimates")


class Cells:
    """The values of all jobs, with what has to be saved to go on from the middle of a batch.

    values:    [jobs, samples] the metric
    plain:     [samples] the metric without the hook
    clean:     [samples] the metric of the other run
    estimates: [jobs, samples] the first-order change of the metric
    """

    def __init__(
        self,
        context: RunContext,
        prepared: PreparedEffects,
        against: str | None,
        samples: int,
    ) -> None:
        self._context, self._moved, self.jobs = context, prepared.moved, prepared.jobs
        self._estimated, jobs, scouted = prepared.estimated, prepared.jobs, prepared.scouted
        paths = [path for job in jobs for path in job.paths]
        self._replay = Replay(context.model, scouted, set(paths))
        entries = [self._replay.entry(job.paths) for job in jobs]
        order = sorted(range(len(jobs)), key=lambda number: self._replay.order(entries[number]))
        self._groups = [(entry, list(numbers)) for entry, numbers in groupby(order, key=entries.__getitem__)]
        head = usable_head(prepared, scouted.head)
        unembed = None if head is None else context.model.get_submodule(head)
        self._reading = Reading(prepared, context.measuring, unembed)
        self._largest = scouted.largest if head is not None else max(scouted.largest, scouted.scores)
        self._against = None if against is None else RunReferences.of(prepared.experiment).open(against)
        self._together = dict[str, bool]()
        self._done, self._recorded = 0, False
        nothing = torch.full((samples,), torch.nan, dtype=torch.float64)
        self.plain, self.clean = nothing.clone(), nothing.clone()
        self.values = nothing.repeat(len(jobs), 1)
        self.estimates = nothing.repeat(len(self._estimated), 1)

    @property
    def compares(self) -> bool:
        """Whether there is another run to compare with."""
        return self._against is not None

    # ---- saved states ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The values so far, and the position within the batch."""
        position = {"together": dict(self._together), "done": self._done, "recorded": self._recorded}
        return {name: getattr(self, name) for name in _SAVED} | position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for name in _SAVED:
            getattr(self, name).copy_(state[name])
        self._together = dict(state["together"])
        self._done, self._recorded = state["done"], state["recorded"]

    # ---- one batch -------------------------------------------------------------------------------------------------

    def compute(self, batch: Batch) -> Any:
        """Compute every job for a batch. Returns the output of the pass without the hook, None if it was computed."""
        context, moved, clock = self._context, self._moved, self._context.hooks.clock
        measuring = context.measuring
        others = context.without_hooks(batch) if measuring.without_hooks else None
        context.set_batch(batch)
        self._reading.begin(batch, others)
        moved.new_batch()
        generators, before = generator_states(python=False), self._places()
        seen_before = self._recorded
        moved.reached, moved.records, clock.stands_in = self._replay.reach, not seen_before, seen_before
        with self._replay.storing(), context.hooks.uncounted() if seen_before else nullcontext():
            output = self._forward(batch, 1)
        moved.reached, moved.records, clock.stands_in = None, False, True
        self._reading.see(output)
        (plain,) = self._reading.copies_of(output, 1)
        ids = batch.ids
        self.plain[ids] = self._read(plain)
        after, self._recorded = (generator_states(python=False), self._places()), True

        def again() -> None:
            set_generators(generators)
            self._set_places(before)

        if self._against is not None and not seen_before:
            (clean,) = self._reading.copies_of(self._predictions(batch), 1, whole=True)
            self.clean[ids] = self._read(clean)
        if self._estimated and not seen_before:
            again()
            self._estimate(batch)
        for numbers, entry in self._passes(len(ids)):
            again()
            self._pass(batch, numbers, entry, plain, again)
            self._done += len(numbers)
            again()
            context.resuming.point(context.resuming.seconds >= SECONDS)
        set_generators(after[0])
        self._set_places(after[1])
        self._done, self._recorded = 0, False
        return output

    def _passes(self, samples: int) -> Iterator[tuple[list[int], str | None]]:
        """The jobs of each pass that is still to be made, and the hooked module that runs first in it."""
        most = MOST_NUMBERS.get(self._context.prepared.device.type, ON_ACCELERATORS)
        copies = min(max(most // max(self._largest * samples, 1), 1), MOST_COPIES)
        done = self._done
        for entry, numbers in self._groups:
            skipped, done = numbers[:done], max(done - len(numbers), 0)
            left = numbers[len(skipped) :]
            yield from ((left[at : at + copies], entry) for at in range(0, len(left), copies))

    def _pass(
        self, batch: Batch, numbers: Sequence[int], entry: str | None, plain: Any, again: Callable[[], None]
    ) -> None:
        """Compute some jobs in one pass, or each alone if the copies of the batch depend on each other.

        Whether they do is seen in the first passes from each entry: one more copy has no hook, and its output must be
        that of the unedited pass.
        """
        jobs = [self.jobs[number] for number in numbers]
        if entry is not None and self._together.get(entry, True) and not self._moved.uses_arguments:
            unknown = entry not in self._together
            try:
                copies = self._run(batch, [*jobs, None] if unknown else jobs, entry)
                fits = not unknown or same(copies[-1], plain)
                if unknown and (not fits or any(not same(copy, plain) for copy in copies[:-1])):
                    self._together[entry] = fits
            except Exception:  # whatever the model's own code raises for more rows than the batch has
                fits = self._together[entry] = False
            if fits:
                for number, copy in zip(numbers, copies, strict=False):
                    self.values[number, batch.ids] = self._read(copy)
                return
        for number, job in zip(numbers, jobs, strict=True):
            again()
            (copy,) = self._run(batch, [job], None)
            self.values[number, batch.ids] = self._read(copy)

    def _run(self, batch: Batch, blocks: Sequence[Job | None], entry: str | None) -> list[Any]:
        """One pass with a copy of the batch for each job; what the metric is computed from, for each."""
        copies, self._moved.blocks = len(blocks), blocks
        try:
            with self._replay.from_entry(entry, copies):
                return self._reading.copies_of(self._forward(batch, copies), copies)
        finally:
            self._moved.blocks = (None,)

    def _forward(self, batch: Batch, copies: int) -> Any:
        """The model's output for copies of the batch, one after the other."""
        context, passes = self._context, self._context.hooks.clock.passes

        def repeated(leaf: Any) -> Any:
            return leaf.repeat(copies, *[1] * (leaf.dim() - 1)) if isinstance(leaf, Tensor) else leaf

        args, kwargs = as_call(
            batch.inputs if copies == 1 else rebuild(batch.inputs, repeated), context.model
        )
        if passes is not None:
            passes.copies = copies
        try:
            with context.autocast(), self._reading.of_rows_only(copies):
                return context.model(*args, **kwargs)
        finally:
            if passes is not None:
                passes.copies = 1

    def _read(self, copy: Any) -> Tensor:
        """[B] float64 on the CPU: the metric of each sample."""
        return self._reading.values(copy).detach().to("cpu", torch.float64)

    def _predictions(self, batch: Batch) -> Any:
        """The scores of the other run for the samples of the batch."""
        assert self._against is not None
        rows = predicted_rows(self._against, batch.split)
        return rows.of(batch.ids, Generator()).to(batch.target.device)

    # ---- random numbers --------------------------------------------------------------------------------------------

    def _places(self) -> list[Any]:
        """The positions of the random draws of all hooks."""
        return [site.draws_place for site in self._context.hooks.sites]

    def _set_places(self, places: Sequence[Any]) -> None:
        for site, place in zip(self._context.hooks.sites, places, strict=True):
            site.draws_place = place

    # ---- the gradient ----------------------------------------------------------------------------------------------

    def _estimate(self, batch: Batch) -> None:
        """One forward and one backward pass: (value - activation) · d metric / d activation, for every job."""
        moved, reading = self._moved, self._reading
        moved.kept = kept = list[Activation]()
        try:
            with torch.enable_grad(), self._context.hooks.uncounted():
                (copy,) = reading.copies_of(self._forward(batch, 1), 1)
                total = reading.values(copy).nansum()
        finally:
            moved.kept = None
        if not total.requires_grad:
            raise spec_error(
                "task.method",
                f"the metric {reading.metric.name!r} has no gradient with respect to the values of the hook",
                "use a metric that changes smoothly, such as loss, probability or logit_difference; or method: exact",
            )
        tensors = [tensor for activation in kept for tensor in activation.tensors]
        gradients = iter(torch.autograd.grad(total, tensors, allow_unused=True))
        sites = [(activation, [next(gradients) for _ in activation.tensors]) for activation in kept]
        for number, job in enumerate(self._estimated):
            change = torch.zeros(len(batch.ids), dtype=torch.float64)
            for activation, of_tensors in sites:
                if activation.path in job.paths:
                    change += self._change(job, activation, of_tensors, len(batch.ids))
            self.estimates[number, batch.ids] = change

    def _change(
        self, job: Job, activation: Activation, gradients: Sequence[Tensor | None], samples: int
    ) -> Tensor:
        """[B]: the change of the metric to first order in what the job changes of the activation."""
        site = self._moved.sites[activation.path]
        site.fired, current = site.fired + 1, site.current
        current.of_pass, current.of_call = activation.of_pass, activation.call
        try:
            new = self._moved.op(job.hook, activation.path, job.seed)(activation.value)
        finally:
            current.of_pass = current.of_call = None
        total = torch.zeros(samples, dtype=torch.float64)
        pairs = zip(members(activation.value), members(new), strict=True)
        floats = [pair for pair in pairs if isinstance(pair[0], Tensor) and pair[0].is_floating_point()]
        for (old, changed), gradient in zip(floats, gradients, strict=True):
            if gradient is None or changed is old:
                continue
            products = ((changed - old) * gradient).to("cpu", torch.float64)
            if old.dim() and old.shape[0] % samples == 0:
                total += products.reshape(samples, -1).sum(1)
            else:  # all samples share the tensor
                total += products.sum() / samples
        return total
