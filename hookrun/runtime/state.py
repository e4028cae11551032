"""The state of hooks that an earlier process saved: whether it is of this plan, and that of the user's own objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hookrun.errors import HookError, HookrunError, listed, reason

_SHOWN = 6


def require_same_plan(state: Mapping[str, Any], plan: str, sites: Iterable[tuple[str, str]]) -> None:
    """HookrunError with what differs, where the state was saved under another plan.

    state: of `Installation.state_dict`
    plan:  the hash of the plan that is installed
    sites: hook name and module path of everything that is installed
    """
    here = set(sites)
    there = {(hook, path) for hook, modules in state["sites"].items() for path in modules}
    if state["plan"] == plan and here == there:
        return
    differences = [
        *_told("the state alone has", there - here),
        *_told("the plan alone has", here - there),
    ] or [f"hooks of the same names do something else: plan {state['plan'][:12]} there, {plan[:12]} here"]
    raise HookrunError(
        "the state was saved under another plan:\n  "
        + "\n  ".join(differences)
        + "\n  go on with the hooks, the model and the seed that it was saved with"
    )


def _told(who: str, sites: set[tuple[str, str]]) -> Iterator[str]:
    if sites:
        yield f"{who} " + listed([f"{hook} on {path or '(root)'}" for hook, path in sorted(sites)], _SHOWN)


class HeldObjects:
    """Objects of the user's own at a site that have a `state_dict()` and a `load_state_dict()`.

    where: the hook and its place, for messages
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._objects = list[Any]()

    def add(self, own: Any) -> None:
        """One more; the order is that in which the plan makes them."""
        self._objects.append(own)

    def state_dict(self) -> list[Any]:
        """What each says of itself. HookError with the hook for what it raises."""
        return [self._called(own, "state_dict") for own in self._objects]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Go on from there; of another plan there may be more or fewer."""
        for own, held in zip(self._objects, state, strict=False):
            self._called(own, "load_state_dict", held)

    def _called(self, own: Any, method: str, *args: Any) -> Any:
        try:
            return getattr(own, method)(*args)
        except Exception as error:
            what = f"{type(own).__name__}.{method} failed: {reason(error)}"
            raise HookError(f"{self._where}: {what}") from error
