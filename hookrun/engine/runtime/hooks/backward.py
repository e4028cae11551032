"""`backward_pre` and `backward`: autograd nodes before and after a module's forward.

torch's full backward hooks raise if the output is written in place, and see neither dict outputs nor keyword inputs.
These nodes take all tensors of the arguments and the output, in containers too. The module gets aliases of its
arguments, in the caller's own containers. If it writes one in place, the caller's tensor gets the new autograd history
when the call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hookrun.engine.hook_types import BACKWARD, BACKWARD_PRE, HookType
from hookrun.engine.runtime.apply_action import NOT_NESTED
from hookrun.engine.runtime.call_stack import begin_call, end_call
from hookrun.engine.runtime.compiled import tracing
from hookrun.engine.runtime.hooks.base import AroundForward, BoundHook, Shared, fire, no_gradient
from hookrun.engine.runtime.hooks.exits import preserved_version, storage, takes_nodes
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.values.containers import (
    Placed,
    arguments,
    call_with,
    exchange,
    functorch_level,
    members,
    place,
    put_back,
    rebuild,
)
from hookrun.engine.values.tensors import has_no_shape
from hookrun.errors import HookError

Grads = Sequence[Tensor | None]


class _Aliases(torch.autograd.Function):
    """Aliases of tensors; its backward passes their gradients through a function."""

    @staticmethod
    def forward(ctx: Any, through: Callable[[Grads], Grads], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.through = through
        ctx.set_materialize_grads(False)
        # on the same memory, with the same version; a view if torch forbids in-place writes of the tensor
        return tuple(tensor.detach() if takes_nodes(tensor) else tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *ctx.through(grads))


class _TakeHistory(torch.autograd.Function):
    """Gives a tensor the autograd history of an alias, as if the alias had been copied into it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, alias: Tensor) -> Tensor:
        # for views the written tensor must come first among the arguments
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return None, grad


def _take_history(tensor: Tensor, alias: Tensor) -> None:
    with preserved_version(tensor):
        _TakeHistory.apply(tensor, alias)


class BackwardCall:
    """One call of a module: the places of its tensors in the arguments and the output, and its gradients so far.

    inputs, outputs: the arguments and the output, with a number for each tensor that requires a gradient, else None
    grad_output:     the gradients of the outputs, until `finish` has used them; None: no backward pass has begun
    """

    def __init__(self, hook: Backward, site: HookSite) -> None:
        self.hook = hook
        self.number = site.call
        self.tokens = site.current.model_tokens
        self.inputs: Any = ()
        self.outputs: Any = None
        self.has_inputs = False
        self.grad_output: Any = None
        self.entered: Sequence[tuple[Tensor, Tensor]] = ()
        self.placed: Sequence[Placed] = ()
        self.handed_on: Sequence[HandedOn] = ()

    def begin(self, grads: Grads) -> Grads:
        """Run `backward_pre` hooks on the gradients of the outputs; returns the gradients to continue with."""
        for output in self.handed_on:
            output.require_one_use(grads)
        value = _filled(self.outputs, grads)
        new = self.grad_output = self._run(BACKWARD_PRE, value)
        if not self.has_inputs:
            self.finish(())
        return grads if new is value else _in_order(self.outputs, new)

    def finish(self, grads: Grads) -> Grads:
        """Run `backward` hooks on the gradients of the inputs; returns the gradients to continue with.

        Gradients that did not come through the outputs are passed on unchanged: in a double backward they come from
        uses of the inputs in the first backward.
        """
        grad_output = self.grad_output
        self.grad_output = None
        if grad_output is not None:
            value = _filled(self.inputs, grads)
            new = self._run(BACKWARD, value, grad_output)
            if new is not value:
                grads = _in_order(self.inputs, new)
        for output in self.handed_on:
            output.returned = None
            if output.number < len(grads):
                output.returned = grads[output.number]
        return grads

    def _run(self, hook_type: HookType, value: Any, grad_output: Any = None) -> Any:
        for firing in self.hook.firings:
            site = firing.site
            if site.hook_type is not hook_type:
                continue
            if hook_type is BACKWARD and site.spec.action.observes:
                seen = {"grad_input": value, "grad_output": grad_output}
                site.current.in_call(self.number, self.tokens, firing.op, seen)
            else:
                value = site.current.in_call(self.number, self.tokens, firing.op, value)
        return value


