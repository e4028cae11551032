"""The training loop: epochs of steps, each followed by validation, checkpoints and a resumable state."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hookrun.data import Split
from hookrun.run.experiment.optimizers import last_milestone, make_optimizer, make_scheduler
from hookrun.run.experiment.sharding import whole_state
from hookrun.run.passes.batches import Batch, Batches
from hookrun.run.passes.context import RunContext
from hookrun.run.passes.progress import numbers
from hookrun.run.training.ema import WeightAverage
from hookrun.run.training.nonfinite import FiniteSteps
from hookrun.run.training.rank_gradients import step_gradients
from hookrun.run.training.step import Training, train_step
from hookrun.store.states.files import save_weights

BEST, LAST, AVERAGED = "best.safetensors", "last.safetensors", "ema.safetensors"


def train(context: RunContext) -> None:
    """Train until all epochs or steps are finished, or a check stops the run."""
    settings = context.settings.train
    resuming = context.resuming
    training = _training(context)
    average = training.average
    if average is not None:
        resuming.around = average.swapped_out
    with resuming.state_part("train", training, {"means": training.means}):
        resuming.begin()
        context.model.train()
        while training.epoch < settings.epochs:
            context.hooks.clock.epoch = training.epoch
            if training.values is None:
                if training.is_over:
                    break
                training.values = _train_epoch(training)
            _after_epoch(training)
            if context.stopped:
                break
    if settings.checkpoint.keeps("last"):
        _save(context, LAST)
        if average is not None:
            with average.swapped_in():
                _save(context, AVERAGED)
    resuming.writer.wait()
    folder = context.run_dir.checkpoints
    kept = [name for name in (BEST, LAST, AVERAGED) if (folder / name).exists()]
    why = f"none, as train.checkpoint.save is {settings.checkpoint.save}"
    context.screen.say(f"checkpoints: {', '.join(kept) or why}")


def _training(context: RunContext) -> Training:
    """Optimizer, schedule, batches and sums, as at the start of training."""
    settings = context.settings.train
    prepared = context.prepared
    batches = _batches(context, "train", shuffle=settings.shuffle)
    val = _batches(context, "val") if prepared.data.sizes["val"] != 0 else None
    assert prepared.trained is not None
    by_name = dict(context.model.named_parameters(remove_duplicate=False))
    optimizer = make_optimizer(settings.optimizer, prepared.trained.groups, by_name)
    return Training(
        context,
        optimizer,
        FiniteSteps(context, optimizer),
        _scheduler(context, optimizer, len(batches)),
        "step" if settings.scheduler is None else settings.scheduler.interval,
        batches,
        val,
        context.measuring.average().means(),
        step_gradients(context),
        context.measuring.average().means(),
        None if settings.ema is None else WeightAverage(context.model, settings.ema.decay),
    )


def _batches(context: RunContext, split: Split, *, shuffle: bool = False) -> Batches:
    prepared = context.prepared
    return Batches(prepared, split, shuffle=shuffle, ranks=context.ranks, read=prepared.read)


def _scheduler(context: RunContext, optimizer: Optimizer, batches: int) -> LRScheduler | None:
    """The schedule, for the steps or epochs of the run. batches: of an epoch"""
    settings = context.settings.train
    schedule = settings.scheduler
    if schedule is None:
        return None
    intervals = settings.epochs
    if schedule.interval == "step":
        intervals *= -(-batches // settings.accumulate)
        if settings.steps:
            intervals = min(settings.steps, intervals)
    intervals = max(intervals, 1)
    scheduler = make_scheduler(schedule, optimizer, intervals)
    last = last_milestone(schedule)
    if last >= intervals:
        note = f"the run ends after {schedule.interval} {intervals}, before milestone {last}"
        context.screen.note([f"train.scheduler: {note}"])
    return scheduler


def _save(context: RunContext, name: str) -> None:
    """Save the weights in the background; they are written before the next state and before training ends."""
    is_main = context.ranks.is_main
    state = whole_state(context.model, keeps=is_main) if context.sharded else None
    if is_main:  # the other ranks have the same weights
        path = context.run_dir.checkpoints / name
        applied = context.prepared.plan.applied()
        save_weights(context.model, path, context.resuming.writer, applied=applied, state=state)
        context.run_dir.wrote(path)


def _train_epoch(training: Training) -> dict[str, float]:
    """Train one epoch, or the rest of it; returns the mean loss and metrics over its samples."""
    context = training.context
    settings = context.settings.train
    every = settings.checkpoint.every.steps
    total = len(training.train)
    shown: dict[str, float] = {}
    group: list[Batch] = []
    rest = training.train.epoch(training.epoch, training.batches)
    tracked = context.screen.track(rest, total, training.label, shown, training.batches)
    with closing(tracked) as batches:
        for number, batch in enumerate(batches, training.batches + 1):
            group.append(batch)
            if len(group) < settings.accumulate and number < total:
                continue
            train_step(training, group, shown)
            group.clear()
            training.batches = number
            if context.stopped:
                context.resuming.save()
            if training.is_over:
                break
            context.resuming.point(every is not None and context.hooks.clock.step % every == 0)
    whole = context.sum_over_ranks(training.means)
    skipped = training.steps.end_epoch()
    values = whole.read() or {"loss": math.nan}  # NaN if every step was skipped
    if not context.stopped:  # the means of an epoch that a check ended are not logged
        if whole.samples:
            values = context.read("train", whole)
        context.log("train", values, "epoch", **skipped)
    context.screen.say(f"{training.label}  train {numbers(values)}")
    return values


def _after_epoch(training: Training) -> None:
    """Finish an epoch: validate, save the best weights, step the schedule. After a stop the epoch stays unfinished."""
    context = training.context
    settings = context.settings.train
    values = training.values or {}
    with nullcontext() if training.average is None else training.average.swapped_in():
        if training.val is not None and not context.stopped:
            values = _validate(training, training.val)
        is_stopped = context.stopped
        best = training.best
        if is_stopped:  # within the first epoch, its present weights are the best ones
            is_best = best is None
        else:
            score = values.get("accuracy", -values["loss"])
            is_best = best is None or score > best or math.isnan(best)
            if is_best:
                training.best = score
        if is_best and settings.checkpoint.keeps("best"):
            _save(context, BEST)
    if is_stopped:  # the state was saved at the stop; a resumed run continues this epoch
        return
    if isinstance(training.scheduler, ReduceLROnPlateau) and training.interval == "epoch":
        training.scheduler.step(values["loss"])
    elif training.scheduler is not None and training.interval == "epoch":
        training.scheduler.step()
    training.epoch += 1
    training.batches = 0
    training.values = None
    training.means.clear()
    context.write_records()
    every = settings.checkpoint.every.epochs
    context.resuming.point(every is not None and training.epoch % every == 0, in_background=True)


def _validate(training: Training, val: Batches) -> dict[str, float]:
    """The loss and the metrics of the validation split.

    samples.jsonl is written once in a run: sequences in the first epoch, to label the axes of pictures; samples with a
    class in the last epoch, with the classes that the trained model predicts.
    """
    context = training.context
    if val.data.of_tokens:
        writes = training.epoch == 0
    else:
        is_last = training.epoch + 1 == context.settings.train.epochs or training.is_over
        writes = is_last and context.prepared.data.num_classes is not None
    names = context.sample_names({"val": val}) if writes else None
    values = context.evaluate(val, "val", "validation", names=names)
    context.log("val", values, "epoch")
    context.screen.say(f"{' ' * len(training.label)}  val   {numbers(values)}")
    return values
