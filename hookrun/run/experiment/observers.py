"""Hooks that pass whole values to a function of hookrun itself, for an installation of their own; autograd nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from hookrun.engine.actions.base import Action
from hookrun.engine.hook_types import HookType
from hookrun.engine.plan.model_tree import class_name
from hookrun.engine.plan.plan import Match, PlannedHook
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.spec.hook import HookKeys, HookSpec
from hookrun.engine.values.containers import tensors

See = Callable[[HookSite, Any], None]


class Observe(Action):
    """Call `see` with the site and the whole value."""

    action_name = "observe"
    observes = True
    scope = "value"
    see: See

    def build(self, site: Any) -> Callable[[Any], Any]:
        """`see` for this site."""
        return partial(self.see, site)


class Exchange(Action):
    """Call `change` with the site and each floating-point tensor, which its result replaces."""

    action_name = "exchange"
    change: Callable[[HookSite, Tensor], Tensor]

    def build(self, site: Any) -> Callable[[Any], Any]:
        """`change` for this site."""
        return partial(self.change, site)


def matches(model: nn.Module, paths: Iterable[str]) -> tuple[Match, ...]:
    """The modules at these paths, as what hooks act on."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return tuple(Match(path, (path,), class_name(modules[path]), 0) for path in paths)


def planned(name: str, hook_type: HookType, matches: tuple[Match, ...], action: Action) -> PlannedHook:
    """A hook of that type with an action; its name is one that a hook of an experiment cannot have."""
    keys = HookKeys.model_validate({"select": "**", "hook": hook_type.name})
    return PlannedHook(HookSpec(f"({name})", keys, action), matches)


def new_nodes(value: Any, seen: set[Node]) -> Iterator[Node]:
    """The autograd nodes that lead to the tensors in a value, without those in `seen`, which receives them."""
    waiting = [tensor.grad_fn for tensor in tensors(value)]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)
