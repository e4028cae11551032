"""`saved_tensors`: what autograd keeps from a module's forward for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookrun.actions.base import Packed
from hookrun.errors import HookError
from hookrun.runtime.checkpointing import repeating
from hookrun.runtime.compiled import tracing
from hookrun.runtime.hooks.module_hooks import Firing, RegisteredHook, in_graph
from hookrun.spec.hook import SavedTensorKeys

Undo = Callable[[Tensor | None], Tensor]


class Held:
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

    def __init__(self, model: nn.Module) -> None:
        self._model = model
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

    def open(self, point: SavedTensors, firings: Sequence[Firing]) -> None:
        """A hooked module's forward begins."""
        context = torch.autograd.graph.saved_tensors_hooks(self._pack, Held.restore)
        context.__enter__()
        self._open.append((point, firings, context))

    def close(self, point: SavedTensors) -> None:
        """A hooked module's forward has ended, and with it those of modules inside that were interrupted."""
        if any(open_point is point for open_point, _, _ in self._open):
            while self._close_innermost() is not point:
                pass

    def close_all(self) -> None:
        """Close what an interruption left open."""
        while self._open:
            self._close_innermost()

    def _close_innermost(self) -> SavedTensors:
        point, _, context = self._open.pop()
        context.__exit__()
        return point

    def _pack(self, saved: Tensor) -> Held:
        whole = (
            saved.detach()
        )  # what an operation saves of its own output leads back to the graph that holds it
        tensor: Tensor | None = whole
        undos = list[Undo]()
        is_parameter = _storage(saved) in self._parameters
        for _, firings, _ in self._open:
            for firing in firings:
                keys = firing.site.spec.keys
                if tensor is None or (
                    is_parameter and not (isinstance(keys, SavedTensorKeys) and keys.parameters)
                ):
                    continue
                packed = firing.op(tensor)
                if isinstance(packed, Packed):
                    undos.append(packed.undo)
                    tensor = packed.tensor
                else:
                    tensor = packed
        return Held(tensor, undos, whole._version if tensor is whole else None)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class SavedTensors(RegisteredHook):
    """Opens and closes a module's scope."""

    def __init__(self, firings: tuple[Firing, ...] = (), scopes: Scopes | None = None) -> None:
        super().__init__(firings)
        self.scopes = scopes

    def enter(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook."""
        if tracing():
            in_graph(self.firings, None)  # refused
        if self.scopes is not None and self.ops:
            again = repeating()
            # what the backward pass asks for was saved in the first run; torch still counts what is saved here
            idle = again is not None and again.keeps_graph
            self.scopes.open(self, () if idle else self.firings)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """torch's forward hook, called also when the forward raised."""
        if self.scopes is not None:
            self.scopes.close(self)
