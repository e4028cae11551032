"""Whether the state of hooks, saved by an earlier process, is of the plan that is installed now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hookrun.errors import HookrunError, listed

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
