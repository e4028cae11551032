"""What PyTorch calls: one object for all hooks of a type on a module, a parameter or the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.containers import tensors
from hookrun.direct_calls import Direct
from hookrun.hook_types import HookType
from hookrun.runtime.apply_action import Op
from hookrun.runtime.checkpointing import repeating
from hookrun.runtime.clock import Clock
from hookrun.runtime.compiled import InGraph
from hookrun.runtime.in_parts import Into
from hookrun.runtime.site import PlacedHook

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Firing:
    """A site and everything that it does to a value, its schedule included.

    traced: the same inside a compiled graph
    op_of_new: the same as `op`, faster, for what a module has just made, or for what a tensor hook is given; or None
    pointwise: what it writes for any part of a tensor that it acts on the whole of, its schedule left out; or None
    is_open:   whether its schedule holds now; None: always
    """

    site: PlacedHook
    op: Op
    traced: InGraph
    pointwise: Into | None = None
    is_open: Callable[[], bool] | None = None
    op_of_new: Op | None = None

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


@dataclass
class Shared:
    """What all registered hooks of one installation share.

    closing: what is to be done when the hooks are removed
    """

    model: nn.Module
    clock: Clock
    closing: ExitStack = field(default_factory=ExitStack)
    _made: dict[Any, Any] = field(default_factory=dict)

    def once(self, make: Callable[[Shared], T]) -> T:
        """What `make` returns, made at the first call."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made


class RegisteredHook:
    """Base of what is registered with PyTorch, as a bound method.

    A deep copy or a pickle of a hooked model carries a copy of this object that runs nothing: the copy is not hooked,
    and never writes into the original's records. Removal empties the object, so that what autograd graphs still hold
    of it has no effect.

    hook_types:   those that the class is registered for
    finds_target: it resolves `target` itself, since it is attached to that tensor alone
    """

    hook_types: ClassVar[Sequence[HookType]] = ()
    finds_target: ClassVar[bool] = False

    def __init__(self, firings: Sequence[Firing] = (), shared: Shared | None = None) -> None:
        self.firings = tuple(firings)
        self.ops = tuple(firing.op for firing in firings)

    @classmethod
    def of(cls, firings: Sequence[Firing], shared: Shared) -> Self:
        """The object for these firings, in their order."""
        return cls(firings, shared)

    def __deepcopy__(self, memo: object) -> RegisteredHook:
        return type(self)()

    def __reduce__(self) -> tuple[type[RegisteredHook], tuple[()]]:
        return type(self), ()

    def clear(self) -> None:
        """Run nothing from now on."""
        self.firings, self.ops = (), ()


class ModuleHook(RegisteredHook):
    """Base of what is registered on a module.

    depth: an outer hook (0) is registered first before the forward and last after it, so that it sees the module with
           what the inner ones do to it
    """

    depth: ClassVar[int]

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register what runs before the module's forward."""
        return ()

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register what runs after the module's forward."""
        return ()

    def direct(self, module: nn.Module) -> Direct | None:
        """What a direct call does, where it is a forward hook that reads nothing but the output; or None."""
        return None


class ParameterHook(RegisteredHook):
    """Base of what is registered on a parameter.

    before_accumulation: it sees the gradient of each micro-batch, before that is added to those before
    waits: asked at each gradient: whether it is this rank's part of one, and `reduced` is called once it is whole
    """

    before_accumulation: ClassVar[bool] = False
    waits: Callable[[], bool] | None = None

    def register(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register it."""
        raise TypeError(f"{type(self).__name__} does not say how it is registered")

    def reduced(self, parameter: nn.Parameter) -> None:
        """The parameter's gradient is summed over all ranks: do what a registered hook does."""
        raise TypeError(f"{type(self).__name__} does not say what it does to a gradient of several ranks")


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


def no_gradient(output: Any) -> str:
    """Why a gradient hook cannot see anything of an output, although gradients are on."""
    if not any(True for _ in tensors(output)):
        return f"its output is a {type(output).__name__} without tensors and carries no gradient"
    return "its output carries no gradient: neither its input nor its parameters require one"


def write(tensor: Tensor, new: Any) -> None:
    """Put a new value into a gradient or parameter, whose storage others may share (gradient buckets, for one)."""
    if new is not tensor:
        with torch.no_grad():
            tensor.copy_(new)
