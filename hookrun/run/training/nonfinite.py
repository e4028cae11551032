"""`train.on_nonfinite`: prevents optimizer steps with a loss or gradients that are not finite, and finds the source."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hookrun.engine.hook_types import FORWARD, FORWARD_PRE, OPTIMIZER_STEP_PRE
from hookrun.engine.keys import GIVEN
from hookrun.engine.plan.plan import PlannedHook, passed_on
from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.apply_action import Op, SiteRunner
from hookrun.engine.runtime.optimizers import without_compiler
from hookrun.engine.runtime.records import Memory
from hookrun.engine.runtime.site import HookSite
from hookrun.errors import HookrunError, listed, reason
from hookrun.run.experiment.observers import Observe, matches, new_nodes, planned
from hookrun.run.experiment.optimizers import clip
from hookrun.run.experiment.prepared import as_call
from hookrun.run.experiment.session import generator_states, set_generators
from hookrun.run.passes.batches import Batch
from hookrun.run.passes.context import RunContext
from hookrun.run.training.finite import all_finite, nonfinite_on, not_finite

WHERE = "train.on_nonfinite"

Outcome = Literal["stepped", "overflow", "skipped"]
"""Of a step. `overflow`: the gradient scaler itself skipped the step, and continues with a smaller scale;
`skipped`: the loss or a gradient was not finite, and the optimizer did not step."""

LEAST_SCALE = 1.0
"""An overflow at this scale or below is not caused by the scaling, so a smaller scale would not help."""

MOST_REPORTED = 5
"""How many skipped steps are investigated and reported one by one; later ones are only counted."""

_HINT = (
    "a smaller learning rate, train.clip_grad_norm or a `check` hook may help; "
    f"{WHERE}: skip omits such steps, stop saves and ends the run"
)


class _NotFinite(Exception):
    """Raised inside `optimizer.step()`, after all hooks on gradients and before a parameter changes."""


class FiniteSteps:
    """Steps the optimizer if the losses and gradients of the step are finite.

    A skipped step counts for hooks, like one that a gradient scaler skips, so `when: {step: ...}` means the same
    batches in every run. The optimizer, a schedule by steps and the average of the weights do not advance.

    before:  the state before the step, for which `take` is called
    skipped: the number of steps skipped so far
    """

    def __init__(self, context: RunContext, optimizer: Optimizer) -> None:
        plan = context.prepared.plan
        is_given = context.settings.model.name == GIVEN
        own_code = is_given or bool(plan.code) or any(hook.code for hook in plan.hooks)
        self.before = BeforeStep(context.model, context.hooks, own_code=own_code)
        self.skipped = 0
        self._context = context
        self._optimizer = optimizer
        self._group: Sequence[Batch] = ()
        self._losses: Sequence[Tensor] = ()
        self._in_epoch = 0
        self._stepped = False
        editors = [hook.spec for hook in plan.hooks if not hook.spec.action.observes]
        self._edits_last = any(spec.hook_type is OPTIMIZER_STEP_PRE for spec in editors)
        optimizer.register_step_pre_hook(self._before_step)  # torch runs it after the hooks of the experiment

    def state_dict(self) -> dict[str, int]:
        """The number of skipped steps, in the run and in this epoch."""
        return {"skipped": self.skipped, "told": self._in_epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Replace the counts by saved ones."""
        self.skipped = state["skipped"]
        self._in_epoch = state["told"]

    def step(self, group: Sequence[Batch], losses: Sequence[Tensor]) -> Outcome:
        """Step the optimizer, through the gradient scaler; gradients are already unscaled and clipped.

        group:  the micro-batches
        losses: their detached losses

        Raises HookrunError if the loss or a gradient is not finite and the policy is `error`.
        """
        self._group = group
        self._losses = losses
        scaler = self._context.scaler  # one that is not enabled only steps the optimizer
        overflows = self._tell_scaler() if scaler.is_enabled() else []
        self._stepped = False
        with suppress(_NotFinite):
            scaler.step(self._optimizer)
        if self._stepped:
            scaler.update()
            return "stepped"
        scale = scaler.get_scale()
        if not any(overflow.item() for overflow in overflows) or not all_finite(losses):
            scaler.update(scale)  # needed before the scaler's next step; keeps the scale
            return self._left_out()
        scaler.update()
        return self._left_out() if scale <= LEAST_SCALE else "overflow"

    def _tell_scaler(self) -> list[Tensor]:
        """Let the scaler skip the step for losses and clipped gradients, too; returns what it had found, by device.

        The host then waits for the device once in a step: where the scaler reads whether to skip it.
        """
        found: Any = self._context.scaler._found_inf_per_device(self._optimizer)
        overflows = list(found.values())
        for device, wrong in nonfinite_on(self._checked()).items():
            found[device] = wrong.maximum(found.get(device, wrong))
        return overflows

    def _checked(self) -> list[Tensor]:
        """The losses and gradients of the step."""
        checked = [*self._losses]
        for group in self._optimizer.param_groups:
            checked += [each.grad for each in group["params"] if each.grad is not None]
        return checked

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's pre-hook of the optimizer."""
        overflow = getattr(optimizer, "found_inf", None)  # set if the optimizer itself skips the step
        if overflow is not None and overflow.item():
            return
        if not self._context.scaler.is_enabled() or self._edits_last:  # else the scaler has read it
            finite = all_finite(self._checked())
            if self._context.sharded:  # each rank has only parts of the gradients
                finite = not self._context.ranks.largest([not finite])[0]
            if not finite:
                raise _NotFinite
        self._stepped = True

    def _left_out(self) -> Outcome:
        context = self._context
        policy = context.settings.train.on_nonfinite
        clock = context.hooks.clock
        clock.end_step()  # rules over steps are judged before the step is left out
        # A check hook has found it already and ends the run. The ranks agree on it, since they communicate below.
        if context.ranks.largest([context.stopped])[0]:
            return "skipped"
        self.skipped += 1
        self._in_epoch += 1
        is_told = policy != "skip" or self.skipped <= MOST_REPORTED
        text = ""
        if is_told:
            text = f"epoch {clock.epoch}, step {clock.step}: {self._described()}"
        self.before.restore_buffers()
        if policy == "error":
            raise HookrunError(f"{WHERE}: {text}\n    {_HINT}")
        if policy == "stop":
            context.sink.stop = f"{WHERE}: {text}"
        elif is_told:
            more = " (later ones are only counted)" if self.skipped == MOST_REPORTED else ""
            context.screen.note([f"{WHERE}: skipped a step: {text}{more}"])
        return "skipped"

    def _described(self) -> str:
        """What is not finite in the step, and its source, see `source_of`."""
        context = self._context
        wrong = None
        what = "a gradient is not finite"
        for number, loss in enumerate(self._losses):
            if not all_finite([loss]):
                wrong = number
                what = f"the loss is {float(loss)}"
                break
        self._optimizer.zero_grad(set_to_none=True)  # frees memory to repeat the step
        if context.sharded:
            return f"{what}: {UNKNOWN}: parameters are sharded over the ranks"
        source = source_of(context, self.before, self._group, wrong)
        if context.ranks.several:  # each has repeated the step with its own rows
            for rank, text in enumerate(context.ranks.gathered(source)):
                if UNKNOWN not in text:
                    return f"{what}: rank {rank}: {text}"
        return f"{what}: {source}"

    def end_epoch(self) -> dict[str, float]:
        """Print how many steps of the epoch were skipped; returns the entry for metrics.jsonl, empty without any."""
        count = self._in_epoch
        self._in_epoch = 0
        context = self._context
        if not count or context.settings.train.on_nonfinite != "skip":
            return {}
        epoch = context.hooks.clock.epoch
        lines = [f"{WHERE}: steps skipped in epoch {epoch}: {count}, so far: {self.skipped}"]
        parameters = dict(context.model.named_parameters())
        # of sharded parameters each rank has only its parts
        spoiled = context.ranks.largest([bool(not_finite(each)) for each in parameters.values()])
        for name, is_spoiled in zip(parameters, spoiled, strict=True):
            if is_spoiled:
                lines.append(f"{WHERE}: {name} itself is not finite: skipping steps does not help")
                break
        context.screen.note(lines)
        return {"skipped_steps": count}


