"""`output_grad`: the gradient of what one call of a module returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.runtime.apply_action import NOT_NESTED, StraightThrough
from hookrun.engine.runtime.compiled import rebuilt, tracing
from hookrun.engine.runtime.fast.direct_calls import call_directly, maker
from hookrun.engine.runtime.frames import call_frame, left_open
from hookrun.engine.runtime.hooks.base import BoundHook, ModuleHook, Shared, no_gradient
from hookrun.engine.runtime.hooks.exits import GradientHook, Watched, aliased, hooked_inside
from hookrun.engine.values.containers import TargetError, exchange, get, leaves, tensors
from hookrun.engine.values.tensors import has_no_shape


class OutputGrad(ModuleHook):
    """Attached to the final output of the module, so that the gradient is that of the output after all edits."""

    hook_types = (OUTPUT_GRAD,)
    depth = 0

    def __init__(self, firings: Sequence[BoundHook], shared: Shared) -> None:
        super().__init__(firings, shared)
        self._entered = dict[FrameType, dict[int, int]]()

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
        made_by, (firing, *others) = maker(module), self.firings
        site = firing.site
        if made_by is None or others or site.spec.keys.target is not None or site.clock.passes is not None:
            return None
        op = firing.op
        hook = Watched(site.where, [lambda grad: op(grad) if self.firings else grad]).run

        def attach(output: Any) -> Any:
            if type(output) is Tensor and output.grad_fn is not None and not output._is_view():
                output.register_hook(hook)
                return output
            new = self.attach(module, (), {}, output)
            return output if new is None else new

        return call_directly(module, number, attach, made_by)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch's forward pre-hook: remember the versions of the arguments, to see which ones the module writes."""
        if self.firings and not tracing() and torch.is_grad_enabled():
            left_open(self._entered)  # those of calls that raised
            given = (tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad)
            self._entered[call_frame()] = {id(tensor): tensor._version for tensor in given}

    def attach(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """torch's forward hook, registered with kwargs."""
        if not self.firings or not torch.is_grad_enabled():
            return None
        if tracing():
            output = _apart(output, list(tensors((args, kwargs))))
            for firing in self.firings:
                for _, tensor in _carrying(firing, output):
                    firing.traced(tensor)
            return output
        versions = self._entered.pop(call_frame(), {})
        hooked = dict[int, tuple[Tensor, str, list[GradientHook]]]()
        for firing in self.firings:
            for path, tensor in _carrying(firing, output):
                _, _, hooks = hooked.setdefault(id(tensor), (tensor, firing.site.where, []))
                hooks.append(self._in_this_call(firing, path))
        if not hooked:
            return None
        distinct = {id(each): each for each in tensors(output)}
        news = dict[int, Tensor]()
        for key, (tensor, where, hooks) in hooked.items():
            others = (each for other, each in distinct.items() if other != key)
            # An in-place write would bypass the hooks that an inner module has on a view.
            shared = aliased(tensor, versions, (args, kwargs), others) or (
                tensor._is_view() and hooked_inside(tensor)
            )
            news[key] = Watched(where, hooks).attach(
                tensor, self.shared.calls.at_end(module) if shared else None
            )
        return exchange(output, {key: new for key, new in news.items() if new is not hooked[key][0]})

    def _in_this_call(self, firing: BoundHook, path: str) -> GradientHook:
        """What the firing does to the gradient of the tensor at this path of the output."""
        current = firing.site.current
        call, tokens = firing.site.call, current.model_tokens

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
        members = leaves(output) if target is None else ((str(target), get(output, target.keys)),)
    except TargetError as error:
        site.fail(f"target {target}: {error}")
        return []
    watched = [(path, leaf) for path, leaf in members if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not watched:
        site.fail(no_gradient(output))
    if any(has_no_shape(tensor) for _, tensor in watched):
        site.fail(NOT_NESTED)
    once: list[tuple[str, Tensor]] = []  # plain Python: torch.compile traces this function too
    for path, tensor in watched:
        if all(tensor is not other for _, other in once):
            once.append((path, tensor))
    return once
