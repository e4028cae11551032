"""Finds what first made a step NaN or infinite, by repeating it with an observer at every module and hook."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase

from hookrun.errors import listed, reason
from hookrun.hook_types import FORWARD, FORWARD_PRE
from hookrun.plan.plan import Match, PlannedHook
from hookrun.runtime import Installation
from hookrun.runtime.plain_optimizers import without_compiler
from hookrun.runtime.records import Memory
from hookrun.runtime.site import HookSite
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.observers import observer
from hookrun.tasks.run.prepare import as_call
from hookrun.tasks.training.finite import all_finite, not_finite
from hookrun.tasks.training.optimizers import clip
from hookrun.values.containers import tensors

UNKNOWN = "its source is not known"
_NOT_REPRODUCED = (
    f"{UNKNOWN}: repeated from the same state, the step is finite, so the model, "
    "the loss or a hook depends on something that changes from call to call"
)
_SHOWN = 4

_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the sequence number of this thread's next autograd node."""


# ---- the state before a step -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Buffer:
    """One buffer of a module, and its copy.

    tensor:  the buffer at the time of the copy
    version: torch's version counter of `tensor` at the time of the copy; None: writes do not increase the counter
    """

    path: str
    module: nn.Module
    name: str
    tensor: Tensor | None = None
    version: int | None = None
    copy: Tensor | None = None

    def copy_changed(self) -> bool:
        """Whether the buffer may differ from its copy; if shape or dtype changed, it is copied here."""
        now = self.module._buffers.get(self.name)
        if now is None:
            self.tensor = self.copy = None
            return False
        uncounted = isinstance(self.module, _NormBase) or now.is_inference()  # torch counts no versions there
        version = None if uncounted else now._version
        if now is self.tensor and version is not None and version == self.version:
            return False
        self.tensor, self.version = now, version
        if self.copy is None or self.copy.shape != now.shape or self.copy.dtype != now.dtype:
            self.copy = now.detach().clone()
            return False
        return True