UNKNOWN = "its source is not known"
_NOT_REPRODUCED = (
    f"{UNKNOWN}: repeated from the same state, the step is finite, so the model, "
    "the loss or a hook depends on something that changes from call to call"
)


# ---- the state before a step -----------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """A buffer of a module as it was before a step.

    tensor:  the buffer itself
    version: torch's version counter of `tensor`; None: writes do not increase the counter
    copy:    its content
    """

    tensor: Tensor
    version: int | None
    copy: Tensor


class BeforeStep:
    """Random generators, buffers and random draws of hooks before a step, from which the step can be repeated.

    own_code: the step runs the user's own Python, which may use Python's and NumPy's generators
    """

    def __init__(self, model: nn.Module, hooks: Installation, *, own_code: bool) -> None:
        self._own_code = own_code
        self._owners = dict[tuple[str, str], nn.Module]()
        for path, module in model.named_modules():
            for name in module._buffers:
                self._owners[path, name] = module
        self._kept = dict[tuple[str, str], _Kept]()
        self._drawing = [site for site in hooks.sites if site.draws]

    def take(self) -> None:
        """Record the state. Only buffers that were written since the last call are copied."""
        self._generators = generator_states(python=self._own_code)
        self._draws = {(site.hook_name, site.path): site.draws_place for site in self._drawing}
        for place, module in self._owners.items():
            buffer = self._buffer(place)
            if buffer is None:
                self._kept.pop(place, None)
                continue
            version = None
            if (
                not isinstance(module, _NormBase) and not buffer.is_inference()
            ):  # torch counts no versions of these
                version = buffer._version
            kept = self._kept.get(place)
            is_same = kept is not None and kept.tensor is buffer and kept.version == version
            if not is_same or version is None:
                self._kept[place] = _Kept(buffer, version, buffer.detach().clone())

    def _buffer(self, place: tuple[str, str]) -> Tensor | None:
        """The buffer that the module has now: it may have replaced or deleted the former one."""
        return getattr(self._owners[place], place[1], None)

    @torch.no_grad()
    def restore(self, copy: nn.Module, hooks: Installation) -> None:
        """Set the random generators, and the buffers and hooks' draws of a copy of the model, to the recorded state."""
        set_generators(self._generators)
        modules = dict(copy.named_modules())
        for (path, name), kept in self._kept.items():
            modules[path]._buffers[name] = kept.copy.clone()
        for site in hooks.sites:
            place = self._draws.get((site.hook_name, site.path))
            if place is not None:
                site.draws_place = place

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore buffers that the step has made NaN or infinite, with the other floating-point buffers of the module.

        So a batch for which no step was taken does not stay in the running statistics of a batch norm.
        """
        spoiled = set[str]()
        for place, kept in self._kept.items():
            if not_finite(self._buffer(place)) and not not_finite(kept.copy):
                spoiled.add(place[0])
        for place, kept in self._kept.items():
            buffer = self._buffer(place)
            if buffer is None or place[0] not in spoiled or not buffer.is_floating_point():
                continue
            if buffer is kept.tensor:
                buffer.copy_(kept.copy)
            else:
                self._owners[place]._buffers[place[1]] = kept.copy.clone()


# ---- the search --------------------------------------------------------------------------------------------------


class _Origin(NamedTuple):
    """A module call or hook of the forward pass that returned non-finite values for finite ones.

    path: the path of its module; None: the values are inputs of the model instead
    """

    text: str
    path: str | None


class NonFiniteTracer:
    """Calls a model, and finds where values first become non-finite in its passes.

    `observers` and `replace_op` belong to the installation that runs the passes.

    origin:   of what is not finite in the last forward pass; what became finite again, as masked scores do in a
              softmax, has none
    backward: the description of the first hook or backward function that made a gradient non-finite, in all passes
    """

    def __init__(self, model: nn.Module) -> None:
        self.origin: _Origin | None = None
        self.backward: str | None = None
        self._model = model
        self._in_forward = False  # module calls are not followed while checkpointing computes them again
        modules = matches(model, dict(model.named_modules()))
        self.observers = (
            planned("inputs", FORWARD_PRE, modules, Observe(see=self._entered)),
            planned("outputs", FORWARD, modules, Observe(see=self._returned)),
        )
        # Path and number of each module call that has not returned -> its text, and the origin of what was not finite
        # before it; None if there was none, or if its inputs are not finite.
        self._open = dict[tuple[str, int], tuple[str, _Origin | None]]()
        self._followed = set[Node]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model; the forward pass is followed."""
        self.origin = None
        self._open.clear()
        self._followed.clear()
        self._in_forward = True
        try:
            return self._model(*args, **kwargs)
        finally:
            self._in_forward = False

    def replace_op(self, runner: SiteRunner) -> Op:
        """What runs in place of a hook: the hook, between two looks at the value; see `Installation`."""
        op = runner.op()
        if runner.site.spec.action.observes:
            return op
        return partial(self._edited, runner.site, op)

    def _entered(self, site: HookSite, value: Any) -> None:
        if not self._in_forward:
            return
        caller = ("", "(root)")
        for (path, _), (where, _) in self._open.items():
            if not path or site.path.startswith(f"{path}."):
                caller = (path, where)
        self.follow_backward(value, caller[1])
        before = self.origin
        if bad := not_finite(value):
            before = None
            path, where = caller
            made = f"first made by the forward of {where}, itself, before it calls {site.path}: {bad}"
            self.origin = self.origin or (_Origin(made, path) if site.path else _Origin(bad, None))
        where = f"{site.path or '(root)'} ({type(site.module).__name__}), call {site.call}"
        self._open[site.path, site.call] = (where, before)

    def _returned(self, site: HookSite, value: Any) -> None:
        if not self._in_forward or (site.path, site.call) not in self._open:
            return
        where, before = self._open.pop((site.path, site.call))
        self.follow_backward(value, where)
        if bad := not_finite(value):
            itself = ", itself, outside its submodules" if list(site.module.children()) else ""
            text = f"first made by the forward of {where}{itself}, from finite inputs: {bad}"
            self.origin = self.origin or _Origin(text, site.path)
        elif self.origin is not before:
            self.origin = None

    def _edited(self, site: HookSite, op: Op, value: Any) -> Any:
        hook_type = site.hook_type
        is_forward = hook_type.phase == "forward" and not hook_type.until_backward
        if is_forward and not self._in_forward:
            return op(value)
        is_finite = not not_finite(value)
        value = op(value)
        bad = not_finite(value)
        where = f"{site.where}, call {site.call}" if hook_type.on == "module" else site.where
        text = f"first made by {where}, from finite values: {bad}"
        if not is_forward:
            if bad and is_finite:
                self.backward = self.backward or text
            return value
        self.follow_backward(value, where)
        if bad and is_finite:
            self.origin = self.origin or _Origin(text, site.path)
        elif not bad and not is_finite:
            self.origin = None
        return value

    def follow_backward(self, value: Any, maker: str) -> None:
        """Check arguments and results of the backward functions that lead to this value and are not followed yet.

        maker: the module call or hook that has just computed the value, or the loss
        """
        for node in new_nodes(value, self._followed):
            node.register_hook(partial(self._ran, node.name(), maker))

    def _ran(self, node: str, maker: str, grad_inputs: Any, grad_outputs: Any) -> None:
        """torch's hook on an autograd node, called after its backward function."""
        bad = not_finite(grad_inputs)
        if bad and not not_finite(grad_outputs):
            text = f"first made by the backward of {maker} ({node}), from a finite gradient: {bad}"
            self.backward = self.backward or text


