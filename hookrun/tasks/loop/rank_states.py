"""The parts of a resumable state that differ from rank to rank, and what each rank goes on from.

Weights, optimizer, schedules and counts are the same on every rank, and a state holds them once. The rest, which is
small, it holds of each rank. A run that goes on with as many ranks goes on bit by bit; with another number, rank 0 goes
on with the sums of all ranks, and the others with none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from hookrun.errors import listed
from hookrun.ranks.alone import Ranks
from hookrun.tasks.loop.average import Average

RANKS = "ranks"
"""The part of a state that holds a RankState of each rank; a run of one process has none."""

SUMS = "sums"
"""The part that names the places of what is added up from batch to batch, in `held`."""

_SHOWN = 4

RankState = Mapping[str, Any]
"""`generators`, `hooks`, `sums` (what holds, the key there, the state of an Average) and `kept` lines."""


def for_rank(tree: Mapping[str, Any], ranks: Ranks, of_batch: Collection[str]) -> RankState:
    """What this rank goes on from, of what a state holds.

    of_batch: the names of hooks that count what they change in the rank's own rows

    `generators` is missing where the run had no such rank before. `kept` holds on rank 0 the lines of ranks that the
    run has no more, which it has to write.
    """
    before: Sequence[RankState] = tree.get(RANKS) or [_of_one(tree)]
    if len(before) == ranks.size:
        return before[ranks.rank]
    if not ranks.is_main:
        return _without_sums(tree, before, of_batch)
    kept = [line for each in before for line in each["kept"]]
    states = [each["sums"] for each in before]
    sums = {place: _together([each[place] for each in states]) for place in states[0]}
    return {
        **before[0],
        "hooks": _hooks_together([each["hooks"] for each in before], of_batch),
        "sums": sums,
        "kept": kept,
    }


def left_out(tree: Mapping[str, Any], ranks: Ranks, hooks: Mapping[str, Collection[int]]) -> list[str]:
    """A note on the hooks of ranks that the run had and has no more.

    hooks: name -> for which ranks it is (`when.rank`)
    """
    before = len(tree.get(RANKS) or [None])
    gone = [name for name, of in hooks.items() if min(of) >= ranks.size and min(of) < before]
    if not gone:
        return []
    what = f"{listed(gone, _SHOWN)}: `when.rank` names no rank that the run still has"
    return [f"{what} ({before} before, {ranks.size} now): nothing more comes of it"]


def with_sums(held: Mapping[str, Any], sums: Mapping[str, Any]) -> dict[str, Any]:
    """What the parts of a run hold, with these states of an Average in their places: ``train.means``."""
    found = dict(held)
    for place, state in sums.items():
        *parts, last = place.split(".")
        node = found
        for part in parts:
            node[part] = dict(node[part])
            node = node[part]
        node[last] = state
    return found


def _of_one(tree: Mapping[str, Any]) -> RankState:
    """Of a run of one process, which holds them in the ordinary places."""
    sums = {place: reduce(getitem, place.split("."), tree["held"]) for place in tree.get(SUMS, [])}
    return {"generators": tree["generators"], "hooks": tree["hooks"], "sums": sums, "kept": []}


def _without_sums(
    tree: Mapping[str, Any], before: Sequence[RankState], of_batch: Collection[str]
) -> RankState:
    none = {"changed": 0, "total": 0}
    sites = {
        hook: {path: {**site, **(none if hook in of_batch else {})} for path, site in modules.items()}
        for hook, modules in tree["hooks"]["sites"].items()
    }
    hooks = {**tree["hooks"], "sites": sites, "sink": {**tree["hooks"]["sink"], "bytes": {}}}
    return {
        "hooks": hooks,
        "sums": {place: Average().state_dict() for place in before[0]["sums"]},
        "kept": [],
    }


def _together(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of an Average that has seen what all of these have."""
    whole = Average()
    for state in states:
        of_rank = Average()
        of_rank.load_state_dict(state)
        whole.include(of_rank)
    return whole.state_dict()


def _hooks_together(states: Sequence[Mapping[str, Any]], of_batch: Collection[str]) -> dict[str, Any]:
    """Of rank 0, which has met every batch, with what the hooks have done on all ranks."""

    def site(hook: str, path: str) -> dict[str, Any]:
        found = [state["sites"][hook][path] for state in states]
        most = {key: max(each[key] for each in found) for key in ("fired", "idle")}
        if hook not in of_batch:  # the same on each
            return {**found[0], **most}
        sums = {key: sum(each[key] for each in found) for key in ("changed", "total")}
        return {**found[0], **most, **sums}

    main = states[0]
    sites = {hook: {path: site(hook, path) for path in modules} for hook, modules in main["sites"].items()}
    sinks = [state["sink"] for state in states]
    counted = dict[str, int]()
    for sink in sinks:
        for hook, size in sink["bytes"].items():
            counted[hook] = counted.get(hook, 0) + size
    texts = sorted({text for sink in sinks for text in sink["texts"]})
    return {**main, "sites": sites, "sink": {**main["sink"], "bytes": counted, "texts": texts}}
