"""Finds the module, hook, parameter or input that first made a step non-finite, by repeating the step with checks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from hookrun.errors import listed, reason
from hookrun.plan.plan import PlannedHook
from hookrun.runtime import Installation
from hookrun.runtime.plain_optimizers import without_compiler
from hookrun.tasks.loop.batches import Batch
from hookrun.tasks.loop.before_step import BeforeStep
from hookrun.tasks.loop.built import as_call
from hookrun.tasks.loop.context import RunContext
from hookrun.tasks.loop.finite import all_finite, not_finite
from hookrun.tasks.loop.optimizers import clip
from hookrun.tasks.loop.watch import Origin, Watch

T = TypeVar("T")

UNKNOWN = "its source is not known"

_SHOWN = 4


def producer(running: RunContext, before: BeforeStep, group: Sequence[Batch], wrong: int | None) -> str:
    """A description of where the first non-finite value is computed.

    The micro-batches run again through a copy of the model, with the hooks that change values, from the state before
    the step. The run's own model, hooks, records and generators are not changed.

    before: the state before the step
    group:  the micro-batches of the step
    wrong:  the number of the micro-batch whose loss is not finite; None: the losses are finite, and a gradient is not
    """
    try:
        with before.generators():
            return _run_again(running, before, group, wrong)
    except Exception as error:  # of a module, or of copying the model
        return f"{UNKNOWN}, because the step could not be repeated: {reason(error)}"


def _run_again(running: RunContext, before: BeforeStep, group: Sequence[Batch], wrong: int | None) -> str:
    model = copy.deepcopy(running.model)
    loss_of = _copied(running.prepared.loss)
    plan = replace(running.prepared.plan, hooks=tuple(filter(_edits, running.prepared.plan.hooks)))
    clock, scaler = running.hooks.clock, running.scaler
    samples = sum(len(batch.ids) for batch in group)
    with ExitStack() as stack:
        watch = Watch(model)
        stack.callback(watch.remove)
        hooks = stack.enter_context(Installation(plan, model, sink=watch, scaler=scaler))
        before.fill(model, hooks)
        hooks.clock.epoch, hooks.clock.step = clock.epoch, clock.step
        for number, batch in enumerate(group):
            hooks.accumulating = number + 1 < len(group)
            hooks.samples, hooks.population = batch.ids, batch.population
            args, kwargs = as_call(batch.inputs, model)
            already = _nonfinite_tensors(model) if number == wrong else {}
            with watch.forward(), running.autocast():
                output = model(*args, **kwargs)
            with running.autocast():
                loss = loss_of(output, batch.target)
            if number == wrong:
                found = _of_loss(running, already, watch, batch, output, loss)
                return f"{_of_micro_batch(number, group)}{found}"
            if wrong is None:
                scaled = scaler.scale(loss * (len(batch.ids) / samples))
                watch.follow_backward(scaled, f"the loss {running.settings.train.loss.name}")
                scaled.backward()
                made = watch.first_of_backward()
                if made is not None and not all_finite(_gradients(model).values()):
                    return f"{_of_micro_batch(number, group)}{made.text}"
        return _of_gradients(running, model, watch, len(group))


def _of_micro_batch(number: int, group: Sequence[Batch]) -> str:
    return f"in micro-batch {number} of {len(group)}, " if len(group) > 1 else ""


def _of_loss(
    running: RunContext,
    already: Mapping[str, str],
    watch: Watch,
    batch: Batch,
    output: object,
    loss: Tensor,
) -> str:
    """Why this micro-batch's loss is not finite.

    already: the parameters and buffers that were not finite before its forward, see `_nonfinite_tensors`
    """
    if all_finite([loss]):
        return _NOT_REPRODUCED
    origin = watch.first()
    if origin is None or not not_finite(output):
        if bad := not_finite(batch.target):
            return f"the targets of the batch are not finite: {bad}{_samples(batch, batch.target)}"
        return f"first made by the loss {running.settings.train.loss.name}, from a finite output and finite targets"
    if origin.is_input:
        return f"the inputs of the batch are not finite: {origin.text}{_samples(batch, batch.inputs)}"
    return _of_tensors(running, already, origin) or origin.text


def _nonfinite_tensors(model: nn.Module) -> dict[str, str]:
    """Name -> description, for each parameter and buffer that is not finite.

    A buffer with infinities but without NaN is assumed to be a mask, and left out.
    """
    found = {
        name: f"the parameter {name}: {bad}"
        for name, each in model.named_parameters()
        if (bad := not_finite(each))
    }
    for name, buffer in model.named_buffers():
        if (bad := not_finite(buffer)) and bool(buffer.isnan().any()):
            found[name] = f"the buffer {name}: {bad}"
    return found


def _of_tensors(running: RunContext, wrong: Mapping[str, str], origin: Origin) -> str:
    """A description of the first non-finite parameter or buffer that the origin uses; empty if there is none."""
    prefix = f"{origin.path}." if origin.path else ""
    used = [name for name in wrong if name.startswith(prefix)]
    if origin.own is not None:
        used = [name for name in used if name.removeprefix(prefix) in origin.own]
    if not used:
        return ""
    writers = [
        f"hook {hook.spec.name!r} ({hook.spec.hook_type}, {hook.spec.action.action_name})"
        for hook in running.prepared.plan.hooks
        if _writes(hook, used[0])
    ]
    by = f"; {listed(writers, _SHOWN)} changes it" if writers else ""
    others = f"; so are {listed(used[1:], _SHOWN)}" if used[1:] else ""
    return f"not finite before the forward of this step: {wrong[used[0]]}{others}{by}"


def _writes(hook: PlannedHook, name: str) -> bool:
    """Whether the hook may change the parameter of this name or its gradient."""
    spec = hook.spec
    if spec.action.observes or not (spec.on_parameters or spec.hook_type.phase == "installation"):
        return False
    return any(
        not path or name == path or name.startswith(f"{path}.") for m in hook.matches for path in m.names
    )


def _samples(batch: Batch, value: Tensor | dict[str, Tensor]) -> str:
    """`` (val samples 4, 17)``: the samples with non-finite values; empty if rows are not samples."""
    rows = set[int]()
    for tensor in value.values() if isinstance(value, dict) else (value,):
        if tensor.dim() and len(tensor) == len(batch.ids) and tensor.is_floating_point():
            wrong = ~tensor.isfinite().reshape(len(tensor), -1).all(dim=1)
            rows.update(batch.ids[wrong.cpu()].tolist())
    return f" ({batch.split} samples {listed(map(str, sorted(rows)), 8)})" if rows else ""


def _of_gradients(running: RunContext, model: nn.Module, watch: Watch, count: int) -> str:
    """Why gradients are not finite although every backward function returned finite ones."""
    gradients = _gradients(model)
    for name, gradient in gradients.items():
        if bad := not_finite(gradient):
            return f"the gradient of {name}, added up over {count} micro-batches, is not finite: {bad}"
    if not gradients:
        return _NOT_REPRODUCED
    optimizer = without_compiler(torch.optim.SGD)([model.get_parameter(name) for name in gradients], lr=0.0)
    if (scale := running.scaler.get_scale()) != 1:
        for gradient in gradients.values():
            gradient.div_(scale)
    clip(running.settings.train, optimizer)
    wrong = [name for name, gradient in gradients.items() if not_finite(gradient)]
    if wrong:
        return f"first made by clipping, from finite gradients: that of {wrong[0]}"
    optimizer.step()  # runs the optimizer_step_pre hooks
    made = watch.first_of_backward()
    return made.text if made is not None else _NOT_REPRODUCED


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


_NOT_REPRODUCED = (
    f"{UNKNOWN}: repeated from the same state, the step is finite, so the model, "
    "the loss or a hook depends on something that changes from call to call"
)


def _edits(hook: PlannedHook) -> bool:
    """Whether the hook changes values. Hooks that act at installation are left out: the copy has their changes."""
    return not hook.spec.action.observes and hook.spec.hook_type.phase != "installation"


def _copied(value: T) -> T:
    """A deep copy, so that a user's own loss that counts its calls does not count the repeated step."""
    try:
        return copy.deepcopy(value)
    except Exception:  # it cannot be copied, so the loss itself is used
        return value