# ---- the repetition --------------------------------------------------------------------------------------------


def source_of(context: RunContext, before: BeforeStep, group: Sequence[Batch], wrong: int | None) -> str:
    """A description of where the first non-finite value is computed.

    The micro-batches run again through a copy of the model, with the hooks that change values, from the state before
    the step. The run's own model, hooks, records and generators are not changed.

    before: the state before the step
    group:  the micro-batches of the step
    wrong:  the number of the micro-batch whose loss is not finite; None: the losses are finite, and a gradient is not
    """
    generators = generator_states()
    try:
        return _repeat(context, before, group, wrong)
    except Exception as error:  # of a module, or of copying the model
        return f"{UNKNOWN}, because the step could not be repeated: {reason(error)}"
    finally:
        set_generators(generators)


def _repeat(context: RunContext, before: BeforeStep, group: Sequence[Batch], wrong: int | None) -> str:
    model = copy.deepcopy(context.model)
    loss_of = context.prepared.loss
    with suppress(Exception):  # a user's own loss that cannot be copied is used itself
        loss_of = copy.deepcopy(loss_of)
    tracer = NonFiniteTracer(model)
    samples = sum(len(batch.ids) for batch in group)
    with _installed(context, model, tracer) as hooks:
        before.restore(model, hooks)
        for number, batch in enumerate(group):
            at = f"in micro-batch {number} of {len(group)}, " if len(group) > 1 else ""
            hooks.accumulating = number + 1 < len(group)
            hooks.samples = batch.ids
            hooks.population = batch.population
            args, kwargs = as_call(batch.inputs, model)
            already = _nonfinite_tensors(model) if number == wrong else {}
            with context.autocast():
                output = tracer(*args, **kwargs)
                loss = loss_of(output, batch.target)
            if number == wrong:
                return at + _cause_of_loss(context, already, tracer.origin, batch, output, loss)
            if wrong is not None:
                continue
            scaled = context.scaler.scale(loss * (len(batch.ids) / samples))
            tracer.follow_backward(scaled, f"the loss {context.prepared.loss.name}")
            scaled.backward()
            if tracer.backward is not None and not all_finite(_gradients(model).values()):
                return at + tracer.backward
        return _cause_of_gradients(context, model, tracer, len(group))


