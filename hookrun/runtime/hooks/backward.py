"""`backward_pre` and `backward`: autograd nodes around a module's call.

torch's full backward hooks raise where the output is written in place, and see neither dict outputs nor keyword
inputs. These nodes hand copy-on-write clones on instead of views, so in-place operations on either side are allowed,
and take every tensor of the arguments and the output, wherever it sits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.containers import arguments, call_with, members, rebuild
from hookrun.runtime.compiled import tracing
from hookrun.runtime.hooks.module_hooks import Firing, RegisteredHook, in_graph, no_gradient

Grads = Sequence[Tensor | None]


class _Entry(torch.autograd.Function):
    """The identity on a module's inputs; its backward is the end of the module's own."""

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        return tuple(map(_own, inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *ctx.crossing.finish(grads))


class _Exit(torch.autograd.Function):
    """The identity on a module's outputs; its backward is the beginning of the module's own."""

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        return tuple(map(_own, outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *ctx.crossing.begin(grads))


def _own(tensor: Tensor) -> Tensor:
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:  # storage that torch does not own
        return tensor.clone()


class Crossing:
    """One call of a module: where its tensors sat in the arguments and in the output, and the gradients met so far."""

    def __init__(self, point: Backward, call: int) -> None:
        self.point = point
        self.call = call
        self.inputs: Any = ()
        self.outputs: Any = None
        self.has_inputs = False
        self.grad_output: Any = None
        self.begun = False
        self.entered: Sequence[tuple[Tensor, Tensor, int]] = ()

    def begin(self, grads: Grads) -> Grads:
        """The gradients of the outputs are known: `backward_pre`."""
        value = _filled(self.outputs, grads)
        new = self._run(self.point.before, value)
        self.grad_output, self.begun = new, True
        if not self.has_inputs:
            self.finish(())
        return grads if new is value else _in_order(self.outputs, new)

    def finish(self, grads: Grads) -> Grads:
        """The gradients of the inputs are known: `backward`.

        A gradient that reached the inputs past the outputs is not the module's: in a double backward it comes from
        what the first one made of the inputs.
        """
        if not self.begun:
            return grads
        self.begun = False
        grad_output, self.grad_output = self.grad_output, None
        value = _filled(self.inputs, grads)
        new = self._run(self.point.after, value, grad_output)
        return grads if new is value else _in_order(self.inputs, new)

    def _run(self, firings: Sequence[Firing], value: Any, grad_output: Any = None) -> Any:
        for firing in firings:
            site = firing.site
            site.of_call = self.call
            if site.hook_type == "backward" and site.spec.action.observes:
                firing.op({"grad_input": value, "grad_output": grad_output})
            else:
                value = firing.op(value)
            site.of_call = None
        return value


def _numbered(value: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a value that carry a gradient, and the value with their numbers in their places, else None."""
    found = list[Tensor]()

    def number(leaf: Any) -> int | None:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return None
        found.append(leaf)
        return len(found) - 1

    return found, rebuild(value, number)


def _filled(numbers: Any, grads: Grads) -> Any:
    value = rebuild(numbers, lambda leaf: grads[leaf] if isinstance(leaf, int) else None)
    return (value,) if isinstance(value, Tensor) or value is None else value


def _in_order(numbers: Any, value: Any) -> Grads:
    if not isinstance(numbers, tuple | list | dict) and isinstance(value, tuple):
        value = value[0]
    pairs = zip(members(numbers), members(value), strict=True)
    return [leaf for number, leaf in pairs if isinstance(number, int)]


class Backward(RegisteredHook):
    """Both ends of a module's call."""

    def __init__(self, firings: Sequence[Firing] = ()) -> None:
        super().__init__(firings)
        self.before = tuple(firing for firing in firings if firing.site.hook_type == "backward_pre")
        self.after = tuple(firing for firing in firings if firing.site.hook_type == "backward")
        self.open = list[Crossing]()

    def clear(self) -> None:
        """Run nothing from now on."""
        super().clear()
        self.before, self.after = (), ()
        self.open.clear()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's forward pre-hook, registered with kwargs."""
        if not self.firings:
            return None
        if tracing():
            return in_graph(self.firings, None)  # refused
        crossing = Crossing(self, self.firings[0].site.call)
        self.open.append(crossing)
        if not self.after or not torch.is_grad_enabled():
            return None
        value = arguments(args, kwargs)
        inputs, crossing.inputs = _numbered(value)
        crossing.has_inputs = bool(inputs)
        if not inputs:
            return None
        news = _Entry.apply(crossing, *inputs)
        crossing.entered = [(old, new, new._version) for old, new in zip(inputs, news, strict=True)]
        return call_with(_exchanged(value, news))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook, called also when the forward raised."""
        if not self.open:
            return None
        crossing = self.open.pop()
        entered, crossing.entered = crossing.entered, ()
        if not torch.is_grad_enabled() or output is None:
            return None
        outputs, crossing.outputs = _numbered(output)
        if not outputs:
            self.firings[0].site.fail(no_gradient(output))
            return None
        news = _Exit.apply(crossing, *outputs)
        left = {id(old): new for old, new in zip(outputs, news, strict=True)}
        for argument, inside, version in entered:
            if inside._version != version:  # written in place: the caller's tensor has to hold that too
                argument.copy_(left.get(id(inside), inside))
        return _exchanged(output, news)


def _exchanged(value: Any, news: Sequence[Tensor]) -> Any:
    left = iter(news)
    return rebuild(
        value, lambda leaf: next(left) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
    )
