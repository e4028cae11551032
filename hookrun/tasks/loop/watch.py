"""Follows one step through every module, hook and backward function, and takes note of what first is not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hookrun.actions.base import Keeper
from hookrun.actions.stats import Measured
from hookrun.containers import tensors
from hookrun.errors import HookError
from hookrun.runtime.site import PlacedHook
from hookrun.tasks.loop.finite import not_finite

_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node of this thread gets."""


@dataclass(eq=False)
class Origin:
    """Something that was given finite values and made others of them.

    path:     of the module that it belongs to
    own:      the only parameters of the module that it computes with; None: all, and those of its submodules
    text:     what it is
    values:   the tensors that it made
    healed:   what came after it was finite again: masks of minus infinity before a softmax, for one
    is_input: nothing made it: the model was called with it
    """

    path: str
    text: str
    values: list[Tensor]
    own: frozenset[str] | None = None
    healed: bool = False
    is_input: bool = False


@dataclass(eq=False)
class _Call:
    """A call of a module under way.

    given:   the tensors that it was called with
    begins:  how many origins there were before it
    first:   the number of its first autograd node
    wrong:   what it was given is not finite
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
    """The autograd nodes that a call or a hook made, by their numbers: `first` included, `end` excluded."""

    where: str
    first: int
    end: int


@dataclass
class Watch:
    """The sink of the second run of a step, which is told of every value that a hook is given and returns.

    gradients: the origins among hooks on gradients and backward functions, in order
    """

    model: nn.Module
    gradients: list[Origin] = field(default_factory=list)
    stop: str | None = None
    wants_calls = True
    has_values = True

    def __post_init__(self) -> None:
        self._origins = list[Origin]()
        self._calls = list[_Call]()
        self._spans = list[_Span]()
        self._numbers = Counter[str]()
        self._forward = False
        self._handles = list[RemovableHandle]()
        for path, module in self.model.named_modules():
            entered = partial(self._entered, path)
            self._handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._left))

    def remove(self) -> None:
        """Watch no longer."""
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass of the model; what runs modules outside it only repeats their calls."""
        self._origins.clear()
        self._spans.clear()
        self._numbers.clear()
        self._forward = True
        try:
            yield
        finally:
            self._forward = False

    def first(self) -> Origin | None:
        """The first origin of what is not finite at the end of the forward pass."""
        return _first(self._origins)

    def first_of_backward(self) -> Origin | None:
        """The first origin among the hooks on gradients and the backward functions."""
        return _first(self.gradients)

    # ---- modules -----------------------------------------------------------------------------------------------

    def _entered(self, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """torch's forward pre-hook, before those of the experiment."""
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

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        """torch's forward hook, before those of the experiment."""
        if not self._forward:
            return
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
        """Whether what is not finite in the call has been found already."""
        return call.wrong or any(not each.healed for each in self._origins[call.begins :])

    # ---- hooks -------------------------------------------------------------------------------------------------

    def guard(self, site: PlacedHook, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op of a site; what it makes of its value is looked at."""
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

    def keeper(self, site: PlacedHook) -> Keeper:
        """Nothing is kept."""
        return lambda value, rows=None, tokens=None: None

    def emit(self, record: dict[str, Any], *, show: bool = False) -> None:
        """Nothing is recorded: the step was, at its first run."""

    def measure(self, start: tuple[Any, ...], data: Measured) -> bool:
        """Statistics are not needed here."""
        return True

    def fail(self, site: PlacedHook, what: str) -> None:
        """Raise HookError, as the run does."""
        raise HookError(f"{site.where}: {what}")

    def settle(self) -> None:
        """Nothing is pending."""

    def state_dict(self) -> dict[str, Any]:
        """A second run of a step is not gone on with."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A second run of a step is not gone on with."""

    # ---- backward ----------------------------------------------------------------------------------------------

    def follow_backward(self, loss: Tensor, name: str) -> None:
        """Look at what every function of the backward pass from this loss is given and returns.

        name: of the loss, for functions that no module made
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
        """The innermost call, or the hook, that made the node; empty where none did."""
        number = node._sequence_nr()
        around = [span for span in self._spans if span.first <= number < span.end]
        return min(around, key=lambda span: span.end - span.first).where if around else ""

    def _ran(self, node: str, maker: str, grad_inputs: Any, grad_outputs: Any) -> None:
        """torch's hook after a backward function."""
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
    """Whether a tensor is in both."""
    return any(one is other for one in some for other in others)
