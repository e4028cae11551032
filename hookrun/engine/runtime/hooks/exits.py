"""Hooks on the gradient of one output of one call, from the later uses of that output alone.

If the module created the output or wrote it in place, the tensor object stays: an autograd node is appended to it, as
by an in-place operation that changes nothing. If the output shares memory with another tensor that may still be used
(an argument or a part of one, a parameter, another output), the caller gets a view of it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hookrun.engine.runtime.checkpointing import graph_task
from hookrun.engine.values.containers import functorch_level, tensors
from hookrun.errors import HookError

GradientHook = Callable[[Tensor], Tensor]


Views = list[Callable[[], None]]
"""Functions that are called at the end of the forward, for tensors that may have been written in place."""

preserved_version = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


class _Exit(torch.autograd.Function):
    """The identity, marked as an in-place operation so that the result is the same tensor object."""

    @staticmethod
    def forward(ctx: Any, hooks: Sequence[GradientHook], tensor: Tensor) -> Tensor:
        ctx.hooks = hooks
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, _through(ctx.hooks, grad)


def _through(hooks: Iterable[GradientHook], grad: Tensor) -> Tensor:
    for hook in hooks:
        grad = hook(grad)
    return grad


def storage(tensor: Tensor) -> int | None:
    """A number that identifies the tensor's storage; None if it does not have one (sparse, wrapped by functorch)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def takes_nodes(tensor: Tensor) -> bool:
    """Whether torch allows in-place operations on it: not on leaves, views of leaves, or outputs of `split`."""
    if _base(tensor).grad_fn is None:
        return False
    default = torch._C._autograd.CreationMeta.DEFAULT
    return not tensor._is_view() or torch._C._autograd._get_creation_meta(tensor) == default


@dataclass(eq=False)
class Watched:
    """The hooks on the gradient of one tensor. It does not refer to the tensor; the tensor's graph refers to it.

    Its bound methods are tensor hooks, by which `hooked_inside` recognizes it.

    followed: the hooks are attached to the operation that wrote the tensor in place
    """

    where: str
    hooks: list[GradientHook]
    followed: bool = False
    _fired_in: dict[str, int] = field(default_factory=dict)

    def attach(self, tensor: Tensor, views: Views | None) -> Tensor:
        """Attach the hooks; returns the tensor that the module's caller gets: the tensor itself or a view of it.

        views: the list to which a view is added that may still be written in place; None: nothing else uses the
               tensor's memory
        """
        if functorch_level() is not None:  # custom autograd functions do not work inside a transform
            seen = tensor if views is None else tensor.view_as(tensor)
            seen.register_hook(self.run)
            return seen
        if views is not None or not takes_nodes(tensor):
            return self._view(tensor, views)
        if tensor._backward_hooks and not hooked_inside(tensor):  # the user's own, which keep firing first
            tensor.register_hook(self.run)
            return tensor
        is_view = tensor._is_view()
        with preserved_version(tensor):
            # an in-place write bypasses tensor hooks of a view
            _Exit.apply(self.hooks if is_view else (), tensor)
        if not is_view:  # a tensor hook, so that hooks which the user registers later fire after it
            tensor.register_hook(self.run)
        return tensor

    def _view(self, tensor: Tensor, views: Views | None) -> Tensor:
        is_leaf = tensor.grad_fn is None
        view = tensor.view_as(tensor)
        view.register_hook(self._at_view)
        if is_leaf or not takes_nodes(tensor):
            return view  # torch refuses in-place operations on it
        version = tensor._version
        counter = tensor.detach()
        counter.data = counter.new_empty(0)  # shares the version, not the memory

        def require_followed(grad: Tensor) -> None:
            if counter._version != version and not self.followed and self.hooks:
                raise HookError(
                    f"{self.where}: its output shares memory with its input, and was written in place in a way that "
                    "the hook cannot follow; hook the module before or after it, or write to a clone"
                )

        tensor.register_hook(require_followed)
        if views is not None:
            views.append(partial(self._follow, view, _base(view).grad_fn, version))
        return view

    def _follow(self, view: Tensor, before: Node | None, version: int) -> None:
        """Attach the hooks to the operation that wrote the view in place, if any: its gradient bypasses the view."""
        if view._version == version:
            return
        base = _base(view)
        node = base.grad_fn
        while node is not None:
            inner = None
            if node.next_functions:
                inner = node.next_functions[0][0]
            if inner is before and before is not None:
                self.followed = True
                geometry = view.size(), view.stride(), view.storage_offset() - base.storage_offset()
                node.register_hook(partial(self._at_write, geometry))
                return
            node = inner

    def _at_view(self, grad: Tensor) -> Tensor | None:
        self._require_single_path("view")
        return self.run(grad)

    def run(self, grad: Tensor) -> Tensor | None:
        """A tensor hook: run the hooks on the gradient."""
        new = _through(self.hooks, grad)
        return None if new is grad else new

    def _at_write(self, geometry: Any, into: Sequence[Tensor | None], _out: object) -> Any:
        whole = into[0]
        if whole is None:
            return None
        self._require_single_path("write")
        new = self.run(whole.as_strided(*geometry))
        if new is None:
            return None
        changed = whole.clone()
        changed.as_strided(*geometry).copy_(new)
        return changed, *into[1:]

    def _require_single_path(self, path: str) -> None:
        """Raise HookError if one backward pass brings gradients both of the view and of its in-place write."""
        self._fired_in[path] = task = graph_task()
        if list(self._fired_in.values()).count(task) > 1:
            raise HookError(
                f"{self.where}: its output shares memory with its input, and is used both before and after it is "
                "written in place; write to a clone"
            )


def hooked_inside(tensor: Tensor) -> bool:
    """Whether all hooks on the tensor belong to an inner module that returned it first.

    The inner module must see the gradient after the outer one, so the outer module needs its own autograd node.
    """
    hooks = (tensor._backward_hooks or {}).values()
    return bool(hooks) and all(isinstance(getattr(hook, "__self__", None), Watched) for hook in hooks)


def _base(view: Tensor) -> Tensor:
    return view if view._base is None else view._base


def aliased(tensor: Tensor, versions: dict[int, int], arguments: Any, others: Iterable[Tensor]) -> bool:
    """Whether the caller may use the tensor's memory in another way too: as an argument, a parameter, another output.

    versions: id(tensor) -> version, of the arguments that required a gradient when the call began
    others:   the other outputs
    """
    if tensor.grad_fn is None or isinstance(tensor, nn.Parameter) or tensor.retains_grad:
        return True
    version = versions.get(id(tensor), tensor._version)
    if version != tensor._version:  # written: it is the module's own value now
        return False
    memory = storage(tensor)
    if memory is None:
        return any(other is tensor for other in tensors(arguments))
    return any(storage(other) == memory for other in chain(tensors(arguments), others))
