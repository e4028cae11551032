"""`saved_tensors`: what autograd keeps from a module's forward for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import local
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from hookrun.actions.base import Packed
from hookrun.errors import HookError
from hookrun.hook_types import SAVED_TENSORS
from hookrun.runtime.checkpointing import repeating
from hookrun.runtime.compiled import tracing
from hookrun.runtime.hooks.base import Firing, ModuleHook, Shared, in_graph
from hookrun.runtime.module_calls import call_frame, finished

Undo = Callable[[Tensor | None], Tensor | None]
Outer = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The pack and the unpack function of `saved_tensors_hooks` that were in force before ours."""


class PackedTensor:
    """A saved tensor, in whichever form, until the backward asks for it.

    held:    the tensor, or what the outer hooks made of it
    undos:   how to get the original back from it, those that were packed last undone first
    version: of the tensor when it was saved, where the graph holds the tensor itself; torch does not check it here
    unpack:  of the outer hooks, if there are any
    """

    __slots__ = ("held", "undos", "unpack", "version")

    def __init__(
        self,
        held: Any,
        undos: list[Undo],
        version: int | None = None,
        unpack: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.held = held
        self.undos = undos
        self.version = version
        self.unpack = unpack

    def restore(self) -> Tensor:
        """The tensor that autograd saved."""
        tensor: Tensor | None = self.held if self.unpack is None else self.unpack(self.held)
        if self.version is not None and tensor is not None and tensor._version != self.version:
            raise HookError(
                f"a saved tensor of shape {list(tensor.shape)} was modified in place between forward and backward: "
                f"it is at version {tensor._version}, the backward needs version {self.version}"
            )
        for undo in reversed(self.undos):
            tensor = undo(tensor)
        if tensor is None:
            raise HookError("a saved tensor was packed away and nothing says how to get it back")
        return tensor


class Scope:
    """One call of a hooked module: what is saved in it, and in the calls inside it, is packed through `pack`.

    torch packs through the innermost scope only, so that one runs the firings of those around it too, and after them
    the outer hooks: those of the user, or of activation checkpointing.

    idle:  the call repeats an earlier one, which has acted already
    frame: of the call
    call:  its number within the forward
    """

    def __init__(
        self, hook: SavedTensors, idle: bool, frame: FrameType, parent: Scope | None, parameters: Parameters
    ) -> None:
        self.hook = hook
        self.idle = idle
        self.frame: FrameType | None = frame
        self.call = hook.firings[0].site.call
        self._parent = parent
        self._parameters = parameters
        top = _top()
        ours = parent is not None and top is not None and top[0] is parent.pack
        self.outer: Outer | None = parent.outer if ours and parent is not None else top
        if hook.edits and self.outer is not None and _of_checkpoint(self.outer):
            self.outer = None  # what an action puts away needs no second forward to come back
        self._below = top
        self.pack: Callable[[Tensor], PackedTensor] = self._pack  # one object, to be found again
        self._context = torch.autograd.graph.saved_tensors_hooks(self.pack, PackedTensor.restore)
        self._context.__enter__()

    @property
    def ended(self) -> bool:
        """Whether the call has ended; without the scope being closed where an exception interrupted it."""
        return self.frame is None or finished(self.frame)

    def close(self) -> None:
        """Take the hooks off torch's stack.

        Where the call was interrupted, the user's own `saved_tensors_hooks` around it has ended before this, and has
        taken ours off in the place of its own, since torch takes off the topmost: then its own are left there.
        """
        top = _top()
        if top is not None and (
            top[0] is self.pack or (self._below is not None and top[0] is self._below[0])
        ):
            self._context.__exit__()
        del self.pack, self._context
        self.frame = self._parent = (
            None  # autograd keeps this object with what was saved, the frame would keep that
        )

    def _around(self) -> list[Scope]:
        """This scope and those around it whose calls are under way, the outermost first."""
        found, scope = list[Scope](), cast("Scope | None", self)
        while scope is not None:
            if not scope.idle and not scope.ended:
                found.append(scope)
            scope = scope._parent
        return found[::-1]

    def _pack(self, saved: Tensor) -> PackedTensor:
        # what an operation saves of its own output leads back to the graph that holds it
        tensor: Tensor | None = saved.detach()
        whole, undos = tensor, list[Undo]()
        is_parameter = _storage(saved) in self._parameters.storages
        for scope in self._around():
            for firing in scope.hook.firings:
                site = firing.site
                if tensor is None or (is_parameter and not site.spec.keys.parameters):
                    continue
                site.of_call = scope.call
                try:
                    packed = firing.op(tensor)
                finally:
                    site.of_call = None
                if isinstance(packed, Packed):
                    undos.append(packed.undo)
                    tensor = packed.tensor
                else:
                    tensor = packed
        if self.outer is None:
            return PackedTensor(tensor, undos, saved._version if tensor is whole else None)
        pack, unpack = self.outer
        if tensor is None:  # activation checkpointing counts what it is given
            return PackedTensor(pack(torch.empty(0)), [*undos, _dropped], None, unpack)
        return PackedTensor(pack(saved if tensor is whole else tensor), undos, None, unpack)


def _top() -> Outer | None:
    top: Outer | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top


def _of_checkpoint(hooks: Outer) -> bool:
    return getattr(hooks[0], "__module__", None) == checkpoint.__name__


class Parameters:
    """The storages of a model's parameters, those added by hooks included."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: set[int] | None = None

    @property
    def storages(self) -> set[int]:
        """By identity; known once no parameter is lazy any more."""
        if self._known is not None:
            return self._known
        parameters = list(self._model.parameters())
        storages = {_storage(parameter) for parameter in parameters if not is_lazy(parameter)}
        if not any(map(is_lazy, parameters)):
            self._known = storages
        return storages


class _Open(local):
    """The open scopes of one thread, the innermost last."""

    def __init__(self) -> None:
        self.scopes = list[Scope]()


_open = _Open()


class Scopes:
    """Opens and closes the scopes of one installation, among those of all installations."""

    def __init__(self, shared: Shared) -> None:
        self._parameters = Parameters(shared.model)
        shared.closing.callback(self.close_all)

    def open(self, hook: SavedTensors, idle: bool) -> None:
        """A hooked module's forward begins."""
        scopes = _open.scopes
        while scopes and scopes[-1].ended:  # interrupted by an exception that torch runs no hook for
            scopes.pop().close()
        scopes.append(Scope(hook, idle, call_frame(), scopes[-1] if scopes else None, self._parameters))

    def close(self) -> None:
        """A hooked module's forward has ended, and with it what else is open of this call or inside it."""
        scopes, frame = _open.scopes, call_frame()
        while any(scope.frame is frame for scope in scopes):
            scopes.pop().close()

    def close_all(self) -> None:
        """Close what an interruption left open."""
        scopes = _open.scopes
        while scopes and (not scopes[-1].hook.firings or scopes[-1].ended):
            scopes.pop().close()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _dropped(placeholder: Tensor | None) -> None:
    """What stood for a tensor that is kept elsewhere is not needed."""


class SavedTensors(ModuleHook):
    """Opens and closes a module's scope.

    edits: an action may put tensors away in another form
    """

    hook_types = (SAVED_TENSORS,)
    depth = 3

    def __init__(self, firings: Sequence[Firing] = (), shared: Shared | None = None) -> None:
        super().__init__(firings)
        self.scopes = shared.once(Scopes) if shared is not None else None
        self.edits = any(not firing.site.spec.action.observes for firing in firings)

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Right before the forward: what other hooks compute is not the module's."""
        yield module.register_forward_pre_hook(self.enter)

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Also where the forward raised."""
        yield module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook."""
        if tracing():
            in_graph(self.firings, None)  # refused
        if self.scopes is None or not self.firings:
            return
        again = repeating()
        # Non-reentrant recomputation: the backward uses the tensors that were packed in the first forward, and those
        # that an action put away there are not among the ones that checkpointing counts.
        idle = again is not None and again.keeps_graph
        if not idle or self.edits:
            self.scopes.open(self, idle)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """torch's forward hook, called also when the forward raised."""
        if self.scopes is not None:
            self.scopes.close()
