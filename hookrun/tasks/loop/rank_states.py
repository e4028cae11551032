"""The parts of a resumable state that differ from rank to rank, and their distribution when a run is resumed.

Weights, optimizer, schedules and counts are the same on every rank, and are saved once. The other, small parts are
saved for each rank. A run that is resumed with the same number of ranks is bit-identical; with another number, rank
0 continues with the sums of all ranks, and the other ranks start with empty sums.
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
"""The key of the list of RankStates in a state; a run of one process does not have it."""

SUMS = "sums"
"""The key of the list of key paths in `held` at which the sums over batches are."""

_SHOWN = 4

RankState = Mapping[str, Any]
"""The keys `generators`, `hooks`, `sums` (key path in `held` -> the state of an Average) and `kept` (lines)."""


def for_rank(tree: Mapping[str, Any], ranks: Ranks, of_batch: Collection[str]) -> RankState:
    """The part of a saved state from which this rank continues.

    tree:     the saved state
    of_batch: the names of the hooks that count changes in the rank's own rows

    `generators` is missing if the run did not have this rank before. On rank 0, `kept` has the lines that all ranks
    had kept, if their number has changed; rank 0 has to write them.
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
    """A note on hooks that act only on ranks which the run does not have anymore.

    hooks: name -> the ranks on which it acts (`when.rank`)
    """
    before = len(tree.get(RANKS) or [None])
    gone = [name for name, of in hooks.items() if min(of) >= ranks.size and min(of) < before]
    if not gone:
        return []
    what = f"{listed(gone, _SHOWN)}: `when.rank` names only ranks that the run does not have anymore"
    return [f"{what} ({before} before, {ranks.size} now): it does not act anymore"]


def with_sums(held: Mapping[str, Any], sums: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a state, with the states of Averages replaced.

    sums: key path, such as ``train.means`` -> the state of the Average
    """
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
    """The RankState of a run of one process, whose state has these parts at other keys."""
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
    """The state of the sum of several Averages."""
    whole = Average()
    for state in states:
        of_rank = Average()
        of_rank.load_state_dict(state)
        whole.include(of_rank)
    return whole.state_dict()


def _hooks_together(states: Sequence[Mapping[str, Any]], of_batch: Collection[str]) -> dict[str, Any]:
    """The state of rank 0's hooks, which have seen every batch, with the counts of all ranks."""

    def site(hook: str, path: str) -> dict[str, Any]:
        found = [state["sites"][hook][path] for state in states]
        most = {key: max(each[key] for each in found) for key in ("fired", "idle")}
        if hook not in of_batch:  # the counts are the same on every rank
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
