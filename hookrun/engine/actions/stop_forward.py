"""The action `stop_forward`."""

from __future__ import annotations

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.hook_types import FORWARD


class StopForward(Action):
    """End the forward after this module: nothing more is computed, and the outermost call returns None.

    For captures of early layers. All other hooks on the module run before; of several modules the first that is called
    ends the forward. The tasks `predict` and `evaluate` write captures and no metrics; other tasks refuse it.
    """

    action_name = "stop_forward"
    hook_types = frozenset({FORWARD})
    does = "stop"

    def build(self, site: HookSite) -> Edit:
        """The identity: no value is changed."""
        return lambda output: output