class HandedOn:
    """An output that shares its memory with an argument (Identity, Flatten) or with another output.

    If it is written in place, the tensors on the same memory get the new values, but not the new autograd history,
    because torch does not know that the memory is shared. Their gradients would differ from those without the hook, so
    the backward pass raises HookError.

    number:   the number of the input that shares its memory
    outputs:  the numbers of the outputs that share its memory
    returned: the gradient that the call returned for that input
    """

    def __init__(self, where: str, seen: Tensor, number: int, outputs: Sequence[int]) -> None:
        self.where = where
        self.number = number
        self.outputs = outputs
        self.returned: Tensor | None = None
        self._version = seen._version
        self._followed: int | None = None  # at the end of the forward, if the output itself was written
        self._counter = seen.detach()
        self._counter.data = self._counter.new_empty(0)  # shares the version, not the memory

    def require_one_use(self, grads: Grads) -> None:
        """Raise HookError if the memory was written, unless this output alone is used and the write was to it."""
        used = sum(grads[number] is not None for number in self.outputs)
        if used and (used > 1 or self._followed != self._counter._version):
            self._require_unwritten()

    def follow(self, view: Tensor, before: Node | None, version: int) -> None:
        """Note at the end of the model's forward whether the memory was written through this output."""
        if view._version != version and view.grad_fn is not before:
            self._followed = view._version

    def watch(self, argument: Tensor) -> None:
        """Make the backward pass raise HookError if the memory was written and the argument is used elsewhere too."""
        if argument.grad_fn is None:
            return
        for tensor in (argument, argument._base):
            if tensor is not None and tensor.grad_fn is not None:
                tensor.register_hook(self._require_nothing_else)

    def _require_nothing_else(self, grad: Tensor) -> None:
        returned = self.returned
        if returned is None or (grad is not returned and grad.data_ptr() != returned.data_ptr()):
            self._require_unwritten()

    def _require_unwritten(self) -> None:
        if self._counter._version != self._version:
            raise HookError(
                f"{self.where}: its output shares memory with its input or another output, and was written in place "
                "while both are used; use output_grad, or write to a clone"
            )


def _numbered(value: Any, *, distinct: bool = False) -> tuple[list[Tensor], Any]:
    """The tensors of a value that require a gradient, and the value with a number for each and None for the rest.

    distinct: a tensor that occurs several times is numbered at its first place only
    """
    numbered: list[Tensor] = []

    def number(leaf: Any) -> int | None:
        is_numbered = isinstance(leaf, Tensor) and leaf.requires_grad
        if not is_numbered or (distinct and any(leaf is other for other in numbered)):
            return None
        numbered.append(leaf)
        return len(numbered) - 1

    return numbered, rebuild(value, number)


def _filled(numbers: Any, grads: Grads) -> Any:
    value = rebuild(numbers, lambda leaf: grads[leaf] if isinstance(leaf, int) else None)
    if isinstance(value, Tensor) or value is None:
        return (value,)
    return value


def _in_order(numbers: Any, value: Any) -> Grads:
    if not isinstance(numbers, tuple | list | dict) and isinstance(value, tuple):
        value = value[0]
    pairs = zip(members(numbers), members(value), strict=True)
    return [leaf for number, leaf in pairs if isinstance(number, int)]


