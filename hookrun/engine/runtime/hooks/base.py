"""Base classes of the objects that PyTorch calls: one for all hooks of a type on a module, parameter or optimizers."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.engine.discovery import own_subclasses, taken
from hookrun.engine.hook_types import HOOK_TYPES, HookType
from hookrun.engine.runtime.apply_action import Op, SiteRunner
from hookrun.engine.runtime.call_stack import CallStack, forget
from hookrun.engine.runtime.checkpointing import NO_BACKWARD, graph_task, repeating
from hookrun.engine.runtime.compiled import tracing
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.values.containers import tensors
from hookrun.errors import spec_error

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class BoundHook:
    """A site with its effect on a value, schedule included.

    op:     value -> value
    traced: the same inside a compiled graph, see `in_graph_of`
    runner: that of the site; None: something else takes its place
    """

    site: HookSite
    op: Op
    traced: Op
    runner: SiteRunner | None = None

    def op_of_new(self) -> Op | None:
        """A faster `op`, see `SiteRunner.op_of_new`; None: there is none."""
        return None if self.runner is None else self.runner.op_of_new()

    def repeat(self, value: Any) -> Any:
        """Edit the value as in the call that is being recomputed; nothing is counted or recorded again."""
        if self.site.spec.action.observes:
            return value
        with self.site.uncounted():
            return self.op(value)


@dataclass
class Shared:
    """State that all registered hooks of one installation share.

    calls:   the open calls of the model's modules
    closing: the callbacks to run when the hooks are removed
    ending:  modules whose hooks need the end of the forward that their calls belong to
    storages: those of the model's parameters, when they are known
    """

    model: nn.Module
    calls: CallStack
    closing: ExitStack = field(default_factory=ExitStack)
    ending: list[nn.Module] = field(default_factory=list)
    storages: set[int | None] = field(default_factory=set)


class RegisteredHook:
    """Base of the objects whose bound methods are registered with PyTorch as hooks.

    A deep copy or a pickle of a hooked model has an empty copy of this object: the copied model is not hooked and never
    writes into the original's records. Removing the hooks empties the object, so that autograd graphs that still refer
    to it run nothing. An empty object has no attributes but those of its class; the methods that torch calls do nothing
    without firings.

    hook_types:   those that the class implements
    reads_arguments: an action needs the arguments of the module call, where the hook type has them
    """

    hook_types: ClassVar[Sequence[HookType]] = ()
    firings: Sequence[BoundHook] = ()
    reads_arguments = False

    def __init__(self, firings: Sequence[BoundHook], shared: Shared) -> None:
        self.firings = tuple(firings)
        self.shared = shared
        self.reads_arguments = any([firing.site.reads_arguments for firing in firings])

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (type(self),)  # for copies too

    def clear(self) -> None:
        """Drop all firings, and what is kept for open calls: the object does nothing from now on."""
        forget(self)
        vars(self).clear()

    def abandon(self, kept: Any) -> None:
        """Give up what was kept for a call: KeyboardInterrupt or SystemExit has ended it, or the hooks are removed."""


@cache
def registered_hooks() -> Mapping[HookType, type[RegisteredHook]]:
    """Hook type -> the class that registers it: each class of this package or of an extension that has `hook_types`.

    Raises SpecError for a hook type without a class, and for one with two.
    """
    registered: dict[HookType, type[RegisteredHook]] = {}
    for item in own_subclasses(sys.modules[__package__], RegisteredHook):
        for kind in vars(item).get("hook_types", ()):
            if registered.setdefault(kind, item) is not item:
                raise taken(item, kind.name, registered[kind])
    for name, kind in HOOK_TYPES.items():
        if kind not in registered:
            raise spec_error(
                f"hook type {name}",
                "no class registers it",
                "name it in `hook_types` of a ModuleHook or ParameterHook, in a module of `hookrun.extensions`",
            )
    return MappingProxyType(registered)


class _Listener(RegisteredHook):
    """Calls a function at calls of a module, and while torch.compile traces it another one, without arguments."""

    function: Callable[..., object] | None = None
    traced: Callable[[], object] | None = None

    def __init__(self, function: Callable[..., object], traced: Callable[[], object] | None) -> None:
        self.function = function
        self.traced = traced

    def note(self, *args: Any) -> None:
        """torch's forward hook or forward pre-hook."""
        if tracing():
            if self.traced is not None:
                self.traced()
        elif self.function is not None:
            self.function(*args)


