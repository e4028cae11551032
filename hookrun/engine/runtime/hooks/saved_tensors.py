"""`saved_tensors`: the tensors that autograd saves in a module's forward for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint

from hookrun.engine.actions.base import Packed
from hookrun.engine.hook_types import SAVED_TENSORS
from hookrun.engine.runtime.call_stack import OpenCall, begin_call, end_call, open_calls
from hookrun.engine.runtime.checkpointing import repeating
from hookrun.engine.runtime.compiled import tracing
from hookrun.engine.runtime.hooks.base import AroundForward, BoundHook, Shared, fire
from hookrun.engine.runtime.hooks.exits import storage
from hookrun.engine.values.host_copies import HostCopy
from hookrun.errors import HookError

Undo = Callable[[Tensor | None], Tensor | None]
Outer = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The pack and the unpack function of the `saved_tensors_hooks` that were active before ours."""


@dataclass(slots=True)
class PackedTensor:
    """A saved tensor in packed form, until the backward needs it.

    held:    the tensor, or the result of the outer pack function
    undos:   functions that restore the original, applied from the last to the first
    version: the tensor's version when it was saved, if it is held unchanged; with these hooks torch does not check it
    unpack:  the outer unpack function, or None
    """

    held: Any
    undos: list[Undo]
    version: int | None = None
    unpack: Callable[[Any], Tensor] | None = None

    def restore(self) -> Tensor:
        """The tensor that autograd saved. Raises HookError if it was modified in place since, or cannot be restored."""
        tensor: Tensor | None = self.held
        if self.unpack is not None:
            tensor = self.unpack(self.held)
        if self.version is not None and tensor is not None and tensor._version != self.version:
            raise HookError(
                f"a saved tensor of shape {list(tensor.shape)} was modified in place between forward and backward: "
                f"it is at version {tensor._version}, the backward needs version {self.version}"
            )
        for undo in reversed(self.undos):
            tensor = undo(tensor)
        if tensor is None:
            raise HookError("a saved tensor was packed without a way to restore it")
        return tensor


