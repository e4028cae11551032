"""The current run, as tasks use it: the hooked model, the run directory, the screen, and passes over batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from hookrun.data import Split
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.plan.texts import decoder_of, tokenizer_of
from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.clock import RowsOfRank
from hookrun.engine.runtime.reduced import ReducedGradients
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.spec.when import Wanted
from hookrun.engine.values.containers import arguments, describe
from hookrun.engine.values.folded import shown_samples
from hookrun.errors import HookrunError, at_module, reason
from hookrun.run.experiment.metrics.metrics import LOSS
from hookrun.run.experiment.prepared import Prepared, as_call
from hookrun.run.experiment.session import generator_states, set_generators
from hookrun.run.experiment.sharding import DTYPES, reshard
from hookrun.run.passes.average import Average
from hookrun.run.passes.batches import Batch, Batches, BatchesOfSplits
from hookrun.run.passes.compile_check import Compiled, buffers_kept
from hookrun.run.passes.measuring import Measuring
from hookrun.run.passes.over_ranks import agreed_stop, draws_of_main, folds_of_all, gathered_trees, sum_of
from hookrun.run.passes.progress import Screen, numbers
from hookrun.run.passes.resuming import Resuming
from hookrun.run.passes.sample_names import SampleNames
from hookrun.run.passes.sink import RunSink
from hookrun.run.passes.step_changes import noting_changes
from hookrun.run.ranks import share
from hookrun.signals import pending
from hookrun.store.records import Of
from hookrun.store.run_dir import RunDir
from hookrun.store.states.files import SECONDS

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


@dataclass
class PartialPass:
    """The progress of a pass.

    step:    the step of the hooks' clock before the pass; during the pass the clock counts batches from 0
    sums:    the objects with sums over batches, by name
    batches: the number of finished batches
    """

    step: int
    sums: Mapping[str, Stateful] = field(default_factory=dict)
    batches: int = 0

    def state_dict(self) -> dict[str, Any]:
        """The progress with the states of the sums, as plain values and tensors."""
        sums = {name: part.state_dict() for name, part in self.sums.items()}
        return {"step": self.step, "batches": self.batches, "holding": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the progress by a saved one."""
        self.step = state["step"]
        self.batches = state["batches"]
        for name, part in self.sums.items():
            part.load_state_dict(state["holding"][name])


_NO_AUTOCAST = nullcontext()


