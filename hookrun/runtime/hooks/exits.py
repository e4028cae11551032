"""The gradient of one output of one call: an edge in the autograd graph that only later uses of that output go through.

A tensor that the module made, or wrote in place, stays the same tensor: a node is inserted behind it, as an in-place
operation that changes nothing would do. A tensor that shares its memory with something that stays in use beside it (an
argument that is handed on, a part of one, a parameter, another output) is replaced by a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import local
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hookrun.containers import tensors
from hookrun.errors import HookError
from hookrun.runtime.checkpointing import graph_task
from hookrun.runtime.compiled import tracing
from hookrun.runtime.hooks.base import RegisteredHook, Shared
from hookrun.runtime.module_calls import frames_of

GradientHook = Callable[[Tensor], Tensor]


class WriteFollower(Protocol):
    """Wants to know how a tensor that a module returned was written in place afterwards."""

    def follow(self, view: Tensor, before: Node | None, version: int) -> None:
        """The model's forward has ended."""


Views = list[tuple[WriteFollower, Tensor, Node | None, int]]
"""Tensors that may yet be written in place: who follows each, the tensor, its memory's node and version before."""

preserved_version = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


class _Exit(torch.autograd.Function):
    """The identity; marked as an in-place operation, so that the tensor itself is the result."""

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
    """The identity of a tensor's memory; None where it has none of its own (sparse, wrapped by functorch)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def takes_nodes(tensor: Tensor) -> bool:
    """Whether torch lets it be written in place: not leaves and parts of them, nor several views of one operation."""
    if _base(tensor).grad_fn is None:
        return False
    default = torch._C._autograd.CreationMeta.DEFAULT
    return not tensor._is_view() or torch._C._autograd._get_creation_meta(tensor) == default


def transformed() -> bool:
    """Whether a transform of torch.func is under way, in which there are no autograd nodes of our own."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Attached:
    """What is registered on a tensor, as a bound method, for a module that returned it: `hooked_inside` knows it."""


class Watched(Attached):
    """The hooks on the gradient of one tensor. It holds no tensor: the tensor's graph holds it.

    followed: the hooks are attached to what wrote the tensor in place
    """

    def __init__(self, where: str, hooks: Sequence[GradientHook]) -> None:
        self.where = where
        self.hooks = hooks
        self.followed = False
        self._fired_in = dict[str, int]()

    def attach(self, tensor: Tensor, views: Views | None) -> Tensor:
        """What the caller is to be given: the tensor itself or a view of it.

        views: where to leave a view that may yet be written; None: nothing else uses the tensor's memory
        """
        if transformed():
            seen = tensor if views is None else tensor.view_as(tensor)
            seen.register_hook(self._run)
            return seen
        if views is not None or not takes_nodes(tensor):
            return self._view(tensor, views)
        if tensor._backward_hooks and not hooked_inside(
            tensor
        ):  # others' fire before: they were registered before
            tensor.register_hook(self._run)
            return tensor
        inside = (
            self.hooks if tensor._is_view() else ()
        )  # in-place operations leave out what is registered on a view
        with preserved_version(tensor):
            _Exit.apply(inside, tensor)
        if not inside:  # those of others, registered later, fire later
            tensor.register_hook(self._run)
        return tensor

    def attach_to_new(self, tensor: Tensor) -> None:
        """The tensor is nobody's yet: all its uses are later ones, and a hook on it needs no node of its own."""
        tensor.register_hook(self._run)

    def _view(self, tensor: Tensor, views: Views | None) -> Tensor:
        leaf = tensor.grad_fn is None
        view = tensor.view_as(tensor)
        view.register_hook(self._at_view)
        if leaf or not takes_nodes(tensor):
            return view  # torch allows no in-place operation on it
        version = tensor._version
        counter = tensor.detach()
        counter.data = counter.new_empty(0)  # shares the version, not the memory

        def require_followed(grad: Tensor) -> None:
            if counter._version != version and not self.followed and self.hooks:
                raise HookError(
                    f"{self.where}: its output shares memory with its input, and was written in place where the hook "
                    "cannot follow; hook the module before or after it, or write to a clone"
                )

        tensor.register_hook(require_followed)
        if views is not None:
            views.append((self, view, _base(view).grad_fn, version))
        return view

    def follow(self, view: Tensor, before: Node | None, version: int) -> None:
        """Attach the hooks to the operation that wrote the view in place, if one did: torch leaves the view out."""
        if view._version == version:
            return
        base = _base(view)
        node = base.grad_fn
        while node is not None:
            inner = node.next_functions[0][0] if node.next_functions else None
            if inner is before and before is not None:
                self.followed = True
                geometry = view.size(), view.stride(), view.storage_offset() - base.storage_offset()
                node.register_hook(partial(self._at_write, geometry))
                return
            node = inner

    def _at_view(self, grad: Tensor) -> Tensor | None:
        self._require_one_way("view")
        return self._run(grad)

    def _run(self, grad: Tensor) -> Tensor | None:
        new = _through(self.hooks, grad)
        return None if new is grad else new

    def _at_write(self, geometry: Any, into: Sequence[Tensor | None], _out: object) -> Any:
        if (whole := into[0]) is None:
            return None
        self._require_one_way("write")
        grad = whole.as_strided(*geometry)
        if (new := self._run(grad)) is None:
            return None
        changed = whole.clone()
        changed.as_strided(*geometry).copy_(new)
        return changed, *into[1:]

    def _require_one_way(self, way: str) -> None:
        """HookError where parts of the gradient arrive from before and from behind an in-place operation."""
        self._fired_in[way] = task = graph_task()
        if list(self._fired_in.values()).count(task) > 1:
            raise HookError(
                f"{self.where}: its output shares memory with its input, and is used both before and after it is "
                "written in place; write to a clone"
            )


