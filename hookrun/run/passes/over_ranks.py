"""What the ranks of a run sum, agree on and save; every rank must call the functions that communicate.

In a state, weights, optimizer, schedules and counts are the same on every rank, and are saved once. The other, small
parts are saved for each rank, also for an only one. A run that is resumed with the same number of ranks is
bit-identical; with another number, rank 0 continues with the sums of all ranks, and the others with empty sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from hookrun.engine.runtime import Installation
from hookrun.errors import listed
from hookrun.run.passes.average import Average
from hookrun.run.ranks import Ranks
from hookrun.store.captures.write import Count
from hookrun.store.states.position import PositionRecord
from hookrun.store.states.tree import flatten, unflatten

RANKS = "ranks"
"""The key of the list of RankStates in a state."""


RankState = Mapping[str, Any]
"""The keys `generators`, `hooks` and `sums` (key path in `held` -> the state of an Average)."""


def gathered_trees(ranks: Ranks, tree: Any) -> list[Any]:
    """The trees of plain values and tensors of all ranks, in the order of the ranks, with tensors on the CPU.

    Raises NotPlain for a value that a tree cannot hold.
    """
    values, tensors = flatten(tree)
    mine = [values, {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}]
    return [unflatten(values, tensors.__getitem__) for values, tensors in ranks.gathered(mine)]


def draws_of_main(hooks: Installation, ranks: Ranks) -> None:
    """Set the random draws of hooks to the position of rank 0, which has rows of every batch."""
    if drawing := [site for site in hooks.sites if site.draws]:
        places = ranks.gathered([site.draws_place for site in drawing])[0]
        for site, (draws, total) in zip(drawing, places, strict=True):
            site.draws_place = (draws, total)


def agreed_stop(stop: str | None, ranks: Ranks) -> str | None:
    """Why the run is to stop: the reason of the first rank with a reason; None: it continues."""
    if not ranks.largest([stop is not None])[0]:
        return None
    return next(
        (f"rank {rank}: {text}" for rank, text in enumerate(ranks.gathered(stop)) if text is not None), None
    )


def effects_of_all(hooks: Installation, ranks: Ranks) -> None:
    """Set the counts of hooks to those of all ranks: changed elements are summed, firings those of the rank with most.

    A hook may fire on some ranks only: by `when.rank`, or where the model calls its module for some rows. Changes in
    the gradients of parameters are equal already.
    """
    sites = [site for site in hooks.sites if site.hook_type.batch]
    counted = ranks.total([number for site in sites for number in (int(site.changed), site.total)])
    for place, site in enumerate(sites):
        site.changed, site.total = int(counted[2 * place]), int(counted[2 * place + 1])
    fired = ranks.largest([number for site in hooks.sites for number in (site.fired, site.fired - site.idle)])
    for place, site in enumerate(hooks.sites):
        site.fired, acted = fired[2 * place], fired[2 * place + 1]
        site.idle = site.fired - acted


def bytes_of_all(counted: Counter[str], of_rows: Collection[str], ranks: Ranks) -> None:
    """Set the counted bytes of these hooks to the sum over all ranks.

    of_rows: the hooks that see only a rank's own rows; the bytes of other hooks are the same on every rank
    """
    names = sorted(of_rows)
    for name, total in zip(names, ranks.total([counted[name] for name in names]), strict=True):
        if total:
            counted[name] = int(total)


def counts_of_all(
    counts: dict[tuple[str, str], Count], ranks: Ranks, reached: PositionRecord | None = None
) -> None:
    """Set the counts of captures to their totals over all ranks: rows and bytes are summed, tensors are not.

    reached: the position of the captures when the run was resumed, with the counts of ranks that it had then
    """
    mine = [[*key, count.tensors, count.bytes, count.rows] for key, count in counts.items()]
    of_ranks = ranks.gathered(mine)
    for absent in () if reached is None else reached.captures.others[ranks.size - 1 :]:
        modules = ((hook, *count) for hook, of in absent.counts.items() for count in of.items())
        of_ranks.append([[hook, module, *counted] for hook, module, counted in modules])
    for rank, lines in enumerate(of_ranks):
        for hook, module, tensors, size, rows in lines if rank != ranks.rank else ():
            count = counts.setdefault((hook, module), Count())
            count.tensors = max(count.tensors, tensors)
            count.bytes += size
            count.rows += rows


def for_rank(before: Sequence[RankState], ranks: Ranks, of_batch: Collection[str]) -> RankState:
    """The part of a saved state from which this rank continues.

    before:   the part of each rank in the saved state
    of_batch: the names of the hooks that count changes in the rank's own rows

    With another number of ranks than before, `generators` is missing on all ranks but 0.
    """
    if len(before) == ranks.size:
        return before[ranks.rank]
    own = before if ranks.is_main else []
    sums = {place: sum_of(each["sums"][place] for each in own).state_dict() for place in before[0]["sums"]}
    return {
        "hooks": _hooks_of_all([each["hooks"] for each in before], ranks, of_batch),
        "sums": sums,
        **({"generators": before[0]["generators"]} if own else {}),
    }


def left_out(before: int, ranks: Ranks, hooks: Mapping[str, Collection[int]]) -> list[str]:
    """A note on hooks that act only on ranks which the run does not have anymore.

    before: the number of ranks that it had
    hooks:  name -> the ranks on which it acts (`when.rank`)
    """
    gone = [name for name, of in hooks.items() if ranks.size <= min(of) < before]
    note = (
        f"{listed(gone)}: `when.rank` names only ranks that the run does not have anymore ({before} before, "
        f"{ranks.size} now): it does not act anymore"
    )
    return [note] if gone else []


def with_sums(held: dict[str, Any], sums: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a state, in which the states of Averages are replaced.

    sums: key path, such as ``train.means`` -> the state of the Average
    """
    for place, state in sums.items():
        *parts, last = place.split(".")
        node = held
        for part in parts:
            node = node[part]
        node[last] = state
    return held