def _installed(context: RunContext, model: nn.Module, tracer: NonFiniteTracer) -> Installation:
    """The observers, and the hooks that change values, for the copy of the model."""
    plan = context.prepared.plan
    taken = {name for name, _ in passed_on(plan.hooks)}
    hooks = [*tracer.observers]
    for hook in plan.hooks:
        changes = hook.spec.name in taken or not hook.spec.action.observes
        if changes and hook.spec.hook_type.phase != "installation":  # whose changes the copy has
            hooks.append(hook)
    sink = Memory()
    sink.wants_calls = True
    plan = replace(plan, hooks=tuple(hooks))
    installation = Installation(plan, model, sink=sink, scaler=context.scaler, replace_op=tracer.replace_op)
    installation.clock.epoch = context.hooks.clock.epoch
    installation.clock.step = context.hooks.clock.step
    return installation


def _cause_of_loss(
    context: RunContext,
    already: Mapping[str, str],
    origin: _Origin | None,
    batch: Batch,
    output: object,
    loss: Tensor,
) -> str:
    """Why this micro-batch's loss is not finite.

    already: the parameters and buffers that were not finite before its forward, see `_nonfinite_tensors`
    """
    if all_finite([loss]):
        return _NOT_REPRODUCED
    if origin is None or not not_finite(output):
        if bad := not_finite(batch.target):
            return f"the targets of the batch are not finite: {bad}{_samples(batch, batch.target)}"
        return f"first made by the loss {context.prepared.loss.name}, from a finite output and finite targets"
    if origin.path is None:
        return f"the inputs of the batch are not finite: {origin.text}{_samples(batch, batch.inputs)}"
    used = [name for name in already if not origin.path or name.startswith(f"{origin.path}.")]
    if not used:
        return origin.text
    text = f"not finite before the forward of this step: {already[used[0]]}"
    if used[1:]:
        text += f"; so are {listed(used[1:])}"
    writers = [
        f"hook {hook.spec.name!r} ({hook.spec.hook_type}, {hook.spec.action.action_name})"
        for hook in context.prepared.plan.hooks
        if _writes(hook, used[0])
    ]
    return f"{text}; {listed(writers)} changes it" if writers else text


