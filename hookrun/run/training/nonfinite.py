"""`train.on_nonfinite`: prevents optimizer steps with a loss or gradients that are not finite, and finds the source."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hookrun.engine.hook_types import FORWARD, FORWARD_PRE, OPTIMIZER_STEP_PRE
from hookrun.engine.plan.plan import PlannedHook, passed_on
from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.apply_action import Op
from hookrun.engine.runtime.optimizers import without_compiler
from hookrun.engine.runtime.records import Memory
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.wiring import Variant
from hookrun.engine.validation import join
from hookrun.engine.values.containers import tensors
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
        own_code = bool(plan.code) or any(hook.code for hook in plan.hooks)
        self.before = BeforeStep(context.model, context.hooks, own_code=own_code)
        self.skipped = 0
        self._context = context
        self._optimizer = optimizer
        self._group: Sequence[Batch] = ()
        self._losses: Sequence[Tensor] = ()
        self._in_epoch = 0
        self._stepped = False
        specs = (hook.spec for hook in plan.hooks if not hook.spec.action.observes)
        self._edits_last = OPTIMIZER_STEP_PRE in {spec.hook_type for spec in specs}
        optimizer.register_step_pre_hook(self._before_step)  # torch runs it after the hooks of the experiment

    def state_dict(self) -> dict[str, int]:
        """The number of skipped steps, in the run and in this epoch."""
        return {"skipped": self.skipped, "told": self._in_epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Replace the counts by saved ones."""
        self.skipped, self._in_epoch = state["skipped"], state["told"]

    def step(self, group: Sequence[Batch], losses: Sequence[Tensor]) -> Outcome:
        """Step the optimizer, through the gradient scaler; gradients are already unscaled and clipped.

        group:  the micro-batches
        losses: their detached losses

        Raises HookrunError if the loss or a gradient is not finite and the policy is `error`.
        """
        self._group, self._losses = group, losses
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
        trained = (each for group in self._optimizer.param_groups for each in group["params"])
        return [*self._losses, *(each.grad for each in trained if each.grad is not None)]

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
        policy, clock = context.settings.train.on_nonfinite, context.hooks.clock
        # A check hook has found it already and ends the run. The ranks agree on it, since they communicate below.
        if context.ranks.largest([context.stopped])[0]:
            return "skipped"
        self.skipped += 1
        self._in_epoch += 1
        is_told = policy != "skip" or self.skipped <= MOST_REPORTED
        text = f"epoch {clock.epoch}, step {clock.step}: {self._described()}" if is_told else ""
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
        wrong = next((number for number, loss in enumerate(self._losses) if not all_finite([loss])), None)
        what = "a gradient is not finite" if wrong is None else f"the loss is {float(self._losses[wrong])}"
        self._optimizer.zero_grad(set_to_none=True)  # frees memory to repeat the step
        if context.sharded:
            return f"{what}: {UNKNOWN}: parameters are sharded over the ranks"
        source = source_of(context, self.before, self._group, wrong)
        if context.ranks.several:  # each has repeated the step with its own rows
            sources = enumerate(context.ranks.gathered(source))
            known = (f"rank {rank}: {text}" for rank, text in sources if UNKNOWN not in text)
            source = next(known, source)
        return f"{what}: {source}"

    def end_epoch(self) -> dict[str, float]:
        """Print how many steps of the epoch were skipped; returns the entry for metrics.jsonl, empty without any."""
        count, self._in_epoch = self._in_epoch, 0
        if not count or self._context.settings.train.on_nonfinite != "skip":
            return {}
        context, epoch = self._context, self._context.hooks.clock.epoch
        lines = [f"{WHERE}: steps skipped in epoch {epoch}: {count}, so far: {self.skipped}"]
        parameters = dict(context.model.named_parameters())
        # of sharded parameters each rank has only its parts
        found = context.ranks.largest([bool(not_finite(each)) for each in parameters.values()])
        if bad := list(compress(parameters, found)):
            lines.append(f"{WHERE}: {bad[0]} itself is not finite: skipping steps does not help")
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
        self._owners = {
            (path, name): module
            for path, module in model.named_modules()
            for name, _ in module._buffers.items()
        }
        self._kept = dict[tuple[str, str], _Kept]()
        self._drawing = [site for site in hooks.sites if site.draws]

    def take(self) -> None:
        """Record the state. Only buffers that were written since the last call are copied."""
        self._generators = generator_states(python=self._own_code)
        self._draws = {(site.hook_name, site.path): site.draws_place for site in self._drawing}
        for place, module in self._owners.items():
            now, kept = getattr(module, place[1], None), self._kept.get(place)
            if now is None:
                self._kept.pop(place, None)
                continue
            # torch counts no versions of these
            uncounted = isinstance(module, _NormBase) or now.is_inference()
            version = None if uncounted else now._version
            if kept is None or kept.tensor is not now or version is None or kept.version != version:
                self._kept[place] = _Kept(now, version, now.detach().clone())

    @torch.no_grad()
    def restore(self, copy: nn.Module, hooks: Installation) -> None:
        """Set the random generators, and the buffers and hooks' draws of a copy of the model, to the recorded state."""
        set_generators(self._generators)
        modules = dict(copy.named_modules())
        for (path, name), kept in self._kept.items():
            modules[path]._buffers[name] = kept.copy.clone()
        for site in hooks.sites:
            if (place := self._draws.get((site.hook_name, site.path))) is not None:
                site.draws_place = place

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore buffers that the step has made NaN or infinite, with the other floating-point buffers of the module.

        So a batch for which no step was taken does not stay in the running statistics of a batch norm.
        """
        buffers = {place: getattr(self._owners[place], place[1], None) for place in self._kept}
        wrong = {
            place[0]
            for place, kept in self._kept.items()
            if not_finite(buffers[place]) and not not_finite(kept.copy)
        }
        for place, kept in self._kept.items():
            now = buffers[place]
            if now is not None and place[0] in wrong and now.is_floating_point():
                if now is kept.tensor:
                    now.copy_(kept.copy)
                else:
                    self._owners[place]._buffers[place[1]] = kept.copy.clone()


# ---- the observers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """A module call, hook or backward function that returned non-finite values for finite ones.

    path: the path of its module; None: the values are inputs of the model instead
    hook: the name of the hook, if it is one
    """

    text: str
    path: str | None = None
    hook: str | None = None


@dataclass
class _Search:
    """The first origin whose values did not become finite again, as after a softmax of scores that are masked.

    standing: this origin, so far
    healed:   the first origin whose values became finite again
    """

    standing: _Origin | None = None
    healed: _Origin | None = None

    def blame(self, origin: _Origin) -> None:
        """Note an origin; a later one only passes on what is not finite."""
        self.standing = self.standing or origin

    def heal(self) -> None:
        """Values became finite again."""
        self.healed, self.standing = self.healed or self.standing, None

    @property
    def origin(self) -> _Origin | None:
        """The origin; one that was healed if there is no other."""
        return self.standing or self.healed


class NonFiniteTracer:
    """Follows the passes of a model, and finds where values first become non-finite.

    `observers` and `around` belong to the installation that runs the passes.

    forward:    the search among module calls and hooks in the present forward pass
    backward:   the search among hooks on gradients and backward functions, over all passes
    in_forward: module calls are followed; they are not while checkpointing computes them again
    """

    def __init__(self, model: nn.Module) -> None:
        self.forward, self.backward = _Search(), _Search()
        self.in_forward = False
        modules = matches(model, dict(model.named_modules()))
        self.observers = (
            planned("inputs", FORWARD_PRE, modules, Observe(see=self._entered)),
            planned("outputs", FORWARD, modules, Observe(see=self._returned)),
        )
        # Path and number of each module call that has not returned -> its text, and the origin of what is not finite
        # outside of it; None if there is none, or if its inputs are not finite.
        self._open = dict[tuple[str, int], tuple[str, _Origin | None]]()
        self._followed = set[Node]()

    def around(self, site: HookSite, op: Op, _variant: Variant) -> Op:
        """What runs in place of a hook: the hook, between two looks at the value; see `Installation`."""
        return op if site.spec.action.observes else partial(self._edited, site, op)

    @contextmanager
    def pass_through_model(self) -> Iterator[None]:
        """A block for one forward pass."""
        self.forward = _Search()
        self._open.clear()
        self._followed.clear()
        self.in_forward = True
        try:
            yield
        finally:
            self.in_forward = False

    def _entered(self, site: HookSite, value: Any) -> None:
        if not self.in_forward:
            return
        path, before = site.path, self.forward.standing
        around = [key for key in self._open if not key[0] or path.startswith(f"{key[0]}.")]
        caller = self._open[around[-1]][0] if around else "(root)"
        self.follow_backward(value, caller)
        if (bad := not_finite(value)) and not path:
            self.forward.blame(_Origin(bad))
        elif bad:
            self.forward.blame(
                _Origin(
                    f"first made by the forward of {caller}, itself, before it calls {path}: {bad}",
                    around[-1][0] if around else "",
                )
            )
        where = f"{path or '(root)'} ({type(site.module).__name__}), call {site.call}"
        self._open[path, site.call] = where, None if bad else before

    def _returned(self, site: HookSite, value: Any) -> None:
        if not self.in_forward or (site.path, site.call) not in self._open:
            return
        where, outside = self._open.pop((site.path, site.call))
        self.follow_backward(value, where)
        if bad := not_finite(value):
            itself = ", itself, outside its submodules" if list(site.module.children()) else ""
            self.forward.blame(
                _Origin(f"first made by the forward of {where}{itself}, from finite inputs: {bad}", site.path)
            )
        elif self.forward.standing is not outside:
            self.forward.heal()

    def _edited(self, site: HookSite, op: Op, value: Any) -> Any:
        hook_type = site.hook_type
        is_forward = hook_type.phase == "forward" and not hook_type.until_backward
        if is_forward and not self.in_forward:
            return op(value)
        before = not_finite(value)
        value = op(value)
        after, search = not_finite(value), self.forward if is_forward else self.backward
        where = f"{site.where}, call {site.call}" if hook_type.on == "module" else site.where
        if is_forward:
            self.follow_backward(value, where)
        if after and not before:
            search.blame(
                _Origin(f"first made by {where}, from finite values: {after}", site.path, hook=site.hook_name)
            )
        elif before and not after:
            search.heal()
        return value

    def follow_backward(self, value: Any, maker: str) -> None:
        """Check arguments and results of the backward functions that lead to this value and are not followed yet.

        maker: the module call or hook that has just computed the value, or the loss
        """
        for node in new_nodes(value, self._followed):
            node.register_hook(partial(self._ran, node.name(), maker))

    def _ran(self, node: str, maker: str, grad_inputs: Any, grad_outputs: Any) -> None:
        """torch's hook on an autograd node, called after its backward function."""
        bad, given = not_finite(grad_inputs), not_finite(grad_outputs)
        if bad and not given:
            self.backward.blame(
                _Origin(f"first made by the backward of {maker} ({node}), from a finite gradient: {bad}", "")
            )
        elif given and not bad and any(True for _ in tensors(grad_inputs)):
            self.backward.heal()


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
    model, loss_of = copy.deepcopy(context.model), context.prepared.loss
    with suppress(Exception):  # a user's own loss that cannot be copied is used itself
        loss_of = copy.deepcopy(loss_of)
    tracer, sink = NonFiniteTracer(model), Memory()
    sink.wants_calls = True
    plan = context.prepared.plan
    taken = {name for name, _ in passed_on(plan.hooks)}
    # hooks that act at installation are left out: the copy has their changes
    edits = (
        hook
        for hook in plan.hooks
        if hook.spec.hook_type.phase != "installation"
        and (hook.spec.name in taken or not hook.spec.action.observes)
    )
    clock, scaler = context.hooks.clock, context.scaler
    samples = sum(len(batch.ids) for batch in group)
    plan = replace(plan, hooks=(*tracer.observers, *edits))
    with Installation(plan, model, sink=sink, scaler=scaler, around=tracer.around) as hooks:
        before.restore(model, hooks)
        hooks.clock.epoch, hooks.clock.step = clock.epoch, clock.step
        for number, batch in enumerate(group):
            at = f"in micro-batch {number} of {len(group)}, " if len(group) > 1 else ""
            hooks.accumulating = number + 1 < len(group)
            hooks.samples, hooks.population = batch.ids, batch.population
            args, kwargs = as_call(batch.inputs, model)
            already = _nonfinite_tensors(model) if number == wrong else {}
            with tracer.pass_through_model(), context.autocast():
                output = model(*args, **kwargs)
            with context.autocast():
                loss = loss_of(output, batch.target)
            if number == wrong:
                return at + _of_loss(context, already, tracer.forward.origin, batch, output, loss)
            if wrong is None:
                scaled = scaler.scale(loss * (len(batch.ids) / samples))
                tracer.follow_backward(scaled, f"the loss {context.prepared.loss.name}")
                scaled.backward()
                origin = tracer.backward.origin
                if origin is not None and not all_finite(_gradients(model).values()):
                    return at + origin.text
        return _of_gradients(context, model, tracer, len(group))