class Scope:
    """One call of a hooked module: tensors that are saved during it are packed by `pack`.

    torch uses the innermost pack function only, so `pack` runs the firings of all open scopes, and then the outer
    hooks: those of the user, or of activation checkpointing.

    idle:   the call recomputes an earlier one, for which the hooks have acted already
    number: of the call within the forward
    scopes: this one, after those of the calls around it
    """

    def __init__(self, hook: SavedTensors, idle: bool, call: OpenCall, around: Scope | None) -> None:
        self.hook = hook
        self.idle = idle
        self._call: OpenCall | None = call
        self.number = hook.firings[0].site.call
        self.scopes: tuple[Scope, ...] = (self,) if around is None else (*around.scopes, self)
        self._of_parameters = hook.of_parameters
        outer = _top()
        if outer is not None and around is not None and outer[0] is around.pack:
            outer = around.outer
        if outer is not None and hook.edits and getattr(outer[0], "__module__", "") == checkpoint.__name__:
            outer = None  # a tensor that an action has packed is restored without recomputation
        self.outer: Outer | None = outer
        self.pack: Callable[[Tensor], PackedTensor] = self._pack  # kept, so that it can be compared with `is`
        self._context = torch.autograd.graph.saved_tensors_hooks(self.pack, PackedTensor.restore)
        self._context.__enter__()

    @property
    def ended(self) -> bool:
        """Whether the call has ended; after an exception a call can end without its scope being closed."""
        return self._call is None or self._call.ended

    def close(self) -> None:
        """Remove our hooks from torch's stack, which itself removes the topmost pair, whichever that is.

        After an exception, another pair may be above ours: that of a checkpointed region, which torch 2.12 leaves
        there until the traceback is freed. Or a context of other code around the call has exited first and removed
        ours instead of its own, which is then the topmost one that is not ours.
        """
        above: list[Outer] = []
        top = _top()
        while top is not None and top[0] is not self.pack:
            above.append(top)
            self._context.__exit__()
            top = _top()
        if top is not None:
            self._context.__exit__()
        else:
            others = [pair for pair in above if not isinstance(getattr(pair[0], "__self__", None), Scope)]
            if others:
                above.remove(others[0])
        for pair in reversed(above):
            torch.autograd.graph.saved_tensors_hooks(*pair).__enter__()
        del self.pack, self._context, self._of_parameters, self.scopes
        # autograd refers to this object for as long as the graph lives: it must not keep the locals of the call alive
        self._call = None

    def _pack(self, saved: Tensor) -> PackedTensor:
        # an operation may save its own output, whose grad_fn would form a reference cycle with the graph
        tensor: Tensor | None = saved.detach()
        whole = tensor
        undos: list[Undo] = []
        copy: HostCopy | None = None
        is_parameter = storage(saved) in self._of_parameters()
        for scope in self.scopes:
            if scope.idle or scope.ended:
                continue
            for firing in scope.hook.firings:
                site = firing.site
                if tensor is None or (is_parameter and not site.spec.keys.parameters):
                    continue
                if copy is not None:
                    copy.wait()
                packed = site.current.in_call(scope.number, None, firing.op, tensor)
                if isinstance(packed, Packed):
                    undos.append(packed.undo)
                    tensor = packed.tensor
                    copy = packed.copy
                else:
                    tensor = packed
        if self.outer is None:
            return PackedTensor(tensor, undos, saved._version if tensor is whole else None)
        if copy is not None:
            copy.wait()
        pack, unpack = self.outer
        if tensor is None:  # activation checkpointing counts the tensors that it packs: give it a placeholder
            return PackedTensor(pack(torch.empty(0)), [*undos, lambda placeholder: None], None, unpack)
        return PackedTensor(pack(saved if tensor is whole else tensor), undos, None, unpack)


def _top() -> Outer | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _innermost() -> Scope | None:
    """The innermost open scope of this thread, of any installation."""
    for call in reversed(open_calls()):
        for kept in reversed(call.kept.values()):
            if isinstance(kept, Scope):
                return kept
    return None


def _storages(shared: Shared) -> Callable[[], set[int | None]]:
    """Finds the storages of the model's parameters, with those that hooks added; once, if none is lazy or elsewhere."""

    def storages() -> set[int | None]:
        if shared.storages:
            return shared.storages
        parameters = list(shared.model.parameters())
        present = {storage(parameter) for parameter in parameters if not is_lazy(parameter)}
        if not any(is_lazy(parameter) or parameter.is_meta for parameter in parameters):
            shared.storages = present
        return present

    return storages


class SavedTensors(AroundForward):
    """Opens a scope right before a module's forward, since tensors that other hooks save are not the module's.

    edits: an action may pack tensors in another form
    """

    hook_types = (SAVED_TENSORS,)
    depth = 4

    def __init__(self, firings: Sequence[BoundHook], shared: Shared) -> None:
        super().__init__(firings, shared)
        self.of_parameters = _storages(shared)
        self.edits = any(not firing.site.spec.action.observes for firing in firings)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch's forward pre-hook, registered with kwargs."""
        if tracing():
            fire(self.firings, None)  # raises CompileError
        if not self.firings:
            return
        again = repeating()
        # Non-reentrant recomputation: the backward uses the tensors that were packed in the first forward. Tensors that
        # an action packed there were hidden from checkpointing, so they must be hidden in the recomputation too.
        idle = again is not None and again.keeps_graph
        if idle and not self.edits:
            return
        call = begin_call(self)
        call.kept[self] = Scope(self, idle, call, _innermost())

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """torch's forward hook, called also when the forward raised."""
        scope: Scope | None = end_call(self)
        if scope is not None:
            scope.close()

    def abandon(self, kept: Scope) -> None:
        """Close the scope."""
        kept.close()