def _nonfinite_tensors(model: nn.Module) -> dict[str, str]:
    """Name -> description, for each parameter and buffer that is not finite.

    A buffer with infinities but without NaN is assumed to be a mask, and left out.
    """
    described: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if bad := not_finite(parameter):
            described[name] = f"the parameter {name}: {bad}"
    for name, buffer in model.named_buffers():
        if buffer.isnan().any():
            described[name] = f"the buffer {name}: {not_finite(buffer)}"
    return described


def _writes(hook: PlannedHook, name: str) -> bool:
    """Whether the hook may change the parameter of this name or its gradient."""
    spec = hook.spec
    if spec.action.observes or spec.hook_type.sees_batch or spec.hook_type.phase == "forward":
        return False
    paths = [path for match in hook.matches for path in match.names]
    return any(not path or name == path or name.startswith(f"{path}.") for path in paths)


def _samples(batch: Batch, value: Tensor | dict[str, Tensor]) -> str:
    """`` (val samples 4, 17)``: the samples with non-finite values; empty if rows are not samples."""
    numbers = set[int]()
    for tensor in value.values() if isinstance(value, dict) else (value,):
        if tensor.dim() and len(tensor) == len(batch.ids) and tensor.is_floating_point():
            wrong = ~tensor.isfinite().reshape(len(tensor), -1).all(dim=1)
            numbers.update(batch.ids[wrong.cpu()].tolist())
    return f" ({batch.split} samples {listed(map(str, sorted(numbers)), 8)})" if numbers else ""


def _cause_of_gradients(context: RunContext, model: nn.Module, tracer: NonFiniteTracer, count: int) -> str:
    """Why gradients are not finite although every backward function returned finite ones."""
    gradients = _gradients(model)
    for name, gradient in gradients.items():
        if bad := not_finite(gradient):
            return f"the gradient of {name}, added up over {count} micro-batches, is not finite: {bad}"
    if not gradients:
        return _NOT_REPRODUCED
    stepped = [parameter for name, parameter in model.named_parameters() if name in gradients]
    optimizer = without_compiler(torch.optim.SGD)(stepped, lr=0.0)
    for gradient in gradients.values():
        gradient.div_(context.scaler.get_scale())  # 1 if the scaler is not enabled
    clip(context.settings.train, optimizer)
    for name, gradient in gradients.items():
        if not_finite(gradient):
            return f"first made by clipping, from finite gradients: that of {name}"
    optimizer.step()  # runs the optimizer_step_pre hooks
    return tracer.backward or _NOT_REPRODUCED


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
