"""The last place where a check passed before it failed."""

from __future__ import annotations

from typing import Any, NamedTuple


class Judged(NamedTuple):
    """Names a tensor that was checked.

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
    """The tensor that the action of a `PlacedHook` is being given."""
    clock, path = site.clock, site.within + site.at
    when = (clock.mode, clock.epoch, clock.step)
    return Judged(site.path, type(site.module).__name__, path, site.call, when)


class LastGood:
    """The tensors that passed each check in the current pass through the model.

    A new pass begins with a new step, or when the same tensor is checked again.
    """

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        self._passed = dict[str, dict[Judged, None]]()

    def passed(self, hook: str, judged: Judged) -> None:
        """Note that the tensor passed the check."""
        since = self._since(hook, judged)
        since[judged] = None

    def before(self, hook: str, judged: Judged) -> str | None:
        """Path and class of the module where the check passed last before this tensor; None: nowhere in this pass."""
        since = self._since(hook, judged)
        return str(next(reversed(since))) if since else None

    def _since(self, hook: str, judged: Judged) -> dict[Judged, None]:
        since = self._passed.setdefault(hook, {})
        if since and (judged in since or next(iter(since)).when != judged.when):
            since.clear()
        return since
