"""Follows a step through every module, hook and backward function, and records where values become non-finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hookrun.containers import tensors
from hookrun.runtime.site import HookSite, Sink
from hookrun.tasks.loop.finite import not_finite

_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the sequence number of this thread's next autograd node."""


@dataclass(eq=False)
class Origin:
    """A module call, hook or backward function that returned non-finite values for finite ones.

    path:     the path of its module
    text:     its description
    values:   the tensors that it returned
    own:      the module's parameters that it uses; None: all, with those of its submodules
    healed:   a later result was finite again, as after a softmax of scores that are masked with minus infinity
    is_input: the values are inputs of the model instead
    """

    path: str
    text: str
    values: list[Tensor]
    own: frozenset[str] | None = None
    healed: bool = False
    is_input: bool = False


@dataclass(eq=False)
class _Call:
    """A call of a module that has not returned yet.

    kind:    the class of the module
    number:  the number of the call among those of the module
    given:   the tensors among its arguments
    begins:  the number of origins before the call
    first:   the sequence number of its first autograd node
    wrong:   whether its arguments are not finite
    """

    path: str
    kind: str
    number: int
    given: list[Tensor]
    begins: int
    first: int
    wrong: bool

    @property
    def where(self) -> str:
        return f"{self.path or '(root)'} ({self.kind}), call {self.number}"


@dataclass(frozen=True)
class _Span:
    """The sequence numbers of the autograd nodes that a call or a hook created: from `first` to `end`, exclusive."""

    where: str
    first: int
    end: int


@dataclass
class Watch(Sink):
    """The record sink for the repetition of a step; it checks all inputs and outputs of modules and hooks.

    gradients: the origins among hooks on gradients and backward functions, in order of their calls
    """

    model: nn.Module
    gradients: list[Origin] = field(default_factory=list)
    wants_calls = True

    def __post_init__(self) -> None:
        self._origins = list[Origin]()
        self._calls = list[_Call]()
        self._spans = list[_Span]()
        self._numbers = Counter[str]()
        self._forward = False
        self._handles = list[RemovableHandle]()
        for path, module in self.model.named_modules():
            entered, left = partial(self._entered, path), partial(self._left, path)
            self._handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
            self._handles.append(module.register_forward_hook(left))

    def remove(self) -> None:
        """Remove the hooks of this object."""
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A block for a forward pass of the model. Module calls outside the block, as by checkpointing, are ignored."""
        self._origins.clear()
        self._calls.clear()
        self._spans.clear()
        self._numbers.clear()
        self._forward = True
        try:
            yield
        finally:
            self._forward = False

    def first(self) -> Origin | None:
        """The first origin of non-finite values in the forward pass; None if there is none."""
        return _first(self._origins)

    def first_of_backward(self) -> Origin | None:
        """The first origin among hooks on gradients and backward functions; None if there is none."""
        return _first(self.gradients)

    # ---- modules -----------------------------------------------------------------------------------------------

    def _entered(self, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """torch's forward pre-hook, which runs before those of the experiment."""
        if not self._forward:
            return
        given = list(tensors([list(args), list(kwargs.values())]))
        bad, kind = not_finite(given), type(module).__name__
        if bad and not self._calls:
            self._origins.append(Origin(path, bad, given, is_input=True))
        elif bad and not self._tainted(self._calls[-1]):
            around = self._calls[-1]
            text = f"first made by the forward of {around.where}, itself, before it calls {path}: {bad}"
            self._origins.append(Origin(around.path, text, given))
        begins, number = len(self._origins), self._numbers[path]
        self._numbers[path] += 1
        self._calls.append(_Call(path, kind, number, given, begins, _sequence_number(), bool(bad)))

    def _left(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """torch's forward hook, which runs before those of the experiment."""
        if not self._forward:
            return
        if all(each.path != path for each in self._calls):  # modules run side by side in several threads
            return
        while self._calls[-1].path != path:  # calls that ended by an exception, which the model has caught
            self._calls.pop()
        call = self._calls.pop()
        self._spans.append(_Span(call.where, call.first, _sequence_number()))
        made = list(tensors(output))
        if bad := not_finite(made):
            if not self._tainted(call):
                itself = ", itself, outside its submodules" if list(module.children()) else ""
                text = f"first made by the forward of {call.where}{itself}, from finite inputs: {bad}"
                self._origins.append(Origin(call.path, text, made))
            return
        for number, origin in enumerate(self._origins):
            if number >= call.begins or _shares(origin.values, call.given):
                origin.healed = True

    def _tainted(self, call: _Call) -> bool:
        """Whether the origin of non-finite values in the call is known already."""
        return call.wrong or any(not each.healed for each in self._origins[call.begins :])

    # ---- hooks -------------------------------------------------------------------------------------------------

    def guard(self, site: HookSite, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op of a site, with a check of its argument and result."""
        forward = site.hook_type.phase == "forward" and not site.hook_type.until_backward
        added = site.spec.action.adds(site.hook_name)

        def watched(value: Any) -> Any:
            first, before = _sequence_number(), not_finite(value)
            new = op(value)
            at = f", call {site.call}" if site.hook_type.on == "module" else ""
            where = f"{site.where}{at}"
            if forward and self._forward:
                self._spans.append(_Span(where, first, _sequence_number()))
            after = not_finite(new)
            if after and not before:
                text = f"first made by {where}, from finite values: {after}"
                own = frozenset([added] if added is not None else [])
                origin = Origin(site.path, text, list(tensors(new)), own)
                if not forward:
                    self.gradients.append(origin)
                elif self._forward:
                    self._origins.append(origin)
            elif before and not after and forward:
                for each in self._origins:
                    each.healed |= _shares(each.values, list(tensors(value)))
                if self._calls and self._calls[-1].path == site.path:  # its arguments
                    self._calls[-1].wrong = False
            return new

        return watched

    # ---- backward ----------------------------------------------------------------------------------------------

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
        around = [span for span in self._spans if span.first <= number < span.end]
        return min(around, key=lambda span: span.end - span.first).where if around else ""

    def _ran(self, node: str, maker: str, grad_inputs: Any, grad_outputs: Any) -> None:
        """torch's hook on an autograd node, called after its backward function."""
        bad, given = not_finite(grad_inputs), not_finite(grad_outputs)
        if given and not bad and any(True for _ in tensors(grad_inputs)):
            for each in self.gradients:
                each.healed |= _shares(each.values, list(tensors(grad_outputs)))
        if bad and not given:
            text = f"first made by the backward of {maker} ({node}), from a finite gradient: {bad}"
            self.gradients.append(Origin("", text, list(tensors(grad_inputs))))


def _first(origins: list[Origin]) -> Origin | None:
    there = (each for each in origins if not each.healed)
    return next(there, origins[0] if origins else None)


def _shares(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether some tensor is in both lists."""
    return any(one is other for one in some for other in others)
