"""Where a check passed last before it failed."""

from __future__ import annotations

from typing import Any, NamedTuple


class Judged(NamedTuple):
    """A tensor that a check looked at.

    module: its path
    cls:    its class
    at:     path of the tensor in the module's value
    call:   of the module within the forward
    when:   mode, epoch and step
    """

    module: str
    cls: str
    at: str
    call: int
    when: tuple[str, int, int]

    def __str__(self) -> str:
        return f"{self.module or '(root)'} ({self.cls})"


def judged_at(site: Any) -> Judged:
    """Of the firing under way at a `PlacedHook`."""
    clock, path = site.clock, site.within + site.at
    when = (clock.mode, clock.epoch, clock.step)
    return Judged(site.path, type(site.module).__name__, path, site.call, when)


class LastGood:
    """What passed each check since the pass through the model that is under way began.

    A pass is over where its step is, or where the same tensor comes by again.
    """

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        self._passed = dict[str, dict[Judged, None]]()

    def passed(self, hook: str, judged: Judged) -> None:
        """The check found nothing wrong there."""
        since = self._since(hook, judged)
        since[judged] = None

    def before(self, hook: str, judged: Judged) -> str | None:
        """Where the check passed last before this, with its class; None: nothing came before it in the pass."""
        since = self._since(hook, judged)
        return str(next(reversed(since))) if since else None

    def _since(self, hook: str, judged: Judged) -> dict[Judged, None]:
        since = self._passed.setdefault(hook, {})
        if since and (judged in since or next(iter(since)).when != judged.when):
            since.clear()
        return since
