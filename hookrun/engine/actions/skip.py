"""The action `skip`."""

from __future__ import annotations

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.hook_types import FORWARD


class Skip(Action):
    """Leave the module out: its forward is not called, and its first argument is its output.

    The first argument must have the form of the output: containers, shapes, dtypes. The trial run checks that; without
    an example nothing does. Other hooks on the module see the first argument as its output; hooks inside it never fire.
    When the schedule does not hold, the forward is called as usual.
    """

    action_name = "skip"
    hook_types = frozenset({FORWARD})
    uses = ("args",)
    does = "skip"

    def build(self, site: HookSite) -> Edit:
        """The identity: what it gets is the first argument."""
        return lambda argument: argument
