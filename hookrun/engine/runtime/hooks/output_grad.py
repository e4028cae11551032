"""`output_grad`: the gradient of what one call of a module returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.runtime.apply_action import NOT_NESTED, StraightThrough
from hookrun.engine.runtime.call_stack import begin_call, end_call
from hookrun.engine.runtime.compiled import rebuilt, tracing
from hookrun.engine.runtime.fast.direct_calls import call_directly, maker
from hookrun.engine.runtime.hooks.base import BoundHook, ModuleHook, no_gradient
from hookrun.engine.runtime.hooks.exits import GradientHook, Watched, aliased, hooked_inside
from hookrun.engine.values.containers import TargetError, exchange, get, leaves, tensors
from hookrun.engine.values.tensors import has_no_shape


class OutputGrad(ModuleHook):
    """Attached to the final output of the module, so that the gradient is that of the output after all edits."""

    hook_types = (OUTPUT_GRAD,)
    depth = 0

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that remembers the versions of all arguments, if the module may return or write one."""
        if maker(module) is None or "forward" in vars(module):
            self.shared.ending.append(module)
            yield nn.Module.register_forward_pre_hook(module, self.enter, with_kwargs=True)

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that gets keyword arguments too."""
        yield nn.Module.register_forward_hook(module, self.attach, with_kwargs=True)

    def call_directly(self, module: nn.Module, number: int) -> object | None:
        """For a layer whose output is always in new memory: one tensor hook for all calls."""
        made_by = maker(module)
        firing = self.firings[0]
        site = firing.site
        if (
            made_by is None
            or len(self.firings) > 1
            or site.spec.keys.target is not None
            or site.clock.passes is not None
        ):
            return None
        op = firing.op_of_new() or firing.op
        if site.counts_calls:
            op = partial(site.current.in_call, 0, None, op)
        of_first_calls = Watched(site.where, [lambda grad: op(grad) if self.firings else grad]).run

        def attach(output: Any) -> Any:
            number = site.number_call()
            if type(output) is Tensor and output.grad_fn is not None and not output._is_view():
                hook = of_first_calls
                if number:
                    hook = Watched(site.where, [self._in_this_call(firing, "")]).run
                output.register_hook(hook)
                return output
            new = self._attach(module, (), {}, output)
            return output if new is None else new

        return call_directly(module, number, attach, made_by)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch's forward pre-hook: remember the versions of the arguments, to see which ones the module writes."""
        if self.firings and not tracing() and torch.is_grad_enabled():
            given = (tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad)
            begin_call(self, {id(tensor): tensor._version for tensor in given})

    def attach(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """torch's forward hook, registered with kwargs."""
        if not tracing():
            for firing in self.firings:
                firing.site.number_call()
        return self._attach(module, args, kwargs, output)

    def _attach(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.firings or not torch.is_grad_enabled():
            return None
        if tracing():
            output = _apart(output, list(tensors((args, kwargs))))
            for firing in self.firings:
                firing.traced(_carrying(firing, output))
            return output
        versions = end_call(self) or {}
        seen: dict[int, Tensor] = {}
        watched: dict[int, Watched] = {}
        for firing in self.firings:
            for path, tensor in _carrying(firing, output):
                key = id(tensor)
                seen[key] = tensor
                watched.setdefault(key, Watched(firing.site.where, [])).hooks.append(
                    self._in_this_call(firing, path)
                )
        outputs = list(tensors(output))
        news: dict[int, Tensor] = {}
        for key, tensor in seen.items():
            others = (other for other in outputs if other is not tensor)
            shared = aliased(tensor, versions, (args, kwargs), others)
            # an in-place write would bypass the hooks that an inner module has on a view
            if not shared and tensor._is_view():
                shared = hooked_inside(tensor)
            views = self.shared.calls.at_end(module) if shared else None
            new = watched[key].attach(tensor, views)
            if new is not tensor:
                news[key] = new
        return exchange(output, news) if seen else None

    def _in_this_call(self, firing: BoundHook, path: str) -> GradientHook:
        """What the firing does to the gradient of the tensor at this path of the output."""
        current = firing.site.current
        call = firing.site.call
        tokens = current.model_tokens

        def hook(grad: Tensor) -> Tensor:
            if not self.firings:
                return grad
            current.within = path
            return current.in_call(call, tokens, firing.op, grad)

        return hook


def _apart(output: Any, given: Sequence[Tensor]) -> Any:
    """The output in a graph, with copies of its tensors if these may be used elsewhere too.

    A hook on a tensor sees the gradient of all its uses: an argument that is returned (Identity, Dropout in eval) has
    uses before the module, and one of several outputs may be what another one is computed from. A view that the graph
    returns, or that is written in place, would lose its hook.
    """
    distinct: list[Tensor] = []  # plain Python, no ids: torch.compile traces this function
    for tensor in tensors(output):
        if tensor.requires_grad and all(tensor is not other for other in distinct):
            distinct.append(tensor)
    is_alone = len(distinct) == 1 and distinct[0]._base is None
    if is_alone and all(distinct[0] is not argument for argument in given):
        return output
    # Views (of copies), so that autograd refuses to write them in place: other tensors would not change. Views of the
    # tensors themselves would be made anew outside the graph, without the hook.
    copies = [StraightThrough.apply(tensor, tensor.detach().clone()) for tensor in distinct]

    def returned(leaf: Any) -> Any:
        for tensor, copy in zip(distinct, copies, strict=True):
            if leaf is tensor:
                return copy
        return leaf

    return rebuilt(output, returned)


def _carrying(firing: BoundHook, output: Any) -> list[tuple[str, Tensor]]:
    """(path, tensor) for each tensor of the output that the hook selects and that requires a gradient, each once."""
    site = firing.site
    target = site.spec.keys.target
    try:
        members = leaves(output) if target is None else [(str(target), get(output, target.keys))]
    except TargetError as error:
        site.fail(f"target {target}: {error}")
        return []
    carrying: list[tuple[str, Tensor]] = []  # plain Python: torch.compile traces this function too
    for path, leaf in members:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            continue
        if all(leaf is not tensor for _, tensor in carrying):
            carrying.append((path, leaf))
    if not carrying:
        site.fail(no_gradient(output))
    if any(has_no_shape(tensor) for _, tensor in carrying):
        site.fail(NOT_NESTED)
    return carrying