def listen(
    module: nn.Module,
    function: Callable[..., object],
    *,
    after: bool = False,
    traced: Callable[[], object] | None = None,
    **options: bool,
) -> RemovableHandle:
    """Register a function that reads calls and changes nothing; it gets what torch gives such a hook.

    after:  it runs after the forward, not before it
    traced: called instead while torch.compile traces the module, see `while_tracing`
    """
    # a TorchScript module has the dictionaries of hooks, and refuses the methods
    register = nn.Module.register_forward_hook if after else nn.Module.register_forward_pre_hook
    return register(module, _Listener(function, traced).note, **options)


class ModuleHook(RegisteredHook):
    """Base of the hooks that are registered on a module.

    depth: the order among them: an outer hook (0) runs first before the forward and last after it, so that it sees the
           effects of the inner ones
    """

    depth: ClassVar[int]

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register the hooks that run before the module's forward."""
        return ()

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register the hooks that run after the module's forward."""
        return ()

    def call_directly(self, module: nn.Module, number: int) -> object | None:
        """Start direct calls of the module, if the hook with this number reads only the output; see `direct_calls`."""
        return None


class AroundForward(ModuleHook):
    """Base of the hooks that begin something before a module's forward and end it afterwards."""

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that gets keyword arguments too."""
        yield nn.Module.register_forward_pre_hook(module, self.enter, with_kwargs=True)

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that is also called when the forward raised, so that no call stays open."""
        yield nn.Module.register_forward_hook(module, self.leave, always_call=True)

    @abstractmethod
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's forward pre-hook, registered with kwargs."""

    @abstractmethod
    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook, called also when the forward raised."""


class ParameterHook(RegisteredHook):
    """Base of the hooks that are registered on a parameter.

    before_accumulation: it sees the gradient of each micro-batch before it is added to `parameter.grad`
    waits: called for each gradient; True: the gradient is only this rank's part, and `reduced` will be called when the
           gradient has been summed over the ranks; None: gradients are always whole
    """

    before_accumulation: ClassVar[bool] = False
    waits: Callable[[], bool] | None = None

    @abstractmethod
    def register(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register the hook on the parameter."""

    @abstractmethod
    def reduced(self, parameter: nn.Parameter) -> None:
        """Act on `parameter.grad`, which has been summed over all ranks."""


def fire(firings: Sequence[BoundHook], value: Any) -> Any:
    """Run the firings of a module call, which torch.compile may be tracing, or a backward pass may be recomputing."""
    if tracing():
        for firing in firings:
            value = firing.traced(value)
        return value
    if graph_task() != NO_BACKWARD and repeating() is not None:
        for firing in firings:
            value = firing.repeat(value)
        return value
    for firing in firings:
        value = firing.op(value)
    return value


def no_gradient(output: Any) -> str:
    """Why a gradient hook cannot see a gradient of this output, although autograd is enabled."""
    if not any(True for _ in tensors(output)):
        return f"its output is a {type(output).__name__} without tensors and carries no gradient"
    return "its output carries no gradient: neither its input nor its parameters require one"


def write(tensor: Tensor, new: Any) -> None:
    """Copy a new value into a gradient or parameter in place, since its storage may be shared (DDP's buckets)."""
    if new is not tensor:
        with torch.no_grad():
            tensor.copy_(new)