def _of_loss(
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
    hooks = context.prepared.plan.hooks
    used = [name for name in already if not origin.path or name.startswith(f"{origin.path}.")]
    if origin.hook is not None:  # it uses only the parameters that it has added
        added = {
            join(origin.path, name) for hook in hooks if hook.spec.name == origin.hook for name in hook.added
        }
        used = [name for name in used if name in added]
    if not used:
        return origin.text
    writers = [
        f"hook {hook.spec.name!r} ({hook.spec.hook_type}, {hook.spec.action.action_name})"
        for hook in hooks
        if _writes(hook, used[0])
    ]
    by = f"; {listed(writers)} changes it" if writers else ""
    others = f"; so are {listed(used[1:])}" if used[1:] else ""
    return f"not finite before the forward of this step: {already[used[0]]}{others}{by}"


def _nonfinite_tensors(model: nn.Module) -> dict[str, str]:
    """Name -> description, for each parameter and buffer that is not finite.

    A buffer with infinities but without NaN is assumed to be a mask, and left out.
    """
    wrong = {name: not_finite(parameter) for name, parameter in model.named_parameters()}
    described = {name: f"the parameter {name}: {bad}" for name, bad in wrong.items() if bad}
    for name, buffer in model.named_buffers():
        if buffer.isnan().any():
            described[name] = f"the buffer {name}: {not_finite(buffer)}"
    return described


def _writes(hook: PlannedHook, name: str) -> bool:
    """Whether the hook may change the parameter of this name or its gradient."""
    spec = hook.spec
    if spec.action.observes or spec.hook_type.of_rows or spec.hook_type.phase == "forward":
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


def _of_gradients(context: RunContext, model: nn.Module, tracer: NonFiniteTracer, count: int) -> str:
    """Why gradients are not finite although every backward function returned finite ones."""
    gradients = _gradients(model)
    for name, gradient in gradients.items():
        if bad := not_finite(gradient):
            return f"the gradient of {name}, added up over {count} micro-batches, is not finite: {bad}"
    if not gradients:
        return _NOT_REPRODUCED
    stepped = [parameter for name, parameter in model.named_parameters() if name in gradients]
    optimizer = without_compiler(torch.optim.SGD)(stepped, lr=0.0)
    if (scale := context.scaler.get_scale()) != 1:
        for gradient in gradients.values():
            gradient.div_(scale)
    clip(context.settings.train, optimizer)
    wrong = [name for name, gradient in gradients.items() if not_finite(gradient)]
    if wrong:
        return f"first made by clipping, from finite gradients: that of {wrong[0]}"
    optimizer.step()  # runs the optimizer_step_pre hooks
    origin = tracer.backward.origin
    return origin.text if origin is not None else _NOT_REPRODUCED


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
