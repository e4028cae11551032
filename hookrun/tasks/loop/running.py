"""A run under way: the model with its hooks installed, the run directory, the screen; one forward of a batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from hookrun.errors import HookrunError
from hookrun.interruptions import pending
from hookrun.ranks.alone import Ranks
from hookrun.runtime import Installation
from hookrun.runtime.clock import RowsOfRank
from hookrun.runtime.reduced import ReducedGradients
from hookrun.spec import Settings
from hookrun.store.records import Of
from hookrun.store.run_dir import RunDir
from hookrun.tasks.loop.batches import Batch, Batches, BatchesOfSplits
from hookrun.tasks.loop.built import as_call
from hookrun.tasks.loop.compiled import Compiled
from hookrun.tasks.loop.metrics import Average
from hookrun.tasks.loop.passing import DurableRows, Holding, PartialPass
from hookrun.tasks.loop.prepared import Prepared
from hookrun.tasks.loop.progress import Screen, numbers
from hookrun.tasks.loop.rank_rows import share
from hookrun.tasks.loop.rank_sums import agreed_stop, draws_of_main, summed
from hookrun.tasks.loop.resuming import Resuming
from hookrun.tasks.loop.sample_names import SampleNames
from hookrun.tasks.loop.sink import RunSink

PASS = "pass"
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Running:
    """What the tasks share.

    scaler:   of the gradients; it does nothing but under `compute.precision: fp16`
    resuming: the states that the run can go on from
    reduced:  the hooks on gradients of parameters, where several ranks compute these
    """

    prepared: Prepared
    hooks: Installation
    sink: RunSink
    run_dir: RunDir
    screen: Screen
    scaler: GradScaler
    resuming: Resuming
    reduced: ReducedGradients = field(default_factory=ReducedGradients)

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return self.run_dir.ranks

    @property
    def settings(self) -> Settings:
        """The settings of the experiment."""
        return self.prepared.settings

    @property
    def model(self) -> nn.Module:
        """The hooked model."""
        return self.prepared.model

    @property
    def stopped(self) -> bool:
        """Whether a check asks for the end of the run. Only checks that may ask are waited for."""
        return self.sink.stop is not None or (self._may_stop and self.hooks.stopped is not None)

    @cached_property
    def _may_stop(self) -> bool:
        return any(hook.spec.action.may_stop() for hook in self.prepared.plan.hooks)

    def forward(self, batch: Batch) -> Any:
        """The model's output, under automatic mixed precision where that was asked for; None where there is no row."""
        if not len(batch.ids):
            return None
        self.hooks.samples, self.hooks.population = batch.ids, batch.population
        self.sink.split = batch.split
        if self.ranks.several:
            mine = share(batch.whole, self.ranks.rank, self.ranks.size)
            self.hooks.clock.rows = RowsOfRank(mine, batch.whole)
        if self._names_spans:
            self.hooks.spans = batch.spans
        args, kwargs = as_call(batch.inputs, self.model)
        with self.autocast():
            return self._call(*args, **kwargs)

    @cached_property
    def _names_spans(self) -> bool:
        clauses = [hook.spec.keys.tokens for hook in self.prepared.plan.hooks]
        return any(each.spans for clause in clauses if clause for each in clause.filters)

    @cached_property
    def _call(self) -> Callable[..., Any]:
        return Compiled(self.hooks, self.model) if self.settings.compute.compile else self.model

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The loss of the batch."""
        with self.autocast():
            return self.prepared.loss(output, batch.target)

    def average(self) -> Average:
        """The means of the task's metrics, with no sample seen yet."""
        return Average(self.prepared.metrics)

    def read(self, average: Average) -> dict[str, float]:
        """The means over all samples, those of all ranks included; every rank asks."""
        return summed(average, self.prepared.metrics, self.ranks).read()

    def after(self, batch: Batch) -> None:
        """A batch is over on every rank. One that had no row for a rank left that rank's hooks a draw behind."""
        self.run_dir.batches += 1
        if self.ranks.several and batch.whole < self.ranks.size:
            draws_of_main(self.hooks, self.ranks)

    def agree(self) -> None:
        """Where a check on one rank asks for the end of the run, every rank ends; every rank calls it."""
        if self.ranks.several and self._may_stop:
            self.sink.stop = agreed_stop(self.hooks.stopped, self.ranks)

    def autocast(self) -> AbstractContextManager[Any]:
        """Automatic mixed precision, where that was asked for."""
        dtype = _AUTOCAST.get(self.settings.compute.precision)
        return torch.autocast(self.prepared.device.type, dtype) if dtype is not None else nullcontext()

    def log(self, split: str, values: dict[str, float], of: Of | None = None, **more: float) -> None:
        """One line of metrics.jsonl.

        of: what the values are means of: a logged batch, or a whole pass through the split; None: neither
        """
        clock = self.hooks.clock
        about = {"split": split, "epoch": clock.epoch, "step": clock.step}
        about |= {} if of is None else {"of": of}
        self.run_dir.log_metrics(**about, **values, **more)
        self.sink.loggers.metrics(split, {**values, **more}, clock.step, of)

    def conclude(self, split: str, values: dict[str, float], of: Of | None = None) -> None:
        """The result of the task: one line of metrics.jsonl, and one on the screen."""
        self.log(split, values, of)
        self.screen.say(f"{split:8} {numbers(values)}")

    @contextmanager
    def logged(self, number: int) -> Iterator[bool]:
        """A step or batch; True, and edits count what they change, on every `train.log_every`-th of them."""
        logs = number % self.settings.train.log_every == 0
        self.hooks.clock.counting = logs
        try:
            yield logs
        finally:
            self.hooks.clock.counting = False

    def evaluate(
        self,
        batches: Batches | BatchesOfSplits,
        split: str,
        label: str,
        forward: Callable[[Batch], Any] | None = None,
        names: SampleNames | None = None,
    ) -> dict[str, float]:
        """Mean loss and metrics of the model in evaluation mode. A step of the hooks' clock is a batch here.

        forward: gives the model's output for a batch; None: `forward` of this object
        names:   writes what the samples are called
        """
        if not len(batches):
            raise HookrunError(f"the data has no samples in its {split} split")
        average = self.average()
        with self.evaluating(batches, label, {"average": average}) as (passed, shown):
            for batch in passed:
                number = self.hooks.clock.step
                with self.logged(number):
                    output = (forward or self.forward)(batch)
                    if len(batch.ids):  # else all its rows are other ranks'
                        loss = self.loss(output, batch)
                        self.add(average, loss, output, batch)
                if names is not None and len(batch.ids):
                    names.write(batch, output)
                self.hooks.step()
                if number % self.settings.train.log_every == 0:
                    shown.update(self.read(average))
        return self.read(average)

    def add(self, average: Average, loss: Tensor | None, output: Any, batch: Batch) -> None:
        """The rank's rows of a batch count in the means."""
        if loss is not None and self.ranks.several and self.prepared.loss.sums:
            loss = loss * (batch.whole / len(batch.ids))  # each rank has a part of the sum over the batch
        average.add(loss, output, batch.target, tokens=batch.data.of_tokens)

    @contextmanager
    def evaluating(
        self,
        batches: Batches | BatchesOfSplits,
        label: str,
        holding: Mapping[str, Holding] | None = None,
    ) -> Iterator[tuple[Iterator[Batch], dict[str, float]]]:
        """One pass in evaluation mode without gradients; the clock's step and the model's mode are put back.

        The pass ends early where a check asks for that.

        holding: what the caller adds up from batch to batch: a run that was cut off goes on in the middle of the pass.
                 None: it says nothing of that, and no state is saved during the pass
        """
        self.ranks.from_main(list(self.model.buffers()))  # in training each rank has moved its own
        clock, training = self.hooks.clock, self.model.training
        at = PartialPass(clock.step, holding or {})
        if holding is None or not self.resuming.take(PASS, at.load_state_dict):
            clock.step = 0
        self.sink.loggers.reach(at.step)
        shown = dict[str, float]()
        self.model.eval()
        try:
            with ExitStack() as stack:
                if holding is not None:
                    stack.enter_context(self.resuming.hold(PASS, at.state_dict))
                stack.enter_context(torch.no_grad())
                self.resuming.begin()
                passed = self._passed(batches, at, label, shown, saves=holding is not None)
                yield stack.enter_context(closing(passed)), shown
        finally:
            self.sink.settle()
            self.model.train(training)
            clock.step = at.step

    def _passed(
        self,
        batches: Batches | BatchesOfSplits,
        at: PartialPass,
        label: str,
        shown: dict[str, float],
        *,
        saves: bool,
    ) -> Generator[Batch]:
        """The batches that are left; when the next one is asked for, the one before it is over."""
        rest = batches.epoch(0, at.batches)
        trains, rows = self.prepared.task.trains, DurableRows(self.run_dir, self.resuming)
        with closing(self.screen.track(rest, len(batches), label, shown, at.batches)) as tracked:
            for batch in tracked:
                yield batch
                at.batches += 1
                self.after(batch)
                self.agree()
                if self.stopped:
                    if saves:
                        self.resuming.save()
                    return
                if not saves and (signal := pending()) is not None:
                    raise signal  # what the task adds up would be lost
                if saves and trains:
                    self.resuming.point()
                elif saves:
                    rows.point()
