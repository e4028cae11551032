"""Loading the state of hooks: the check that it belongs to the same plan, and the state of the user's own objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hookrun.errors import HookError, HookrunError, listed, reason

_SHOWN = 6


def require_same_plan(state: Mapping[str, Any], plan: str, sites: Iterable[tuple[str, str]]) -> None:
    """Raise HookrunError, with the differences, if the state was saved under another plan.

    state: from `Installation.state_dict`
    plan:  the hash of the installed plan
    sites: (hook name, module path) of all installed hooks
    """
    here = set(sites)
    there = {(hook, path) for hook, modules in state["sites"].items() for path in modules}
    if state["plan"] == plan and here == there:
        return
    differences = [
        *_difference("only the state has", there - here),
        *_difference("only the plan has", here - there),
    ] or [
        f"hooks of the same names have other settings: plan {state['plan'][:12]} in the state, {plan[:12]} here"
    ]
    raise HookrunError(
        "the state was saved under another plan:\n  "
        + "\n  ".join(differences)
        + "\n  use the hooks, the model and the seed with which it was saved"
    )


def _difference(who: str, sites: set[tuple[str, str]]) -> Iterator[str]:
    if sites:
        yield f"{who} " + listed([f"{hook} on {path or '(root)'}" for hook, path in sorted(sites)], _SHOWN)


class HeldObjects:
    """The user's own objects at a site that have `state_dict()` and `load_state_dict()`.

    where: the hook and its place, for messages
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._objects = list[Any]()

    def add(self, own: Any) -> None:
        """Add an object; the plan creates them always in the same order."""
        self._objects.append(own)

    def state_dict(self) -> list[Any]:
        """The `state_dict()` of each object. Its exceptions become a HookError that names the hook."""
        return [self._called(own, "state_dict") for own in self._objects]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Load the state of each object; for another plan there may be more or fewer states than objects."""
        for own, held in zip(self._objects, state, strict=False):
            self._called(own, "load_state_dict", held)

    def _called(self, own: Any, method: str, *args: Any) -> Any:
        try:
            return getattr(own, method)(*args)
        except Exception as error:
            what = f"{type(own).__name__}.{method} failed: {reason(error)}"
            raise HookError(f"{self._where}: {what}") from error
