"""`backward_pre` and `backward`: autograd nodes around a module's call.

torch's full backward hooks raise where the output is written in place, and see neither dict outputs nor keyword
inputs. These nodes hand copy-on-write clones on instead of views, so in-place operations on either side are allowed,
and take every tensor of the arguments and the output, wherever it sits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.containers import arguments, call_with, members, rebuild
from hookrun.hook_types import BACKWARD, BACKWARD_PRE
from hookrun.runtime.compiled import tracing
from hookrun.runtime.hooks.base import Firing, ModuleHook, Shared, in_graph, no_gradient
from hookrun.tensor_copies import clone, functorch_level

Grads = Sequence[Tensor | None]


class _Inputs(torch.autograd.Function):
    """The identity on a module's inputs; its backward is the end of the module's own."""

    @staticmethod
    def forward(ctx: Any, call: BackwardCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(map(clone, inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *ctx.call.finish(grads))


class _Outputs(torch.autograd.Function):
    """The identity on a module's outputs; its backward is the beginning of the module's own."""

    @staticmethod
    def forward(ctx: Any, call: BackwardCall, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(map(clone, outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *ctx.call.begin(grads))


class BackwardCall:
    """One call of a module: where its tensors sat in the arguments and in the output, and the gradients met so far."""

    def __init__(self, hook: Backward, number: int) -> None:
        self.hook = hook
        self.number = number
        self.inputs: Any = ()
        self.outputs: Any = None
        self.has_inputs = False
        self.grad_output: Any = None
        self.begun = False
        self.entered: Sequence[tuple[Tensor, Tensor, int]] = ()

    def begin(self, grads: Grads) -> Grads:
        """The gradients of the outputs are known: `backward_pre`."""
        value = _filled(self.outputs, grads)
        new = self._run(self.hook.pre_firings, value)
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
        new = self._run(self.hook.full_firings, value, grad_output)
        return grads if new is value else _in_order(self.inputs, new)

    def _run(self, firings: Sequence[Firing], value: Any, grad_output: Any = None) -> Any:
        for firing in firings:
            site = firing.site
            site.of_call = self.number
            if site.hook_type is BACKWARD and site.spec.action.observes:
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


class Backward(ModuleHook):
    """Both ends of a module's call.

    pre_firings:  of `backward_pre`, when the gradients of the outputs are known
    full_firings: of `backward`, when those of the inputs are
    open: the calls under way
    """

    hook_types = (BACKWARD_PRE, BACKWARD)
    depth = 1

    def __init__(self, firings: Sequence[Firing] = (), shared: Shared | None = None) -> None:
        super().__init__(firings)
        self.pre_firings = tuple(firing for firing in firings if firing.site.hook_type is BACKWARD_PRE)
        self.full_firings = tuple(firing for firing in firings if firing.site.hook_type is BACKWARD)
        self.open = list[BackwardCall]()

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """With keyword arguments, whose gradients count too."""
        yield module.register_forward_pre_hook(self.enter, with_kwargs=True)

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Also where the forward raised, so that no call stays open."""
        yield module.register_forward_hook(self.leave, always_call=True)

    def clear(self) -> None:
        """Run nothing from now on."""
        super().clear()
        self.pre_firings, self.full_firings = (), ()
        self.open.clear()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's forward pre-hook, registered with kwargs."""
        if not self.firings:
            return None
        if tracing():
            return in_graph(self.firings, None)  # refused
        call = BackwardCall(self, self.firings[0].site.call)
        self.open.append(call)
        if not self.full_firings or not torch.is_grad_enabled():
            return None
        self._refuse_func()
        value = arguments(args, kwargs)
        inputs, call.inputs = _numbered(value)
        call.has_inputs = bool(inputs)
        if not inputs:
            return None
        news = _Inputs.apply(call, *inputs)
        call.entered = [(old, new, new._version) for old, new in zip(inputs, news, strict=True)]
        return call_with(_exchanged(value, news))

    def _refuse_func(self) -> None:
        """A transform of `torch.func` computes gradients without autograd's nodes, which these hooks are."""
        if functorch_level() is not None:
            self.firings[0].site.fail(
                "its gradients are computed by a transform of torch.func (grad, vmap, jvp), which has no "
                "backward pass to hook; use loss.backward() or torch.autograd.grad, or leave the hook out here"
            )

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook, called also when the forward raised."""
        if not self.open:
            return None
        call = self.open.pop()
        entered, call.entered = call.entered, ()
        if not torch.is_grad_enabled() or output is None:
            return None
        self._refuse_func()
        outputs, call.outputs = _numbered(output)
        if not outputs:
            self.firings[0].site.fail(no_gradient(output))
            return None
        news = _Outputs.apply(call, *outputs)
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
