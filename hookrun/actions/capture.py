"""The action `capture`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookrun.actions.base import Action, Site


class Capture(Action):
    """Keep the value as it is at that moment, detached, its containers included."""

    action_name = "capture"
    observes = True
    scope = "value"

    def build(self, site: Site) -> Callable[[Any], Any]:
        """Store every value that comes by."""
        return site.keep()
