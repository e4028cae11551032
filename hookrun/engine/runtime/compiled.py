"""Hooks inside a compiled graph: functions of tensors alone, so that a run does not trigger recompilation.

The graph adds to a tensor that counts the firings, and reads a tensor that says whether the schedule holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.runtime.apply_action import Op, function_of, taken_by
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.values import containers
from hookrun.engine.values.private_names import require
from hookrun.errors import CompileError, Problem

F = TypeVar("F", bound=Callable[..., Any])

tracing = torch.compiler.is_dynamo_compiling
"""Whether torch.compile is tracing the hooks instead of running them."""


def in_graph_of(site: HookSite, counting: Callable[[Sequence[str]], Callable[[int], None]]) -> Op:
    """What the site of an edit does inside a graph: value -> the value after the action, if the schedule holds.

    For `output_grad` it is a function of (path, tensor) pairs, which lets the action act on the gradients of these
    tensors. Observers are in `graph_observers`.

    The action is a function of tensors. torch compiles a graph for each mode of the model. The site gets the tensor
    that counts its firings in forward passes.

    counting: paths of tensors -> what counts the firing at one of them in a backward pass, where no tensor can be
              written: it would be another one for the backward passes that come next
    """
    when = site.spec.keys.when
    clock = site.clock
    device = site.like.device
    is_open: Tensor | None = None
    if when.step is not None or when.epoch is not None:
        is_open = clock.followed_in_graphs(
            torch.tensor(False, device=device), lambda: when.holds_at(clock.step, clock.epoch)
        )
    holds_in = {training: when.holds_in(training) for training in (True, False)}
    function = function_of(site)
    edited = _editing(site, function, is_open)

    def watch(carrying: Sequence[tuple[str, Tensor]]) -> None:
        if not holds_in[clock.model.training]:
            return
        count = counting([path for path, _ in carrying])
        for place, (_, tensor) in enumerate(carrying):

            def edit(grad: Tensor, place: int = place) -> Any:
                count(place)
                return edited(grad)

            tensor.register_hook(edit)  # as outside of a graph, a tensor without a gradient counts nothing

    if site.hook_type is OUTPUT_GRAD:
        return watch
    fired = site.fired_in_graphs = torch.zeros((), dtype=torch.int64, device=device)

    def fire(value: Any) -> Any:
        if not holds_in[clock.model.training]:
            return value
        fired.add_(1 if is_open is None else is_open)
        return edited(value)

    def fire_always(value: Any) -> Any:
        # without conditions, with few variables: each one becomes a guard, checked at every call
        fired.add_(1)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return edited(value)
        new = function(value)
        return value if new is None else new

    has_conditions = is_open is not None or not all(holds_in.values())
    if has_conditions or site.target_keys is not None or site.spec.action.scope == "together":
        return fire
    return fire_always


def _editing(site: HookSite, function: Callable[[Any], Any], is_open: Tensor | None) -> Op:
    """Value -> the value after the action, at the site's target; where `is_open` is False, the value as it was."""
    path = site.target_keys
    action = site.spec.action
    together = action.scope == "together"

    def chosen(old: Any, new: Tensor | None) -> Any:
        if new is None:
            return old
        if is_open is None:
            return new
        return torch.where(is_open, new, old)

    def edited(value: Any) -> Any:
        member = value if path is None else containers.get(value, path)
        takes = taken_by(action, member, site.module)
        olds = [leaf for leaf in containers.tensors(member) if takes(leaf)]
        news = iter(function(olds) if together and olds else map(function, olds))
        changed = rebuilt(member, lambda leaf: chosen(leaf, next(news)) if takes(leaf) else leaf)
        return changed if path is None else containers.put(value, path, changed)

    return edited


def while_tracing(function: F) -> F:
    """A function that is called while a graph is traced, not in the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def refusal(problems: Sequence[Problem]) -> Op:
    """For a site that cannot be part of a graph: it raises CompileError with the problems of the whole plan."""

    @while_tracing
    def refuse() -> NoReturn:
        require("torch, compiler")
        # loaded already, since torch._dynamo is the caller
        from torch._dynamo.exc import TorchRuntimeError

        class Uncompilable(CompileError, TorchRuntimeError):
            """A TorchRuntimeError, so that torch passes it on unchanged to the caller of the compiled model."""

        raise Uncompilable(problems)

    def refused(value: Any) -> None:
        refuse()

    return refused


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` applied to every member that is not a container; all containers are new.

    `containers.rebuild` keeps unchanged containers, but torch.compile cannot trace its `is` comparison of tuples.
    """
    members = containers.children(value)
    if not members:
        return change(value)
    return containers.replaced(value, {key: rebuilt(member, change) for key, member in members})