class Backward(AroundForward):
    """`backward_pre` and `backward` of one module.

    `backward_pre` runs when the gradients of the outputs are known, `backward` when those of the inputs are.
    """

    hook_types = (BACKWARD_PRE, BACKWARD)
    depth = 1

    def __init__(self, firings: Sequence[BoundHook], shared: Shared) -> None:
        super().__init__(firings, shared)
        shared.ending.append(firings[0].site.module)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's forward pre-hook, registered with kwargs."""
        if not self.firings:
            return None
        if tracing():
            return fire(self.firings, None)  # raises CompileError
        call = BackwardCall(self, self.firings[0].site)
        begin_call(self, call)
        if not torch.is_grad_enabled():
            return None
        value = arguments(args, kwargs)
        inputs, call.inputs = _numbered(value)
        self._require_plain(inputs)
        call.has_inputs = bool(inputs)
        if not inputs:
            return None
        aliases = _Aliases.apply(call.finish, *inputs)
        call.entered = list(zip(inputs, aliases, strict=True))
        placed: list[Placed] = []
        value = place(value, iter(aliases), placed)
        call.placed = placed
        return call_with(value)

    def abandon(self, kept: BackwardCall) -> None:
        """Put the caller's tensors back into its containers."""
        put_back(kept.placed)

    def _require_plain(self, tensors: Sequence[Tensor]) -> None:
        """HookError for tensors that no custom autograd node takes: nested, or inside a transform of `torch.func`."""
        if functorch_level() is not None:
            self.firings[0].site.fail(
                "its gradients are computed by a transform of torch.func (grad, vmap, jvp), which has no "
                "backward pass to hook; use loss.backward() or torch.autograd.grad, or leave the hook out here"
            )
        if any(map(has_no_shape, tensors)):
            self.firings[0].site.fail(NOT_NESTED)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook, called also when the forward raised."""
        if not self.firings:
            return None
        call: BackwardCall | None = end_call(self)
        if call is None:
            return None
        put_back(call.placed)
        entered = call.entered
        call.entered = call.placed = ()
        self._take_over_writes(entered)
        output = exchange(output, {id(alias): tensor for tensor, alias in entered})
        if not torch.is_grad_enabled() or output is None:
            return output
        outputs, call.outputs = _numbered(output, distinct=True)
        self._require_plain(outputs)
        if not outputs:
            self.firings[0].site.fail(no_gradient(output))
            return output
        return exchange(output, self._exits(module, call, entered, outputs))

    def _take_over_writes(self, entered: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Give the caller's tensors the autograd history of the module's in-place writes."""
        for tensor, alias in entered:
            if not _written(alias):
                continue
            memory = storage(alias)
            others = (storage(other) for _, other in entered if other is not alias)
            if memory is not None and memory in others:
                self.firings[0].site.fail(
                    "it writes an argument in place that shares its memory with another argument; give it a clone, or "
                    "use output_grad"
                )
            _take_history(tensor, alias)

    def _exits(
        self,
        module: nn.Module,
        call: BackwardCall,
        entered: Sequence[tuple[Tensor, Tensor]],
        outputs: Sequence[Tensor],
    ) -> dict[int, Tensor]:
        """id(output) -> the tensor that the caller gets instead, for the outputs that must be replaced."""
        inside = {id(tensor): alias for tensor, alias in entered if not _written(alias)}
        aliases = _Aliases.apply(call.begin, *(inside.get(id(tensor), tensor) for tensor in outputs))
        memory_of_inputs = [storage(tensor) for tensor, _ in entered]
        memory_of_outputs = [storage(tensor) for tensor in outputs]
        news: dict[int, Tensor] = {}
        handed_on: list[HandedOn] = []
        for tensor, alias, memory in zip(outputs, aliases, memory_of_outputs, strict=True):
            inputs = _places_of(memory, memory_of_inputs)
            same = _places_of(memory, memory_of_outputs)
            is_argument = any(tensor is argument for argument, _ in entered)
            is_made = not inputs or (is_argument and id(tensor) not in inside)
            if is_made and len(same) == 1 and takes_nodes(tensor) and not tensor.retains_grad:
                _take_history(tensor, alias)
                continue
            news[id(tensor)] = alias
            if not takes_nodes(tensor):
                continue  # torch refuses in-place operations on it
            number = inputs[0] if inputs else len(entered)
            shared = HandedOn(self.firings[0].site.where, alias, number, same)
            handed_on.append(shared)
            follow = partial(shared.follow, alias, alias.grad_fn, alias._version)
            self.shared.calls.at_end(module).append(follow)
            for number in inputs:
                shared.watch(entered[number][0])
        call.handed_on = handed_on
        return news


def _places_of(memory: int | None, memories: Sequence[int | None]) -> list[int]:
    """The numbers of the tensors on this memory; none if it is not known."""
    if memory is None:
        return []
    return [number for number, other in enumerate(memories) if other == memory]


def _written(alias: Tensor) -> bool:
    """Whether an alias has been written in place since it was made."""
    return alias.grad_fn is not None and not isinstance(alias.grad_fn, _Aliases._backward_cls)
