"""The training loop: epochs of steps, each followed by validation, checkpoints and a resumable state."""

from __future__ import annotations

import math
from contextlib import closing

from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookrun.store.states import checkpoint
from hookrun.tasks.run.batches import Batch, Batches
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.progress import numbers
from hookrun.tasks.sharded.rank_gradients import step_gradients
from hookrun.tasks.sharded.sharding import whole_state
from hookrun.tasks.training.ema import WeightAverage
from hookrun.tasks.training.nonfinite import FiniteSteps
from hookrun.tasks.training.optimizers import last_milestone, make_optimizer, make_scheduler
from hookrun.tasks.training.step import Training, train_step

BEST, LAST, AVERAGED = "best.safetensors", "last.safetensors", "ema.safetensors"


def train(context: RunContext) -> None:
    """Train until all epochs or steps are finished, or a check stops the run."""
    training, resuming = _made(context), context.resuming
    if training.average is not None:
        resuming.around = training.average.swapped_out
    with resuming.hold("train", training.state_dict, training.sums):
        resuming.take("train", training.load_state_dict)
        resuming.begin()
        context.model.train()
        while training.epoch < context.settings.train.epochs:
            context.hooks.clock.epoch = training.epoch
            if training.values is None:
                if training.is_over:
                    break
                training.values = _train_epoch(training)
            _after_epoch(training)
            if context.stopped:
                break
    _save_last(training)


def _made(context: RunContext) -> Training:
    """The loop before its first step."""
    settings = context.settings.train
    ranks = context.ranks
    batches = Batches(context.prepared, "train", shuffle=settings.shuffle, ranks=ranks)
    val = Batches(context.prepared, "val", ranks=ranks) if context.prepared.data.sizes["val"] != 0 else None
    trained = context.prepared.trained
    if trained is not None:
        trained.freeze_rest(context.model)  # parameters that hooks have added since the preparation
    groups = trained.groups if trained is not None else ()
    optimizer = make_optimizer(settings.optimizer, context.model, groups)
    steps_per_epoch = -(-len(batches) // settings.accumulate)
    steps = min(settings.steps or settings.epochs * steps_per_epoch, settings.epochs * steps_per_epoch)
    per_epoch = settings.scheduler is not None and settings.scheduler.interval == "epoch"
    intervals = max(settings.epochs if per_epoch else steps, 1)
    scheduler = make_scheduler(settings.scheduler, optimizer, intervals)
    if (last := last_milestone(settings.scheduler)) >= intervals:
        unit = "epoch" if per_epoch else "step"
        context.screen.note(
            [f"train.scheduler: the run ends after {unit} {intervals}, before milestone {last}"]
        )
    average = WeightAverage(context.model, settings.ema.decay) if settings.ema is not None else None
    return Training(
        context,
        optimizer,
        FiniteSteps(context, optimizer),
        scheduler,
        batches,
        val,
        context.average(),
        step_gradients(context),
        context.average(),
        average,
    )


def _save_last(training: Training) -> None:
    """Save the final weights, and print the names of all checkpoints."""
    context, checkpoint = training.context, training.context.settings.train.checkpoint
    if checkpoint.keeps("last"):
        _save(context, LAST)
        if training.average is not None:
            with training.average.swapped_in():
                _save(context, AVERAGED)
    context.resuming.writer.wait()
    kept = [name for name in (BEST, LAST, AVERAGED) if (context.run_dir.checkpoints / name).exists()]
    why = f"none, as train.checkpoint.save is {checkpoint.save}"
    context.screen.say(f"checkpoints: {', '.join(kept) or why}")


def _save(context: RunContext, name: str) -> None:
    """Save the weights in the background; they are written before the next state and before `_save_last` ends."""
    is_main, state = context.ranks.is_main, None
    if context.sharded:
        state = whole_state(context.model, keeps=is_main)
    if is_main:  # the other ranks have the same weights
        path, applied = context.run_dir.checkpoints / name, context.prepared.plan.applied()
        checkpoint.save(context.model, path, context.resuming.writer, applied=applied, state=state)


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
    context, values = training.context, training.values or {}
    with training.averaged():
        if training.val is not None and not context.stopped:
            names = (
                context.sample_names({"val": training.val})
                if _names_samples(training, training.val)
                else None
            )
            values = context.evaluate(training.val, "val", "validation", names=names)
            context.log("val", values, "epoch")
            context.screen.say(f"{' ' * len(training.label)}  val   {numbers(values)}")
        if context.stopped:  # the state was saved at the stop; a resumed run continues this epoch
            _keep_any(training)
            return
        score = values.get("accuracy", -values["loss"])
        if training.best is None or score > training.best or math.isnan(training.best):
            training.best = score
            if context.settings.train.checkpoint.keeps("best"):
                _save(context, BEST)
    if training.scheduler is not None and training.schedules("epoch"):
        if isinstance(training.scheduler, ReduceLROnPlateau):
            training.scheduler.step(values["loss"])
        else:
            training.scheduler.step()
    training.epoch, training.batches, training.values, training.means = (
        training.epoch + 1,
        0,
        None,
        context.average(),
    )
    context.run_dir.take_kept()
    every = context.settings.train.checkpoint.every.epochs
    context.resuming.point(every is not None and training.epoch % every == 0, in_background=True)


def _names_samples(training: Training, val: Batches) -> bool:
    """Whether the samples of this epoch's validation are written to samples.jsonl, which is done once in a run.

    Sequences are written in the first epoch, to label the axes of pictures; samples with a class in the last epoch,
    with the classes that the trained model predicts.
    """
    if val.data.of_tokens:
        return training.epoch == 0
    is_last = training.epoch + 1 == training.context.settings.train.epochs or training.is_over
    return is_last and training.context.prepared.data.num_classes is not None


def _keep_any(training: Training) -> None:
    """If the run stops within its first epoch, save the present weights as the best ones."""
    context = training.context
    if training.best is None and context.settings.train.checkpoint.keeps("best"):
        _save(context, BEST)