class BeforeStep:
    """Random generators, buffers and random draws of hooks before a step, from which the step can be repeated.

    own_code: the step runs the user's own Python, which may use Python's and NumPy's generators
    """

    def __init__(
        self, model: nn.Module, hooks: Installation, device: torch.device, *, own_code: bool
    ) -> None:
        self._device = torch.get_device_module(device) if device.type != "cpu" else None
        self._own_code = own_code
        modules = model.named_modules()
        self._buffers = [_Buffer(path, module, name) for path, module in modules for name in module._buffers]
        self._drawing = [site for site in hooks.sites if site.draws]
        self.take()

    def take(self) -> None:
        """Record the state. Only buffers that were written since the last call are copied."""
        self._generators = self._read()
        changed = [buffer for buffer in self._buffers if buffer.copy_changed()]
        if changed:
            with torch.no_grad():
                torch._foreach_copy_(
                    [buffer.copy for buffer in changed],  # type: ignore[misc]
                    [buffer.tensor for buffer in changed],  # type: ignore[misc]
                )
        self._draws = {(site.hook_name, site.path): site.draws_place for site in self._drawing}

    def _read(self) -> tuple[Any, ...]:
        device = self._device.get_rng_state() if self._device is not None else None
        states = (torch.default_generator.get_state(), device)
        return (*states, random.getstate(), np.random.get_state()) if self._own_code else states

    def _write(self, states: tuple[Any, ...]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            self._device.set_rng_state(states[1])
        if self._own_code:
            random.setstate(states[2])
            np.random.set_state(states[3])

    @contextmanager
    def generators(self) -> Iterator[None]:
        """Within the block every random generator has its state from before the step; afterwards its present state."""
        now = self._read()
        self._write(self._generators)
        try:
            yield
        finally:
            self._write(now)

    @torch.no_grad()
    def fill(self, copy: nn.Module, hooks: Installation) -> None:
        """Write the recorded buffers and states of the hooks' draws into a copy of the model and its installation."""
        modules = dict(copy.named_modules())
        for buffer in self._buffers:
            if buffer.copy is not None:
                modules[buffer.path]._buffers[buffer.name] = buffer.copy.clone()
        for site in hooks.sites:
            if (place := self._draws.get((site.hook_name, site.path))) is not None:
                site.draws_place = place

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore buffers that the step has made NaN or infinite, with the other floating-point buffers of the module.

        So a batch for which no step was taken does not stay in the running statistics of a batch norm.
        """
        buffers = [
            (buffer, now, buffer.copy)
            for buffer in self._buffers
            if (now := buffer.module._buffers.get(buffer.name)) is not None and buffer.copy is not None
        ]
        wrong = {buffer.path for buffer, now, kept in buffers if not_finite(now) and not not_finite(kept)}
        for buffer, now, kept in buffers:
            if buffer.path in wrong and now.is_floating_point():
                if now is buffer.tensor:
                    now.copy_(kept)
                else:
                    buffer.module._buffers[buffer.name] = kept.clone()


# ---- the observers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """A module call, hook or backward function that returned non-finite values for finite ones.

    path:     the path of its module
    own:      the module's parameters that it uses; None: all, with the parameters of its submodules
    is_input: the values are inputs of the model instead
    """

    path: str
    text: str
    own: frozenset[str] | None = None
    is_input: bool = False


class _Search:
    """The first origin whose values did not become finite again, as after a softmax of scores that are masked."""

    def __init__(self) -> None:
        self.standing: _Origin | None = None
        self._healed: _Origin | None = None

    def blame(self, origin: _Origin) -> None:
        """Note an origin; a later one only passes on what is not finite."""
        self.standing = self.standing or origin

    def heal(self) -> None:
        """Values became finite again."""
        self._healed, self.standing = self._healed or self.standing, None

    @property
    def found(self) -> _Origin | None:
        """The origin; one that was healed if there is no other."""
        return self.standing or self._healed


@dataclass
class _Call:
    """A module call that has not returned.

    is_wrong: its inputs are not finite
    before:   the origin that was known when it began
    first:    the number of its first autograd node
    """

    where: str
    is_wrong: bool
    before: _Origin | None
    first: int


@dataclass
class NonFiniteTracer:
    """Follows the passes of a model, and finds where values first become non-finite.

    backward:   the search among hooks on gradients and backward functions, over all passes
    in_forward: module calls are followed; they are not while checkpointing computes them again
    """

    model: nn.Module
    backward: _Search = field(default_factory=_Search)
    in_forward: bool = False

    def __post_init__(self) -> None:
        self._before = dict[tuple[str, str], tuple[str, int]]()
        self._reset()

    def _reset(self) -> None:
        self.forward = _Search()
        self._open = dict[tuple[str, int], _Call]()
        self._spans = list[tuple[str, int, int]]()  # what created the autograd nodes from a number to another

    def hooks(self, edits: Sequence[PlannedHook]) -> tuple[PlannedHook, ...]:
        """The edits, and observers before and after each of them and of every module."""
        modules = tuple(
            Match(path, (path,), type(module).__name__, 0) for path, module in self.model.named_modules()
        )
        hooks = [
            observer("inputs", FORWARD_PRE, modules, self._entered),
            observer("outputs", FORWARD, modules, self._returned),
        ]
        for edit in edits:
            name, hook_type = edit.spec.name, edit.spec.hook_type
            before, after = partial(self._before_hook, name), partial(self._after_hook, edit)
            hooks += [observer(f"before {name}", hook_type, edit.matches, before), edit]
            hooks += [observer(f"after {name}", hook_type, edit.matches, after)]
        return tuple(hooks)

    @contextmanager
    def pass_through_model(self) -> Iterator[None]:
        """A block for one forward pass."""
        self._reset()
        self.in_forward = True
        try:
            yield
        finally:
            self.in_forward = False

    def _entered(self, site: HookSite, value: Any) -> None:
        if not self.in_forward:
            return
        bad, before = not_finite(value), self.forward.standing
        if bad and not site.path:
            self.forward.blame(_Origin("", bad, is_input=True))
        elif bad:
            inside = (key for key in reversed(self._open) if not key[0] or site.path.startswith(f"{key[0]}."))
            caller = next(inside, ("", 0))
            around = self._open[caller].where if caller in self._open else "(root)"
            text = f"first made by the forward of {around}, itself, before it calls {site.path}: {bad}"
            self.forward.blame(_Origin(caller[0], text))
        where = f"{site.path or '(root)'} ({type(site.module).__name__}), call {site.call}"
        self._open[site.path, site.call] = _Call(where, bool(bad), before, _sequence_number())

    def _returned(self, site: HookSite, value: Any) -> None:
        call = self._open.pop((site.path, site.call), None)
        if call is None or not self.in_forward:
            return
        self._spans.append((call.where, call.first, _sequence_number()))
        if bad := not_finite(value):
            itself = ", itself, outside its submodules" if list(site.module.children()) else ""
            text = f"first made by the forward of {call.where}{itself}, from finite inputs: {bad}"
            self.forward.blame(_Origin(site.path, text))
        elif call.is_wrong or self.forward.standing is not call.before:
            self.forward.heal()

    def _before_hook(self, name: str, site: HookSite, value: Any) -> None:
        self._before[name, site.path] = not_finite(value), _sequence_number()

    def _after_hook(self, edit: PlannedHook, site: HookSite, value: Any) -> None:
        spec, hook_type = edit.spec, edit.spec.hook_type
        before, first = self._before.pop((spec.name, site.path), ("", _sequence_number()))
        at = f", call {site.call}" if hook_type.on == "module" else ""
        what = f"hook {spec.name!r} ({hook_type}, {spec.action.action_name})"
        where = f"{what} on {site.path or '(root)'}{at}"
        in_forward = hook_type.phase == "forward" and not hook_type.until_backward
        if in_forward and not self.in_forward:
            return
        search = self.forward if in_forward else self.backward
        if in_forward:
            self._spans.append((where, first, _sequence_number()))
        after = not_finite(value)
        if after and not before:
            added = spec.action.adds(spec.name)
            own = frozenset([added] if added is not None else [])
            text = f"first made by {where}, from finite values: {after}"
            search.blame(_Origin(site.path, text, own))
        elif before and not after:
            search.heal()
            if (call := self._open.get((site.path, site.call))) is not None:  # they were its arguments
                call.is_wrong = False

    def follow_backward(self, loss: Tensor, name: str) -> None:
        """Check arguments and results of every function in the backward pass of this loss.

        name: the name of the loss, for functions that no module call created
        """
        seen, waiting = set[Node](), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            node.register_hook(partial(self._ran, node.name(), self._maker(node) or name))
            waiting.extend(following for following, _ in node.next_functions)

    def _maker(self, node: Node) -> str:
        """The innermost module call or hook that created the node; empty if there is none."""
        number = node._sequence_nr()
        around = [span for span in self._spans if span[1] <= number < span[2]]
        return min(around, key=lambda span: span[2] - span[1])[0] if around else ""

    def _ran(self, node: str, maker: str, grad_inputs: Any, grad_outputs: Any) -> None:
        """torch's hook on an autograd node, called after its backward function."""
        bad, given = not_finite(grad_inputs), not_finite(grad_outputs)
        if bad and not given:
            text = f"first made by the backward of {maker} ({node}), from a finite gradient: {bad}"
            self.backward.blame(_Origin("", text))
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
    try:
        with before.generators():
            return _repeat(context, before, group, wrong)
    except Exception as error:  # of a module, or of copying the model
        return f"{UNKNOWN}, because the step could not be repeated: {reason(error)}"


def _repeat(context: RunContext, before: BeforeStep, group: Sequence[Batch], wrong: int | None) -> str:
    model, loss_of = copy.deepcopy(context.model), context.prepared.loss
    with suppress(Exception):  # a user's own loss that cannot be copied is used itself
        loss_of = copy.deepcopy(loss_of)
    tracer, sink = NonFiniteTracer(model), Memory()
    sink.wants_calls = True
    plan = context.prepared.plan
    # hooks that act at installation are left out: the copy has their changes
    edits = [
        hook
        for hook in plan.hooks
        if not hook.spec.action.observes and hook.spec.hook_type.phase != "installation"
    ]
    clock, scaler = context.hooks.clock, context.scaler
    samples = sum(len(batch.ids) for batch in group)
    plan = replace(plan, hooks=tracer.hooks(edits))
    with Installation(plan, model, sink=sink, scaler=scaler) as hooks:
        before.fill(model, hooks)
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
                return at + _of_loss(context, already, tracer.forward.found, batch, output, loss)
            if wrong is None:
                scaled = scaler.scale(loss * (len(batch.ids) / samples))
                tracer.follow_backward(scaled, f"the loss {context.settings.train.loss.name}")
                scaled.backward()
                origin = tracer.backward.found
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
        return f"first made by the loss {context.settings.train.loss.name}, from a finite output and finite targets"
    if origin.is_input:
        return f"the inputs of the batch are not finite: {origin.text}{_samples(batch, batch.inputs)}"
    return _of_tensors(context, already, origin) or origin.text


def _nonfinite_tensors(model: nn.Module) -> dict[str, str]:
    """Name -> description, for each parameter and buffer that is not finite.

    A buffer with infinities but without NaN is assumed to be a mask, and left out.
    """
    parameters = ((f"the parameter {name}", name, each) for name, each in model.named_parameters())
    buffers = (
        (f"the buffer {name}", name, each) for name, each in model.named_buffers() if each.isnan().any()
    )
    return {
        name: f"{called}: {bad}"
        for called, name, each in (*parameters, *buffers)
        if (bad := not_finite(each))
    }


def _of_tensors(context: RunContext, wrong: Mapping[str, str], origin: _Origin) -> str:
    """A description of the first non-finite parameter or buffer that the origin uses; empty if there is none."""
    prefix = f"{origin.path}." if origin.path else ""
    used = [name for name in wrong if name.startswith(prefix)]
    if origin.own is not None:
        used = [name for name in used if name.removeprefix(prefix) in origin.own]
    if not used:
        return ""
    writers = [
        f"hook {hook.spec.name!r} ({hook.spec.hook_type}, {hook.spec.action.action_name})"
        for hook in context.prepared.plan.hooks
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


def _of_gradients(context: RunContext, model: nn.Module, tracer: NonFiniteTracer, count: int) -> str:
    """Why gradients are not finite although every backward function returned finite ones."""
    gradients = _gradients(model)
    for name, gradient in gradients.items():
        if bad := not_finite(gradient):
            return f"the gradient of {name}, added up over {count} micro-batches, is not finite: {bad}"
    if not gradients:
        return _NOT_REPRODUCED
    optimizer = without_compiler(torch.optim.SGD)([model.get_parameter(name) for name in gradients], lr=0.0)
    if (scale := context.scaler.get_scale()) != 1:
        for gradient in gradients.values():
            gradient.div_(scale)
    clip(context.settings.train, optimizer)
    wrong = [name for name, gradient in gradients.items() if not_finite(gradient)]
    if wrong:
        return f"first made by clipping, from finite gradients: that of {wrong[0]}"
    optimizer.step()  # runs the optimizer_step_pre hooks
    origin = tracer.backward.found
    return origin.text if origin is not None else _NOT_REPRODUCED


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