def hooked_inside(tensor: Tensor) -> bool:
    """Whether the hooks on the tensor are those of a module inside, which returned it first.

    That module meets the gradient after the one around it, which therefore gets an edge of its own.
    """
    hooks = (tensor._backward_hooks or {}).values()
    return bool(hooks) and all(isinstance(getattr(hook, "__self__", None), Attached) for hook in hooks)


def _base(view: Tensor) -> Tensor:
    return view if view._base is None else view._base


class _Pending(local):
    """The views of one thread that may yet be written in place in the forward under way."""

    def __init__(self) -> None:
        self.views: Views = []


class EndOfForward(RegisteredHook):
    """Runs when the root module's forward has ended: by then the model has written what it writes in place."""

    def __init__(self, shared: Shared | None = None) -> None:
        super().__init__()
        self._model = shared.model if shared is not None else None
        self._pending = _Pending()
        if shared is None:
            return
        handle = shared.model.register_forward_hook(self.follow_all, always_call=True)
        shared.closing.callback(handle.remove)

    def views(self, module: nn.Module) -> Views:
        """Where to leave the views that a call of the module returns; outside a forward of the model nobody follows."""
        model = self._model
        under_way = model is not None and module is not model and any(True for _ in frames_of(model))
        return self._pending.views if under_way else []

    def follow_all(self, *_: object) -> None:
        """torch's forward hook on the root module."""
        if tracing():
            return
        views, self._pending.views = self._pending.views, []
        for watched, view, before, version in reversed(views):  # the outermost module's hooks fire first
            watched.follow(view, before, version)


def written(versions: dict[int, int], tensor: Tensor) -> bool:
    """Whether a tensor with that identity was at another version when the call began."""
    before = versions.get(id(tensor))
    return before is not None and before != tensor._version


def versions_of(arguments: Any) -> dict[int, int]:
    """The version of every tensor that has a gradient, by the identity of the tensor."""
    return {id(tensor): tensor._version for tensor in tensors(arguments) if tensor.requires_grad}


def aliased(tensor: Tensor, versions: dict[int, int], arguments: Any, others: Iterable[Tensor]) -> bool:
    """Whether the caller may use the tensor's memory past this output: as an argument, a parameter, another output."""
    if tensor.grad_fn is None or isinstance(tensor, nn.Parameter) or tensor.retains_grad:
        return True
    if written(versions, tensor):  # it is the module's own value now
        return False
    mine = storage(tensor)
    if mine is None:
        return any(each is tensor for each in tensors(arguments))
    return mine in {storage(each) for each in tensors(arguments)} | {storage(each) for each in others}
