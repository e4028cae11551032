"""What PyTorch calls: one callable for each module and hook type, which runs the actions there in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.containers import arguments, call_with, get, leaves, members, rebuild, tensors
from hookrun.runtime.apply_action import Op
from hookrun.runtime.checkpointing import NO_BACKWARD, graph_task, repeating
from hookrun.runtime.clock import Calls, Clock
from hookrun.runtime.compiled import InGraph, tracing
from hookrun.runtime.site import Site


@dataclass(frozen=True, slots=True)
class Firing:
    """A site and everything that it does to a value, its schedule included.

    traced: the same inside a compiled graph
    """

    site: Site
    op: Op
    traced: InGraph

    def repeat(self, value: Any) -> Any:
        """What it did to the value in the call that is being repeated; nothing is counted or recorded again."""
        site = self.site
        if site.spec.action.observes:
            return value
        counts = site.fired, site.idle, site.changed, site.total
        try:
            return self.op(value)
        finally:
            site.fired, site.idle, site.changed, site.total = counts


def in_graph(firings: Sequence[Firing], value: Any) -> Any:
    """Run the firings of a module while torch.compile reads it."""
    for firing in firings:
        value = firing.traced.fire(value)
    return value


def in_backward(firings: Sequence[Firing], value: Any) -> Any:
    """Run the firings of a module that is called during a backward pass, nearly always to repeat an earlier call."""
    again = repeating() is not None
    for firing in firings:
        value = firing.repeat(value) if again else firing.op(value)
    return value


class RegisteredHook:
    """Base of what is registered on a module, as a bound method.

    A deep copy or a pickle of a hooked model carries a copy of the point that runs nothing: the copy is not hooked, and
    never writes into the original's records. Removal empties a point, so that what autograd graphs still hold of it
    is without effect.
    """

    def __init__(self, firings: Sequence[Firing] = ()) -> None:
        self.firings = tuple(firings)
        self.ops = tuple(firing.op for firing in firings)

    def __deepcopy__(self, memo: object) -> RegisteredHook:
        return type(self)()

    def __reduce__(self) -> tuple[type[RegisteredHook], tuple[()]]:
        return type(self), ()

    def clear(self) -> None:
        """Run nothing from now on."""
        self.firings, self.ops = (), ()


class ForwardPre(RegisteredHook):
    """`forward_pre`: the arguments."""

    def forward_pre(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's forward pre-hook, registered with kwargs."""
        value = before = arguments(args, kwargs)
        if tracing():
            return call_with(in_graph(self.firings, value))
        if graph_task() != NO_BACKWARD:
            value = in_backward(self.firings, value)
        else:
            for op in self.ops:
                value = op(value)
        return None if value is before else call_with(value)


class Forward(RegisteredHook):
    """`forward`: the output."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook."""
        if tracing():
            return in_graph(self.firings, output)
        if graph_task() != NO_BACKWARD:
            return in_backward(self.firings, output)
        for op in self.ops:
            output = op(output)
        return output


