"""Hooks that pass whole values to a function of hookrun itself, for an installation of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hookrun.actions.base import Action
from hookrun.hook_types import HookType
from hookrun.plan.plan import Match, PlannedHook
from hookrun.runtime.site import HookSite
from hookrun.spec.hook import HookKeys, HookSpec

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


def observer(name: str, hook_type: HookType, matches: tuple[Match, ...], see: See) -> PlannedHook:
    """A hook of that type that observes each match; its name is one that a hook of an experiment cannot have."""
    keys = HookKeys.model_validate({"select": "**", "hook": hook_type.name})
    return PlannedHook(HookSpec(f"({name})", keys, Observe(see=see)), matches)