@dataclass
class RunContext:
    """The objects of the current run, which all tasks use.

    scaler:   the gradient scaler; it is enabled only with `compute.precision: fp16`
    resuming: saves and loads resumable states
    reduced:  runs the hooks on parameter gradients, if several ranks sum these
    _others:  the output for the current batch without the hooks, if a metric compares with it
    """

    prepared: Prepared
    hooks: Installation
    sink: RunSink
    run_dir: RunDir
    screen: Screen
    scaler: GradScaler
    resuming: Resuming
    reduced: ReducedGradients = field(default_factory=ReducedGradients)
    _others: Any = None

    def __post_init__(self) -> None:
        self.ranks = self.run_dir.ranks
        self.settings = self.prepared.settings
        self.model = self.prepared.model  # the hooked model
        self._called: Callable[..., Any] = self.model
        if self.settings.compute.compile:
            self._called = Compiled(self.hooks, self.model)
        self.measuring = Measuring(self.prepared)  # computes the task's metrics
        # Sharded parameters need every rank to take part in every pass.
        self.sharded = self.ranks.several and self.settings.compute.strategy == "fsdp"
        self._autocast_dtype = DTYPES.get(self.settings.compute.precision)
        self._noted = set[str]()  # notes on metrics that were shown
        self._may_stop = False
        self._names_spans = False
        self._needs_labels = False
        self._of_data = dict[str, Wanted]()  # hook -> the values in fields of samples for which it acts
        for hook in self.prepared.plan.hooks:
            keys = hook.spec.keys
            if hook.spec.action.value_of(Meaning.POLICY) == "stop":
                self._may_stop = True
            if keys.tokens is not None and any(tokens.spans for tokens in keys.tokens.filters):
                self._names_spans = True
            if keys.when.data is not None:
                self._of_data[hook.spec.name] = keys.when.data
            if hook.spec.action.by_label:
                self._needs_labels = True

    @property
    def stopped(self) -> bool:
        """Whether a check stops the run. Pending results of checks are read only if some check may stop it."""
        return self.sink.stop is not None or (self._may_stop and self.hooks.stopped is not None)

    def forward(self, batch: Batch) -> Any:
        """The model's output, under automatic mixed precision if configured; None if this rank has no row."""
        if not batch.ids.numel():  # faster than `len`, which torch implements in Python
            if self.sharded and batch.pattern is not None:
                with self.silently(edit=True):
                    self.forward(batch.pattern)
            return None
        if self.measuring.without_hooks:
            self._others = self.without_hooks(batch)
        self.set_batch(batch)
        args, kwargs = as_call(batch.inputs, self.model)
        try:
            with self.autocast():
                return self._called(*args, **kwargs)
        except HookrunError:
            raise
        except Exception as error:
            where = self.settings.data.unstacked
            if not where:
                raise
            raise HookrunError(
                f"{where}: the model fails: {reason(error)}{at_module(error)}; it was called with "
                f"{describe(arguments(args, kwargs)):.300}: a tuple of inputs is its arguments, a dict its "
                "keywords, and anything else one argument"
            ) from error

    def set_batch(self, batch: Batch) -> None:
        """Tell the hooks that the next calls of the model are for the samples of this batch.

        Only in the first batch does torch fill new memory with NaN, as in deterministic mode, so that it shows whether
        the model reads memory that it has not written. It takes up to a tenth of the time of a small network.
        """
        clock = self.hooks.clock
        if clock.samples is not None:
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        clock.samples = batch.ids
        clock.population = batch.population
        self.sink.split = batch.split
        if self.ranks.several:
            mine = share(batch.whole, self.ranks.rank, self.ranks.size)
            clock.rows = None if clock.is_dummy_pass else RowsOfRank(mine, batch.whole)
        if self._names_spans:
            self.hooks.spans = batch.spans
        if self._needs_labels:
            clock.labels = batch.classes
        clock.matching = {name: batch.matches(wanted) for name, wanted in self._of_data.items()}

    @contextmanager
    def silently(self, *, edit: bool) -> Iterator[None]:
        """Nothing is counted or recorded of the passes in the block, and buffers are restored after them.

        edit: the hooks change values in the forward pass all the same; False: no hook runs
        """
        clock = self.hooks.clock
        before = clock.is_dummy_pass
        with self.hooks.uncounted() if edit else self.hooks.paused(), buffers_kept(self.model):
            clock.is_dummy_pass = edit
            try:
                yield
            finally:
                clock.is_dummy_pass = before

    def without_hooks(self, batch: Batch) -> Any:
        """The output without the hooks; buffers and random generators are restored afterwards.

        It is computed before the output with hooks, so that layers such as dropout draw the same numbers for both.
        """
        args, kwargs = as_call(batch.copied().inputs, self.model)
        states = generator_states()
        try:
            with self.silently(edit=False), torch.no_grad(), self.autocast():
                return self.model(*args, **kwargs)
        finally:
            set_generators(states)

    def measure(self, average: Average, loss: Tensor | None, output: Any, batch: Batch) -> None:
        """Add a batch to the means.

        loss: the mean loss of this rank's rows; None: not computed
        """
        others = self._others
        self._others = None
        if loss is not None and self.ranks.several and self.prepared.loss.sums:
            # each rank has only a part of the sum over the batch
            loss = loss * (batch.whole / len(batch.ids))
        self.measuring.add(average, loss, output, batch, others)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The loss of the batch."""
        with self.autocast():
            return self.prepared.loss(output, batch.target)

    def sample_names(self, parts: Mapping[Split, Batches]) -> SampleNames:
        """The writer of samples.jsonl for these splits, with the texts of tokens."""
        data = self.prepared.data
        decode = None
        if data.tokenizer is not None:
            decode = decoder_of(tokenizer_of(self.model, data.tokenizer).tokenizer)
        log_texts = None if decode is None else partial(self.sink.log_texts, decode)
        reader = self.prepared.loss.reader
        return SampleNames(self.run_dir, parts, reader, data.has_target_of_sample, log_texts)

    def sum_over_ranks(self, average: Average) -> Average:
        """The sum of the Averages of all ranks; every rank calls it, one without rows with an empty Average."""
        if not self.ranks.several:
            return average
        return sum_of(gathered_trees(self.ranks, average.state_dict()), average.empty)

    def after(self, batch: Batch) -> None:
        """Call it after each batch on every rank.

        If a rank had no row of the batch, its hooks made fewer random draws, which then continue as on rank 0.
        """
        self.run_dir.batches += 1
        if self.ranks.several and batch.whole < self.ranks.size:
            draws_of_main(self.hooks, self.ranks)

    def agree(self) -> None:
        """If a check on one rank stops the run, stop it on every rank; every rank calls it."""
        if self.ranks.several and self._may_stop:
            self.sink.stop = agreed_stop(self.hooks.stopped, self.ranks)

    def write_records(self) -> None:
        """Write the records of hooks so far; every rank calls it."""
        self.sink.settle()
        self.run_dir.take_kept()

    def autocast(self) -> AbstractContextManager[Any]:
        """A context manager for automatic mixed precision, if configured."""
        dtype = self._autocast_dtype
        return _NO_AUTOCAST if dtype is None else torch.autocast(self.prepared.device.type, dtype)

    def log(self, split: str, values: dict[str, float], of: Of | None = None, **more: float) -> None:
        """Write one line of metrics.jsonl, also to the loggers.

        of: whether the values are means of a logged batch or of a whole pass over the split; None: neither
        """
        clock = self.hooks.clock
        values = {**values, **more}
        line: dict[str, Any] = {"split": split, "epoch": clock.epoch, "step": clock.step}
        if of is not None:
            line["of"] = of
        self.run_dir.log_metrics(**line, **values)
        self.sink.loggers.tell(lambda logger: logger.metrics(split, values, clock.step, of))

    def read(self, split: str, average: Average) -> dict[str, float]:
        """The means of a whole pass, and the metrics over it; NaN if one is not defined.

        Metrics by position or sample, and notes on those over the whole split, are written to metrics.jsonl here.

        Raises HookrunError if a requested metric has no value.
        """
        clock = self.hooks.clock
        values = average.read()
        self.measuring.require_all(values)
        for line_split, line in average.lines():
            about = {"split": line_split or split, "epoch": clock.epoch, "step": clock.step}
            self.run_dir.log_metrics(**about, **line)
        over_split, notes = average.over_split()
        for note in notes:
            self.run_dir.log_metrics(split=split, epoch=clock.epoch, step=clock.step, note=note)
        self.screen.note([f"{split}: {note}" for note in notes if note not in self._noted])
        self._noted.update(notes)
        return values | over_split

    def conclude(self, split: str, values: dict[str, float], of: Of | None = None) -> None:
        """Write the result of the task as a line of metrics.jsonl, and print it; or why there is none."""
        missing = self.prepared.plan.no_output
        if missing is not None:
            self.run_dir.log_metrics(split=split, epoch=self.hooks.clock.epoch, note=missing, **values)
            self.screen.say(f"{split:8} {missing}")
            return
        self.log(split, values, of)
        self.screen.say(f"{split:8} {numbers(values)}")

    @contextmanager
    def logged(self, number: int) -> Iterator[bool]:
        """A block for one step or batch. It is logged, and edits are counted, on every `train.log_every`-th."""
        clock = self.hooks.clock
        clock.counting = number % self.settings.train.log_every == 0
        try:
            yield clock.counting
        finally:
            clock.counting = False

    def noting_changes(self, is_logged: bool) -> AbstractContextManager[None]:
        """A block for one step of a training: what the hooks change in it is noted if the step is logged."""
        if not is_logged:
            return nullcontext()
        return noting_changes(self._editing, self.hooks.clock.step, self.settings.train.log_every)

    @cached_property
    def _editing(self) -> list[HookSite]:
        """The sites of the hooks that edit values."""
        return [site for site in self.hooks.sites if not site.spec.action.observes]

    def evaluate(
        self,
        batches: Batches | BatchesOfSplits,
        split: str,
        label: str,
        *,
        forward: Callable[[Batch], Any] | None = None,
        names: SampleNames | None = None,
        store: Callable[[Batch, Any], None] | None = None,
    ) -> dict[str, float]:
        """Mean loss and metrics of the model in evaluation mode. The hooks' clock counts a batch as a step.

        They are computed if the task has metrics. The loss is one of these, or the task trains.

        split:   the split, for lines of metrics
        label:   the label of the progress bar
        forward: batch -> the model's output; None: `forward` of this object
        names:   writes samples.jsonl; None: not written
        store:   called with each batch and its output

        Raises HookrunError for a split without samples.
        """
        prepared = self.prepared
        has_output = prepared.plan.no_output is None
        needs_loss = prepared.task.trains or any(metric.name == LOSS for metric in prepared.metrics)
        measures = has_output and (needs_loss or bool(prepared.metrics))
        forward = forward or self.forward
        average = self.measuring.average()
        sums: dict[str, Stateful] = {"average": average}
        if names is not None:
            sums["names"] = names
        with self.evaluating(batches, label, sums) as (passed, shown):
            for batch in passed:
                number = self.hooks.clock.step
                with self.logged(number):
                    output = forward(batch)
                loss = None
                if batch.ids.numel():  # otherwise other ranks have all of its rows
                    if store is not None and has_output:
                        store(batch, output)
                    if measures:
                        loss = self.loss(output, batch) if needs_loss else None
                        self.measure(average, loss, output, batch)
                    if names is not None:
                        names.write(batch, output)
                if measures and needs_loss and self.hooks.clock.reads_loss:
                    self.hooks.loss = self._loss_of_ranks(loss, batch)
                self.hooks.step()
                if measures and number % self.settings.train.log_every == 0:
                    shown.update(self.sum_over_ranks(average.means()).read())
        if names is not None:
            names.write_pictures(shown_samples(folds_of_all(self.hooks, self.ranks)))
        return self.read(split, self.sum_over_ranks(average)) if measures else {}

    def _loss_of_ranks(self, loss: Tensor | None, batch: Batch) -> Tensor | float:
        """The loss of the rows of all ranks; every rank calls it. loss: that of this rank's rows; None: it has none"""
        if loss is not None and not self.ranks.several:
            return loss
        sums = self.prepared.loss.sums
        weight = 1.0 if sums else float(batch.weight_without(self.prepared.loss.ignored))
        part = 0.0 if loss is None else weight * float(loss)
        total, weights = self.ranks.total([part, weight])
        return total if sums else total / max(weights, 1)

    @contextmanager
    def evaluating(
        self,
        batches: Batches | BatchesOfSplits,
        label: str,
        sums: Mapping[str, Stateful] | None = None,
    ) -> Iterator[tuple[Iterator[Batch], dict[str, float]]]:
        """One pass in evaluation mode without gradients; the clock's step and the model's mode are restored afterwards.

        Yields the batches, and the numbers to show beside the progress bar. The pass ends early if a check stops the
        run.

        sums: the caller's sums over batches, which are saved so that the run can be resumed within the pass;
              None: no state is saved during the pass

        Raises HookrunError if there are no batches.
        """
        if not len(batches):
            raise HookrunError(f"the data has no samples in its {batches.split} split")
        if self.ranks.several:  # in training, each rank has changed its own buffers
            self.ranks.from_main(list(self.model.buffers()))
            self.write_records()  # the steps of the pass are numbered anew
        clock = self.hooks.clock
        training = self.model.training
        saves = sums is not None
        at = PartialPass(clock.step, sums or {})
        averages = {f"holding.{name}": part for name, part in at.sums.items() if isinstance(part, Average)}
        with self.resuming.state_part("pass", at, averages) if saves else nullcontext(False) as resumed:
            clock.training_at = at.step if self.prepared.task.trains else None
            clock.step = clock.step if resumed else 0
            self.sink.loggers.reach(at.step)
            shown: dict[str, float] = {}
            self.model.eval()
            try:
                self.resuming.begin()
                passed = self._passed(batches, at, label, shown, saves=saves)
                with torch.no_grad(), closing(passed):
                    yield passed, shown
            finally:
                self.sink.settle()
                if self.sharded:
                    reshard(self.model)
                self.model.train(training)
                clock.training_at = None
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
        """The remaining batches; a request for the next batch means that the last one is finished."""
        rest = batches.epoch(0, at.batches)
        trains = self.prepared.task.trains
        shards = 0 if trains else self.run_dir.shards
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
                if saves:
                    # Rows that are on the disk are not computed again. Saving writes buffered rows too, so that
                    # indexes and the state agree.
                    due = not trains and (self.run_dir.shards != shards or self.resuming.seconds >= SECONDS)
                    if self.resuming.point(due) and not trains:
                        shards = self.run_dir.shards
                elif (signal := pending()) is not None:
                    raise signal  # without saving: a state would lack the task's sums