class ForwardOne(RegisteredHook):
    """`forward` with a single action, the most frequent of all points: no loop."""

    def __init__(self, firings: Sequence[Firing] = ()) -> None:
        super().__init__(firings)
        self.op: Op = self.ops[0] if self.ops else _unchanged

    def forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook."""
        if tracing():
            return in_graph(self.firings, output)
        return self.op(output) if graph_task() == NO_BACKWARD else in_backward(self.firings, output)

    def clear(self) -> None:
        """Run nothing from now on."""
        super().clear()
        self.op = _unchanged


def _unchanged(value: Any) -> Any:
    return value


class ForwardWithArguments(RegisteredHook):
    """`forward` where an action reads the module's arguments too, those given by keyword last."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """torch's forward hook, registered with kwargs."""
        for firing in self.firings:
            firing.site.args = (*args, *kwargs.values()) if kwargs else args
            if tracing():
                output = firing.traced.fire(output)
            elif graph_task() != NO_BACKWARD:
                output = in_backward((firing,), output)
            else:
                output = firing.op(output)
            firing.site.args = ()
        return output


class ForwardCounter(RegisteredHook):
    """Counts the forwards of the root module, so that calls are numbered within one."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self.clock = clock

    def count(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook on the root module."""
        if self.clock is not None and not tracing() and repeating() is None:
            self.clock.forwards += 1


class CallCounter(RegisteredHook):
    """Numbers the calls of a module."""

    def __init__(self, calls: Calls | None = None) -> None:
        super().__init__()
        self.calls = calls

    def count(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook."""
        if self.calls is not None and not tracing():
            self.calls.count()


class OutputGrad(RegisteredHook):
    """`output_grad`: tensor hooks on the output.

    They are attached to what the module finally returns, so the gradient is that of the output after all edits.
    """

    def attach(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """torch's forward hook, registered with kwargs."""
        if not self.firings or not torch.is_grad_enabled():
            return None
        output = _apart_from((args, kwargs) if kwargs else args, output)
        for firing in self.firings:
            self._attach(firing, output)
        return output

    def _attach(self, firing: Firing, output: Any) -> None:
        site = firing.site
        target = site.spec.keys.target
        found = ((str(target), get(output, target.keys)),) if target is not None else leaves(output)
        watched = [(path, leaf) for path, leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not watched:
            site.fail(no_gradient(output))
        for path, tensor in watched:
            if tracing():
                firing.traced.watch(tensor)
            else:
                tensor.register_hook(_Gradient(self, firing, path, site.call))


class _Gradient:
    """A tensor hook of one call of a module."""

    __slots__ = ("call", "firing", "path", "registered")

    def __init__(self, registered: RegisteredHook, firing: Firing, path: str, call: int) -> None:
        self.registered = registered
        self.firing = firing
        self.path = path
        self.call = call

    def __call__(self, grad: Tensor) -> Tensor | None:
        if not self.registered.ops:
            return None
        site = self.firing.site
        site.within, site.of_call = self.path, self.call
        new: Tensor = self.firing.op(grad)
        site.of_call = None
        return None if new is grad else new


def _apart_from(args: Any, output: Any) -> Any:
    """The output, with a tensor that is one of the arguments as a view of it.

    Where a module returns its input (Identity, Dropout in eval), both are one tensor: a hook on it would see the
    gradient of all uses of the input.
    """
    given = {id(tensor) for tensor in tensors(args)}
    if not given:
        return output
    return rebuild(
        output, lambda leaf: leaf.view_as(leaf) if isinstance(leaf, Tensor) and id(leaf) in given else leaf
    )


def no_gradient(output: Any) -> str:
    """Why a gradient hook can't see anything of an output, although gradients are on."""
    if not any(True for _ in tensors(output)):
        return f"its output is a {type(output).__name__} without tensors and carries no gradient"
    return "its output carries no gradient: neither its input nor its parameters require one"


class ParameterGrad(RegisteredHook):
    """`grad`: the gradient of a parameter, before it is accumulated."""

    def grad(self, grad: Tensor) -> Tensor | None:
        """torch's tensor hook."""
        new = grad
        for op in self.ops:
            new = op(new)
        return None if new is grad else new


class AccumulatedGrad(RegisteredHook):
    """`post_accumulate_grad`: the accumulated gradient of a parameter, once per optimizer step."""

    def __init__(self, firings: Sequence[Firing] = (), clock: Clock | None = None) -> None:
        super().__init__(firings)
        self.clock = clock

    def accumulated(self, parameter: nn.Parameter) -> None:
        """torch's post-accumulate-grad hook."""
        if self.clock is None or self.clock.accumulating or (grad := parameter.grad) is None:
            return
        new = grad
        for op in self.ops:
            new = op(new)
        write(grad, new)


def write(tensor: Tensor, new: Any) -> None:
    """Put a new value into a gradient or parameter, whose storage others may share (gradient buckets, for one)."""
    if new is not tensor:
        with torch.no_grad():
            tensor.copy_(new)


def unscaled(op: Op, clock: Clock) -> Op:
    """The op on gradients without the factor that the gradient scaler put on the loss."""
    if clock.scaler is None:
        return op

    def run(value: Any) -> Any:
        scale = clock.loss_scale()
        return op(value) if scale is None else run_unscaled(op, value, scale)

    return run


def run_unscaled(op: Op, value: Any, scale: Tensor) -> Any:
    """The op on a value without its factor, which it has again afterwards.

    It sees 16-bit gradients in 32 bits: unscaled, small ones would be lost, which is what the factor is there to
    prevent.
    """
    plain = rebuild(value, lambda leaf: _unscaled_tensor(leaf, scale) if isinstance(leaf, Tensor) else leaf)
    new = op(plain)
    if new is plain:
        return value
    pairs = zip(members(value), members(plain), strict=True)

    def rescaled(leaf: Any) -> Any:
        old, seen = next(pairs)
        return old if leaf is seen else (leaf * scale).to(old.dtype)

    return rebuild(new, rescaled)


def _unscaled_tensor(tensor: Tensor, scale: Tensor) -> Tensor:
    return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor) / scale
