"""`output_grad`: the gradient of what one call of a module returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks
from torch.utils.hooks import RemovableHandle

from hookrun.hook_types import OUTPUT_GRAD
from hookrun.runtime.apply_action import NOT_NESTED
from hookrun.runtime.clock import call_frame
from hookrun.runtime.compiled import tracing
from hookrun.runtime.fast.copies import owned
from hookrun.runtime.fast.direct_calls import Direct, maker
from hookrun.runtime.hooks.base import BoundHook, ModuleHook, RegisteredHook, Shared, no_gradient
from hookrun.runtime.hooks.exits import Attached, EndOfForward, Watched, aliased, hooked_inside, versions_of
from hookrun.values.containers import TargetError, exchange, get, leaves, rebuild, tensors
from hookrun.values.tensors import has_no_shape


class OutputGrad(ModuleHook):
    """Attached to the final output of the module, so that the gradient is that of the output after all edits."""

    hook_types = (OUTPUT_GRAD,)
    finds_target = True
    depth = 0

    def __init__(self, firings: Sequence[BoundHook] = (), shared: Shared | None = None) -> None:
        super().__init__(firings)
        self._shared = shared
        self._entered = dict[int, dict[int, int]]()  # by the id of the call's frame
        self._alone = firings[0] if len(firings) == 1 and firings[0].site.spec.keys.target is None else None

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that remembers the versions of all arguments, if the module may return or write one."""
        if maker(module) is None:  # outputs in new memory need no follower
            self._end_of_forward()
        if _computes_anew(module):
            return
        self._alone = None
        yield module.register_forward_pre_hook(self.enter, with_kwargs=True)

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that gets keyword arguments too."""
        yield module.register_forward_hook(self.attach, with_kwargs=True)

    def _end_of_forward(self) -> EndOfForward:
        assert self._shared is not None
        return self._shared.once(EndOfForward)

    def direct(self, module: nn.Module) -> Direct | None:
        """A direct hook for a layer whose output is always in new memory: one tensor hook for all calls; else None."""
        made_by, alone = maker(module), self._alone
        if made_by is None or alone is None or alone.site.clock.passes is not None:
            return None
        hook = _GradientOfNew(self, alone).run

        def attach(output: Any) -> Any:
            if type(output) is Tensor and output.grad_fn is not None and not output._is_view():
                output.register_hook(hook)
                return output
            new = self.attach(module, (), {}, output)
            return output if new is None else new

        return Direct(attach, made_by)

    def clear(self) -> None:
        """Drop all firings: the object does nothing from now on."""
        super().clear()
        self._shared = self._alone = None
        self._entered.clear()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch's forward pre-hook: remember the versions of the arguments, to see which ones the module writes."""
        if self.firings and not tracing() and torch.is_grad_enabled():
            if len(self._entered) > _MOST_CALLS:  # entries of calls that raised
                self._entered.clear()
            self._entered[id(call_frame())] = versions_of((args, kwargs))

    def attach(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """torch's forward hook, registered with kwargs."""
        if not self.firings or not torch.is_grad_enabled():
            return None
        if tracing():
            return self._traced((args, kwargs), output)
        if self._alone is not None and not kwargs and _is_new(output, module, args):
            output.register_hook(Watched(self._alone.site.where, [_Gradient(self, self._alone, "")]).run)
            return None
        hooked = dict[int, tuple[Tensor, list[_Gradient]]]()
        for firing in self.firings:
            for path, tensor in _carrying(firing, output):
                _, hooks = hooked.setdefault(id(tensor), (tensor, []))
                hooks.append(_Gradient(self, firing, path))
        if not hooked:
            return None
        versions = self._entered.pop(id(call_frame()), {})
        distinct = {id(each): each for each in tensors(output)}
        news, views = dict[int, Tensor](), self._end_of_forward().views
        for key, (tensor, hooks) in hooked.items():
            others = (each for other, each in distinct.items() if other != key)
            # An in-place write would bypass the hooks that an inner module has on a view.
            shared = aliased(tensor, versions, (args, kwargs), others) or (
                tensor._is_view() and hooked_inside(tensor)
            )
            watched = Watched(hooks[0].firing.site.where, hooks)
            news[key] = watched.attach(tensor, views(module) if shared else None)
        return exchange(output, {key: new for key, new in news.items() if new is not hooked[key][0]})

    def _traced(self, arguments: Any, output: Any) -> Any:
        output = _view_if_input(arguments, output)
        for firing in self.firings:
            for _, tensor in _carrying(firing, output):
                firing.traced.watch(tensor)
        return output


_MOST_CALLS = 1024


def _computes_anew(module: nn.Module) -> bool:
    """Whether it is one of torch's own layers, which do not write to arguments or keep a reference to the output."""
    cls = type(module)
    return (
        getattr(nn, cls.__name__, None) is cls
        and "forward" not in vars(module)
        and not getattr(module, "inplace", False)
        and next(module.children(), None) is None
    )


def _is_new(output: Any, module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether nothing else refers yet to the output of such a layer, or to its memory."""
    return (
        type(output) is Tensor
        and output.grad_fn is not None
        and not output._is_view()  # an in-place write would bypass tensor hooks of a view
        and len(module._forward_hooks) == 1  # this hook alone
        and not _global_forward_hooks
        and not output._backward_hooks
        and not output.retains_grad
        and all(argument is not output for argument in args)
        and owned(output)
    )


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


class _GradientOfNew(Attached):
    """One hook on the gradient of a layer's new output; the same object serves all calls."""

    def __init__(self, registered: RegisteredHook, firing: BoundHook) -> None:
        self._registered = registered
        self._op = firing.op if firing.op_of_new is None else firing.op_of_new
        self._current = firing.site.current

    def run(self, grad: Tensor) -> Tensor | None:
        """torch's hook on the tensor."""
        if not self._registered.ops:
            return None
        self._current.within = ""
        new: Tensor = self._op(grad)
        return None if new is grad else new


class _Gradient:
    """One hook on the gradient of one tensor of one call."""

    __slots__ = ("call", "firing", "path", "registered", "tokens")

    def __init__(self, registered: RegisteredHook, firing: BoundHook, path: str) -> None:
        self.registered = registered
        self.firing = firing
        self.path = path
        self.call = firing.site.call
        self.tokens = firing.site.current.model_tokens

    def __call__(self, grad: Tensor) -> Tensor:
        if not self.registered.ops:
            return grad
        current = self.firing.site.current
        current.within, current.of_call, current.of_pass = self.path, self.call, self.tokens
        try:
            new: Tensor = self.firing.op(grad)
        finally:
            current.of_call = current.of_pass = None
        return new


def _view_if_input(args: Any, output: Any) -> Any:
    """The output, with each tensor that is also an argument replaced by a view of it.

    A module that returns its input (Identity, Dropout in eval) returns the same tensor object: a hook on that would
    see the gradient of all uses of the input.
    """
    given = list(tensors(args))  # not their ids, for which torch 2.12 compiles no code
    return rebuild(output, lambda leaf: leaf.view_as(leaf) if any(leaf is each for each in given) else leaf)
