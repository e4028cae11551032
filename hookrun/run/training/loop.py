"""The training loop: epochs of steps, each followed by validation, checkpoints and a resumable state."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext

from torch.optim.lr_scheduler import ReduceLROnPlateau

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
    settings, ranks, resuming = context.settings.train, context.ranks, context.resuming
    prepared = context.prepared
    batches = Batches(prepared, "train", shuffle=settings.shuffle, ranks=ranks, read=prepared.read)
    has_val = prepared.data.sizes["val"] != 0
    val = Batches(prepared, "val", ranks=ranks, read=prepared.read) if has_val else None
    assert prepared.trained is not None
    by_name = dict(context.model.named_parameters(remove_duplicate=False))
    optimizer = make_optimizer(settings.optimizer, prepared.trained.groups, by_name)
    steps_per_epoch = -(-len(batches) // settings.accumulate)
    steps = min(settings.steps or settings.epochs * steps_per_epoch, settings.epochs * steps_per_epoch)
    schedule, scheduler = settings.scheduler, None
    if schedule is not None:
        intervals = max(settings.epochs if schedule.interval == "epoch" else steps, 1)
        scheduler = make_scheduler(schedule, optimizer, intervals)
        if (last := last_milestone(schedule)) >= intervals:
            note = f"the run ends after {schedule.interval} {intervals}, before milestone {last}"
            context.screen.note([f"train.scheduler: {note}"])
    average = WeightAverage(context.model, settings.ema.decay) if settings.ema is not None else None
    if average is not None:
        resuming.around = average.swapped_out
    training = Training(
        context,
        optimizer,
        FiniteSteps(context, optimizer),
        scheduler,
        schedule.interval if schedule is not None else "step",
        batches,
        val,
        context.measuring.average().means(),
        step_gradients(context),
        context.measuring.average().means(),
        average,
    )
    with resuming.hold("train", training, {"means": training.means}):
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
    kept = [name for name in (BEST, LAST, AVERAGED) if (context.run_dir.checkpoints / name).exists()]
    why = f"none, as train.checkpoint.save is {settings.checkpoint.save}"
    context.screen.say(f"checkpoints: {', '.join(kept) or why}")


def _save(context: RunContext, name: str) -> None:
    """Save the weights in the background; they are written before the next state and before training ends."""
    is_main, state = context.ranks.is_main, None
    if context.sharded:
        state = whole_state(context.model, keeps=is_main)
    if is_main:  # the other ranks have the same weights
        path, applied = context.run_dir.checkpoints / name, context.prepared.plan.applied()
        save_weights(context.model, path, context.resuming.writer, applied=applied, state=state)
        context.run_dir.wrote(path)


def _train_epoch(training: Training) -> dict[str, float]:
    """Train one epoch, or the rest of it; returns the mean loss and metrics over its samples."""
    context, settings = training.context, training.context.settings.train
    total, every = len(training.train), settings.checkpoint.every
    shown = dict[str, float]()
    group = list[Batch]()
    label = training.label
    passed = training.train.epoch(training.epoch, training.batches)
    with closing(context.screen.track(passed, total, label, shown, training.batches)) as batches:
        for number, batch in enumerate(batches, training.batches):
            group.append(batch)
            if len(group) < settings.accumulate and number + 1 < total:
                continue
            train_step(training, group, shown)
            group.clear()
            training.batches = number + 1
            if context.stopped:
                context.resuming.save()
            if training.is_over:
                break
            context.resuming.point(every.steps is not None and context.hooks.clock.step % every.steps == 0)
    whole = context.sum_over_ranks(training.means)
    skipped = training.steps.end_epoch()
    values = whole.read() or {"loss": math.nan}  # NaN if every step was skipped
    if not context.stopped:  # the means of an epoch that a check ended are not logged
        values = context.read("train", whole) if whole.samples else values
        context.log("train", values, "epoch", **skipped)
    context.screen.say(f"{label}  train {numbers(values)}")
    return values


def _after_epoch(training: Training) -> None:
    """Finish an epoch: validate, save the best weights, step the schedule. After a stop the epoch stays unfinished."""
    context, values, val = training.context, training.values or {}, training.val
    settings = context.settings.train
    with training.average.swapped_in() if training.average is not None else nullcontext():
        if val is not None and not context.stopped:
            # samples.jsonl is written once in a run: sequences in the first epoch, to label the axes of pictures;
            # samples with a class in the last epoch, with the classes that the trained model predicts.
            is_last = training.epoch + 1 == settings.epochs or training.is_over
            has_classes = context.prepared.data.num_classes is not None
            writes = training.epoch == 0 if val.data.of_tokens else is_last and has_classes
            names = context.sample_names({"val": val}) if writes else None
            values = context.evaluate(val, "val", "validation", names=names)
            context.log("val", values, "epoch")
            context.screen.say(f"{' ' * len(training.label)}  val   {numbers(values)}")
        stopped, best = context.stopped, training.best
        if stopped:  # within the first epoch, its present weights are the best ones
            is_best = best is None
        else:
            score = values.get("accuracy", -values["loss"])
            is_best = best is None or score > best or math.isnan(best)
            training.best = score if is_best else best
        if is_best and settings.checkpoint.keeps("best"):
            _save(context, BEST)
    if stopped:  # the state was saved at the stop; a resumed run continues this epoch
        return
    if training.scheduler is not None and training.interval == "epoch":
        if isinstance(training.scheduler, ReduceLROnPlateau):
            training.scheduler.step(values["loss"])
        else:
            training.scheduler.step()
    training.epoch, training.batches, training.values = training.epoch + 1, 0, None
    training.means.clear()
    context.write_records()
    every = settings.checkpoint.every.epochs
    context.resuming.point(every is not None and training.epoch % every == 0, in_background=True)
