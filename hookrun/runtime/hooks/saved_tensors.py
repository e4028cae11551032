"""`saved_tensors`: what autograd keeps from a module's forward for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from hookrun.actions.base import Packed
from hookrun.errors import HookError
from hookrun.hook_types import SAVED_TENSORS
from hookrun.runtime.checkpointing import repeating
from hookrun.runtime.compiled import tracing
from hookrun.runtime.hooks.base import Firing, ModuleHook, Shared, in_graph

Undo = Callable[[Tensor | None], Tensor]


class PackedTensor:
    """A saved tensor, in whichever form, until the backward asks for it.

    version: of the tensor when it was saved, where the graph holds the tensor itself; torch does not check it here
    """

    __slots__ = ("tensor", "undos", "version")

    def __init__(self, tensor: Tensor | None, undos: list[Undo], version: int | None) -> None:
        self.tensor = tensor
        self.undos = undos
        self.version = version

    def restore(self) -> Tensor:
        """The tensor that autograd saved."""
        tensor = self.tensor
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


class Scopes:
    """The modules whose forward is under way; torch packs through the innermost scope only, so it runs them all."""

    def __init__(self, shared: Shared) -> None:
        self._model = shared.model
        shared.closing.callback(self.close_all)
        self._known: set[int] | None = None
        self._open = list[tuple[SavedTensors, Sequence[Firing], Any]]()

    @property
    def _parameters(self) -> set[int]:
        """The storages of the model's parameters, those added by hooks included; known once none is lazy any more."""
        if self._known is not None:
            return self._known
        parameters = list(self._model.parameters())
        storages = {_storage(parameter) for parameter in parameters if not is_lazy(parameter)}
        if not any(map(is_lazy, parameters)):
            self._known = storages
        return storages

    def open(self, hook: SavedTensors, firings: Sequence[Firing]) -> None:
        """A hooked module's forward begins."""
        context = torch.autograd.graph.saved_tensors_hooks(self._pack, PackedTensor.restore)
        context.__enter__()
        self._open.append((hook, firings, context))

    def close(self, hook: SavedTensors) -> None:
        """A hooked module's forward has ended, and with it those of modules inside that were interrupted."""
        if any(each is hook for each, _, _ in self._open):
            while self._close_innermost() is not hook:
                pass

    def close_all(self) -> None:
        """Close what an interruption left open."""
        while self._open:
            self._close_innermost()

    def _close_innermost(self) -> SavedTensors:
        hook, _, context = self._open.pop()
        context.__exit__()
        return hook

    def _pack(self, saved: Tensor) -> PackedTensor:
        whole = (
            saved.detach()
        )  # what an operation saves of its own output leads back to the graph that holds it
        tensor: Tensor | None = whole
        undos = list[Undo]()
        is_parameter = _storage(saved) in self._parameters
        for _, firings, _ in self._open:
            for firing in firings:
                keys = firing.site.spec.keys
                if tensor is None or (is_parameter and not keys.parameters):
                    continue
                packed = firing.op(tensor)
                if isinstance(packed, Packed):
                    undos.append(packed.undo)
                    tensor = packed.tensor
                else:
                    tensor = packed
        return PackedTensor(tensor, undos, whole._version if tensor is whole else None)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class SavedTensors(ModuleHook):
    """Opens and closes a module's scope."""

    hook_types = (SAVED_TENSORS,)
    depth = 3

    def __init__(self, firings: Sequence[Firing] = (), shared: Shared | None = None) -> None:
        super().__init__(firings)
        self.scopes = shared.once(Scopes) if shared is not None else None

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
        if self.scopes is not None and self.ops:
            again = repeating()
            # Non-reentrant recomputation: the backward uses the tensors that were packed in the first forward.
            idle = again is not None and again.keeps_graph
            self.scopes.open(self, () if idle else self.firings)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """torch's forward hook, called also when the forward raised."""
        if self.scopes is not None:
            self.scopes.close(self)
