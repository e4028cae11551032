"""`output_grad`: tensor hooks on what a module returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.containers import get, leaves, rebuild, tensors
from hookrun.hook_types import OUTPUT_GRAD
from hookrun.runtime.compiled import tracing
from hookrun.runtime.hooks.base import Firing, ModuleHook, RegisteredHook, no_gradient


class OutputGrad(ModuleHook):
    """Attached to what the module finally returns: the gradient is that of the output after all edits."""

    hook_types = (OUTPUT_GRAD,)
    finds_target = True
    depth = 0

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """With keyword arguments, one of which may be what the module returns."""
        yield module.register_forward_hook(self.attach, with_kwargs=True)

    def attach(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """torch's forward hook, registered with kwargs."""
        if not self.firings or not torch.is_grad_enabled():
            return None
        output = _view_if_input((args, kwargs) if kwargs else args, output)
        for firing in self.firings:
            self._attach(firing, output)
        return output

    def _attach(self, firing: Firing, output: Any) -> None:
        site = firing.site
        target = site.spec.keys.target
        found = ((str(target), get(output, target.keys)),) if target is not None else leaves(output)
        watched = [(path, leaf) for path, leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not watched:
            site.fail(no_gradient(output))
        for path, tensor in watched:
            if tracing():
                firing.traced.watch(tensor)
            else:
                tensor.register_hook(_Gradient(self, firing, path, site.call))


class _Gradient:
    """A tensor hook of one call of a module."""

    __slots__ = ("call", "firing", "path", "registered")

    def __init__(self, registered: RegisteredHook, firing: Firing, path: str, call: int) -> None:
        self.registered = registered
        self.firing = firing
        self.path = path
        self.call = call

    def __call__(self, grad: Tensor) -> Tensor | None:
        if not self.registered.ops:
            return None
        site = self.firing.site
        site.within, site.of_call = self.path, self.call
        new: Tensor = self.firing.op(grad)
        site.of_call = None
        return None if new is grad else new


def _view_if_input(args: Any, output: Any) -> Any:
    """The output, with a tensor that is one of the arguments as a view of it.

    Where a module returns its input (Identity, Dropout in eval), both are one tensor: a hook on it would see the
    gradient of all uses of the input.
    """
    given = {id(tensor) for tensor in tensors(args)}
    if not given:
        return output
    return rebuild(
        output, lambda leaf: leaf.view_as(leaf) if isinstance(leaf, Tensor) and id(leaf) in given else leaf
    )
