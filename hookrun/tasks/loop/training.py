"""The training loop, with accumulation, mixed precision, schedules, validation and checkpoints."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hookrun.store import checkpoint
from hookrun.tasks.loop.batches import Batch, Batches
from hookrun.tasks.loop.clipping import clip
from hookrun.tasks.loop.composed import reach
from hookrun.tasks.loop.ema import WeightAverage
from hookrun.tasks.loop.metrics import Average
from hookrun.tasks.loop.optimizers import make_optimizer, make_scheduler
from hookrun.tasks.loop.progress import numbers
from hookrun.tasks.loop.running import Running

BEST, LAST, AVERAGED = "best.safetensors", "last.safetensors", "ema.safetensors"


@dataclass
class Loop:
    """The state of training beside the model.

    best:    the highest score of an epoch so far: the accuracy, or the negative loss
    average: of the weights, which is what is validated; None: the weights themselves are
    """

    running: Running
    optimizer: Optimizer
    scheduler: LRScheduler | None
    train: Batches
    val: Batches | None
    best: float | None = None
    average: WeightAverage | None = None

    def averaged(self) -> AbstractContextManager[None]:
        """Inside it the model has the average of its weights, where there is one."""
        return self.average.swapped_in() if self.average is not None else nullcontext()


def train(running: Running) -> None:
    """Train until the epochs or the steps are over, or a check asks to stop."""
    settings = running.settings.train
    sizes = running.prepared.data.sizes
    batches = Batches(running.prepared, "train", shuffle=settings.shuffle)
    val = Batches(running.prepared, "val") if sizes["val"] != 0 else None
    trained = running.prepared.trained
    if trained is not None:
        trained.freeze_rest(running.model)  # what hooks added by now
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
    loop = Loop(running, optimizer, scheduler, batches, val, average=average)
    running.model.train()
    for epoch in range(settings.epochs):
        running.hooks.clock.epoch = epoch
        if _over(loop):
            break
        _after_epoch(loop, _train_epoch(loop, epoch))
    if settings.checkpoint.keeps("last"):
        _save(running, LAST)
        if average is not None:
            with average.swapped_in():
                _save(running, AVERAGED)
    kept = [name for name in (BEST, LAST, AVERAGED) if (running.run_dir.checkpoints / name).exists()]
    why = f"none, as train.checkpoint.save is {settings.checkpoint.save}"
    running.screen.say(f"checkpoints: {', '.join(kept) or why}")


def _save(running: Running, name: str) -> None:
    path = running.run_dir.checkpoints / name
    checkpoint.save(running.model, path, applied=running.prepared.plan.applied())


def _over(loop: Loop) -> bool:
    running, limit = loop.running, loop.running.settings.train.steps
    return running.stopped or (limit is not None and running.hooks.clock.step >= limit)


def _train_epoch(loop: Loop, epoch: int) -> dict[str, float]:
    """One pass; returns the mean loss and accuracy over its samples."""
    running, accumulate = loop.running, loop.running.settings.train.accumulate
    total = len(loop.train)
    average, shown = running.average(), dict[str, float]()
    group = list[Batch]()
    label = f"epoch {epoch + 1}/{running.settings.train.epochs}"
    with closing(running.screen.track(loop.train.epoch(epoch), total, label, shown)) as batches:
        for number, batch in enumerate(batches):
            group.append(batch)
            if len(group) < accumulate and number + 1 < total:
                continue
            _step(loop, group, average, shown)
            group.clear()
            if _over(loop):
                break
    values = average.read()
    if not running.stopped:  # half an epoch, ended by a check, is no result
        running.log("train", values, "epoch")
    running.screen.say(f"{label}  train {numbers(values)}")
    return values


def _step(loop: Loop, group: list[Batch], average: Average, shown: dict[str, float]) -> None:
    """One optimizer step over the micro-batches of `group`."""
    running, hooks, scaler = loop.running, loop.running.hooks, loop.running.scaler
    weights = [batch.weight for batch in group]
    whole = max(sum(weights), 1)
    of_step = running.average()
    with running.logged(hooks.clock.step) as logs:
        loop.optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(group):
            hooks.accumulating = number + 1 < len(group)
            output = running.forward(batch)
            loss = running.loss(output, batch)
            scaler.scale(loss * (weights[number] / whole)).backward()
            average.add(loss, output, batch.target, tokens=batch.data.of_tokens)
            if logs:
                of_step.add(loss, output, batch.target, tokens=batch.data.of_tokens)
        scaler.unscale_(loop.optimizer)  # fused optimizers would show scaled gradients to their hooks
        norm = clip(running.settings.train, loop.optimizer)
        scale = scaler.get_scale()
        scaler.step(loop.optimizer)
        scaler.update()
        skipped = scaler.get_scale() < scale  # gradients overflowed, and the optimizer has not stepped
        if loop.average is not None and not skipped:
            loop.average.update()
        if logs:
            shown.update(of_step.read())
            clipped = {"grad_norm": float(norm)} if norm is not None else {}
            running.log("train", of_step.read(), "batch", lr=loop.optimizer.param_groups[0]["lr"], **clipped)
            running.sink.settle()
    schedule = running.settings.train.scheduler
    if loop.scheduler is not None and schedule is not None and schedule.interval == "step" and not skipped:
        loop.scheduler.step()
    hooks.step()


def _after_epoch(loop: Loop, values: dict[str, float]) -> None:
    """Validate, keep the best weights, step the schedule.

    values: mean loss and accuracy of the epoch's training
    """
    running = loop.running
    with loop.averaged():
        if loop.val is not None and not running.stopped:
            values = running.evaluate(loop.val, "val", "validation")
            running.log("val", values, "epoch")
            running.screen.say(f"{' ' * 9}  val   {numbers(values)}")
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
