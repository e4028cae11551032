"""The training loop, with accumulation, mixed precision, schedules, validation and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hookrun.store import checkpoint
from hookrun.store.rank_dir import take_kept
from hookrun.tasks.loop.average import Average
from hookrun.tasks.loop.batches import Batch, Batches
from hookrun.tasks.loop.clipping import clip
from hookrun.tasks.loop.composed import reach
from hookrun.tasks.loop.ema import WeightAverage
from hookrun.tasks.loop.nonfinite import SKIPPED, STEPPED, FiniteSteps
from hookrun.tasks.loop.optimizers import make_optimizer, make_scheduler
from hookrun.tasks.loop.progress import numbers
from hookrun.tasks.loop.running import Running
from hookrun.tasks.loop.sharding import sharded_states, whole_state, whole_states
from hookrun.tasks.loop.step_gradients import StepGradients, step_gradients

BEST, LAST, AVERAGED = "best.safetensors", "last.safetensors", "ema.safetensors"


@dataclass
class Loop:
    """The state of training, in addition to the model.

    steps:     steps the optimizer if loss and gradients are finite
    means:     loss and metrics over the samples of the current epoch
    gradients: computes the gradients of a step
    of_step:   loss and metrics over the samples of the current step
    average:   the moving average of the weights, which is validated; None: the weights themselves are validated
    epoch:     the current epoch
    batches:   how many batches of it are finished
    values:    the means of the epoch's training if that is finished, and only its validation is left; otherwise None
    best:      the highest score of an epoch so far: the accuracy, or the negative loss
    """

    running: Running
    optimizer: Optimizer
    steps: FiniteSteps
    scheduler: LRScheduler | None
    train: Batches
    val: Batches | None
    means: Average
    gradients: StepGradients
    of_step: Average
    average: WeightAverage | None = None
    epoch: int = 0
    batches: int = 0
    values: dict[str, float] | None = None
    best: float | None = None

    def averaged(self) -> AbstractContextManager[None]:
        """A context manager in which the model has the average of its weights, if there is one."""
        return self.average.swapped_in() if self.average is not None else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The state from which training can be resumed, without model and hooks; every rank calls it."""
        sharded = self.running.sharded
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "means": self.means.state_dict(),
            "values": self.values,
            "best": self.best,
            "optimizer": whole_states(self.optimizer) if sharded else self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.running.scaler.state_dict(),
            "steps": self.steps.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def sums(self) -> dict[str, Average]:
        """Key path in the state -> the sums over the rows of this rank only."""
        return {"means": self.means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state of training by a saved one."""
        self.epoch, self.batches = state["epoch"], state["batches"]
        self.means.load_state_dict(state["means"])
        self.values, self.best = state["values"], state["best"]
        self.optimizer.load_state_dict(sharded_states(state["optimizer"], self.optimizer))
        self.steps.load_state_dict(state["steps"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            # so that torch does not warn of a schedule that starts before the optimizer
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if state["scaler"]:  # a disabled scaler has no state
            self.running.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])


def train(running: Running) -> None:
    """Train until all epochs or steps are finished, or a check stops the run."""
    loop, resuming = _made(running), running.resuming
    if loop.average is not None:
        resuming.around = loop.average.swapped_out
    with resuming.hold("train", loop.state_dict, loop.sums):
        resuming.take("train", loop.load_state_dict)
        resuming.begin()
        running.model.train()
        while loop.epoch < running.settings.train.epochs:
            running.hooks.clock.epoch = loop.epoch
            if loop.values is None:
                if _over(loop):
                    break
                loop.values = _train_epoch(loop)
            _after_epoch(loop)
            if running.stopped:
                break
    _save_last(loop)


def _made(running: Running) -> Loop:
    """The loop before its first step."""
    settings = running.settings.train
    ranks = running.ranks
    batches = Batches(running.prepared, "train", shuffle=settings.shuffle, ranks=ranks)
    val = Batches(running.prepared, "val", ranks=ranks) if running.prepared.data.sizes["val"] != 0 else None
    trained = running.prepared.trained
    if trained is not None:
        trained.freeze_rest(running.model)  # parameters that hooks have added since the preparation
    groups = trained.groups if trained is not None else ()
    optimizer = make_optimizer(settings.optimizer, running.model, groups)
    steps_per_epoch = -(-len(batches) // settings.accumulate)
    steps = min(settings.steps or settings.epochs * steps_per_epoch, settings.epochs * steps_per_epoch)
    per_epoch = settings.scheduler is not None and settings.scheduler.interval == "epoch"
    intervals = max(settings.epochs if per_epoch else steps, 1)
    scheduler = make_scheduler(settings.scheduler, optimizer, intervals)
    if (last := reach(settings.scheduler)) >= intervals:
        unit = "epoch" if per_epoch else "step"
        running.screen.note(
            [f"train.scheduler: the run ends after {unit} {intervals}, before milestone {last}"]
        )
    average = WeightAverage(running.model, settings.ema.decay) if settings.ema is not None else None
    return Loop(
        running,
        optimizer,
        FiniteSteps(running, optimizer),
        scheduler,
        batches,
        val,
        running.average(),
        step_gradients(running),
        running.average(),
        average,
    )


def _save_last(loop: Loop) -> None:
    """Save the final weights, and print the names of all checkpoints."""
    running, checkpoint = loop.running, loop.running.settings.train.checkpoint
    if checkpoint.keeps("last"):
        _save(running, LAST)
        if loop.average is not None:
            with loop.average.swapped_in():
                _save(running, AVERAGED)
    running.resuming.writer.wait()
    kept = [name for name in (BEST, LAST, AVERAGED) if (running.run_dir.checkpoints / name).exists()]
    why = f"none, as train.checkpoint.save is {checkpoint.save}"
    running.screen.say(f"checkpoints: {', '.join(kept) or why}")


def _save(running: Running, name: str) -> None:
    """Save the weights in the background; they are written before the next state and before `_save_last` ends."""
    is_main, state = running.ranks.is_main, None
    if running.sharded:
        state = whole_state(running.model, keeps=is_main)
    if is_main:  # the other ranks have the same weights
        path, applied = running.run_dir.checkpoints / name, running.prepared.plan.applied()
        found = checkpoint.checkpoint_of(running.model, path, applied=applied, state=state)
        running.resuming.writer.write(found, checkpoint.WeightsFile.write)


def _over(loop: Loop) -> bool:
    running, limit = loop.running, loop.running.settings.train.steps
    return running.stopped or (limit is not None and running.hooks.clock.step >= limit)


def _label(loop: Loop) -> str:
    return f"epoch {loop.epoch + 1}/{loop.running.settings.train.epochs}"


def _train_epoch(loop: Loop) -> dict[str, float]:
    """Train one epoch, or the rest of it; returns the mean loss and metrics over its samples."""
    running, settings = loop.running, loop.running.settings.train
    total, every = len(loop.train), settings.checkpoint.every
    shown = dict[str, float]()
    group = list[Batch]()
    label = _label(loop)
    passed = loop.train.epoch(loop.epoch, loop.batches)
    with closing(running.screen.track(passed, total, label, shown, loop.batches)) as batches:
        for number, batch in enumerate(batches, loop.batches):
            group.append(batch)
            if len(group) < settings.accumulate and number + 1 < total:
                continue
            _step(loop, group, shown)
            group.clear()
            loop.batches = number + 1
            if running.stopped:
                running.resuming.save()
            if _over(loop):
                break
            running.resuming.point(every.steps is not None and running.hooks.clock.step % every.steps == 0)
    whole = running.sum_over_ranks(loop.means)
    skipped = loop.steps.end_epoch()
    values = whole.read() or {"loss": math.nan}  # NaN if every step was skipped
    if not running.stopped:  # the means of an epoch that a check ended are not logged
        values = running.read("train", whole) if whole.samples else values
        running.log("train", values, "epoch", **skipped)
    running.screen.say(f"{label}  train {numbers(values)}")
    return values


def _step(loop: Loop, group: list[Batch], shown: dict[str, float]) -> None:
    """One optimizer step over the micro-batches of `group`."""
    running, hooks, scaler = loop.running, loop.running.hooks, loop.running.scaler
    settings = running.settings.train
    shares, losses, of_step = loop.gradients.shares(group), list[Tensor | None](), loop.of_step
    of_step.clear()
    with running.logged(hooks.clock.step) as logs:
        loop.optimizer.zero_grad(set_to_none=True)
        loop.steps.begin(group)
        for number, batch in enumerate(group):
            hooks.accumulating = number + 1 < len(group)
            output, loss = loop.gradients.compute(batch, shares[number], last=number + 1 == len(group))
            seen = None if loss is None else loss.detach()
            losses.append(seen)
            if seen is not None:
                running.measure(of_step, seen, output, batch)
        loop.steps.losses += loop.gradients.losses(losses, shares)
        scaler.unscale_(loop.optimizer)  # with fused optimizers, hooks would otherwise see scaled gradients
        norm = clip(settings, loop.optimizer)
        outcome = loop.steps.step()
        if loop.average is not None and outcome is STEPPED:
            loop.average.update()
        if outcome is not SKIPPED:
            loop.means.include(of_step)
        if logs and outcome is not SKIPPED:
            values = running.sum_over_ranks(of_step).read()
            shown.update(values)
            clipped = {"grad_norm": float(norm)} if norm is not None else {}
            running.log("train", values, "batch", lr=loop.optimizer.param_groups[0]["lr"], **clipped)
        if logs:
            running.sink.settle()
    schedule = settings.scheduler
    if (
        loop.scheduler is not None
        and schedule is not None
        and schedule.interval == "step"
        and outcome is STEPPED
    ):
        loop.scheduler.step()
    hooks.step()
    running.agree()


def _after_epoch(loop: Loop) -> None:
    """Finish an epoch: validate, save the best weights, step the schedule. After a stop the epoch stays unfinished."""
    running, values = loop.running, loop.values or {}
    with loop.averaged():
        if loop.val is not None and not running.stopped:
            names = running.sample_names({"val": loop.val}) if _names_samples(loop, loop.val) else None
            values = running.evaluate(loop.val, "val", "validation", names=names)
            running.log("val", values, "epoch")
            running.screen.say(f"{' ' * len(_label(loop))}  val   {numbers(values)}")
        if running.stopped:  # the state was saved at the stop; a resumed run continues this epoch
            _keep_any(loop)
            return
        score = values.get("accuracy", -values["loss"])
        if loop.best is None or score > loop.best or math.isnan(loop.best):
            loop.best = score
            if running.settings.train.checkpoint.keeps("best"):
                _save(running, BEST)
    schedule = running.settings.train.scheduler
    if loop.scheduler is not None and schedule is not None and schedule.interval == "epoch":
        if isinstance(loop.scheduler, ReduceLROnPlateau):
            loop.scheduler.step(values["loss"])
        else:
            loop.scheduler.step()
    loop.epoch, loop.batches, loop.values, loop.means = loop.epoch + 1, 0, None, running.average()
    take_kept(running.run_dir)
    every = running.settings.train.checkpoint.every.epochs
    running.resuming.point(every is not None and loop.epoch % every == 0, in_background=True)


def _names_samples(loop: Loop, val: Batches) -> bool:
    """Whether the samples of this epoch's validation are written to samples.jsonl, which is done once in a run.

    Sequences are written in the first epoch, to label the axes of pictures; samples with a class in the last epoch,
    with the classes that the trained model predicts.
    """
    if val.data.of_tokens:
        return loop.epoch == 0
    is_last = loop.epoch + 1 == loop.running.settings.train.epochs or _over(loop)
    return is_last and loop.running.prepared.data.num_classes is not None


def _keep_any(loop: Loop) -> None:
    """If the run stops within its first epoch, save the present weights as the best ones."""
    running = loop.running
    if loop.best is None and running.settings.train.checkpoint.keeps("best"):
        _save(running, BEST)