def sum_of(states: Iterable[Mapping[str, Any]], empty: Callable[[], Average] = Average) -> Average:
    """The sum of several Averages, from their states.

    empty: makes an empty Average of the same metrics
    """
    whole = empty()
    for state in states:
        of_rank = empty()
        of_rank.load_state_dict(state)
        whole.include(of_rank)
    return whole


def _hooks_of_all(
    states: Sequence[Mapping[str, Any]], ranks: Ranks, of_batch: Collection[str]
) -> dict[str, Any]:
    """The state of rank 0's hooks, which have seen every batch, with the counts of all ranks; on other ranks with none.

    What the ranks have used of `max_bytes` is divided anew.
    """

    def site(hook: str, path: str) -> dict[str, Any]:
        counts = [state["sites"][hook][path] for state in states]
        merged = {**counts[0], **{key: max(each[key] for each in counts) for key in ("fired", "idle")}}
        if hook in of_batch:  # the others have the same counts on every rank
            merged |= {key: sum(each[key] for each in counts) * ranks.is_main for key in ("changed", "total")}
        return merged

    def budget(hook: str) -> dict[str, Any]:
        used = [sink["budgets"][hook]["used"] for sink in sinks]
        part = sum(used) // ranks.size if hook in of_batch else max(used)
        return {"used": part, "spent": all(sink["budgets"][hook]["spent"] for sink in sinks)}

    main, sinks = states[0], [state["sink"] for state in states]
    sites = {hook: {path: site(hook, path) for path in modules} for hook, modules in main["sites"].items()}
    counted = Counter[str]()
    for sink in sinks if ranks.is_main else ():
        counted.update(sink["bytes"])
    sink = {
        **main["sink"],
        "bytes": dict(counted),
        "texts": sorted({text for sink in sinks for text in sink["texts"]}),
        "budgets": {hook: budget(hook) for hook in main["sink"]["budgets"]},
    }
    return {**main, "sites": sites, "sink": sink}
