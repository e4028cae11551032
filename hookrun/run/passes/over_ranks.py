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
from hookrun.engine.values.folded import Folded
from hookrun.engine.values.folding import Folding, Wanted
from hookrun.errors import listed
from hookrun.run.passes.average import Average
from hookrun.run.passes.step_changes import summed
from hookrun.run.ranks import Ranks
from hookrun.store.captures.write import Count
from hookrun.store.states.position import PositionRecord
from hookrun.store.states.tree import flatten, unflatten

RANKS = "ranks"
"""The key of the list of RankStates in a state."""


RankState = Mapping[str, Any]
"""The keys `generators`, `hooks` and `sums` (key path in the parts of tasks -> the state of an Average)."""


def gathered_trees(ranks: Ranks, tree: Any) -> list[Any]:
    """The trees of plain values and tensors of all ranks, in the order of the ranks, with tensors on the CPU.

    Raises NotPlain for a value that a tree cannot hold.
    """
    values, tensors = flatten(tree)
    mine = [values, {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}]
    return [unflatten(values, tensors.__getitem__) for values, tensors in ranks.gathered(mine)]


def draws_of_main(hooks: Installation, ranks: Ranks) -> None:
    """Set the random draws of hooks to the position of rank 0, which has rows of every batch."""
    drawing = [site for site in hooks.sites if site.draws]
    if not drawing:
        return
    places = ranks.gathered([site.draws_place for site in drawing])[0]
    for site, (draws, total) in zip(drawing, places, strict=True):
        site.draws_place = (draws, total)


def agreed_stop(stop: str | None, ranks: Ranks) -> str | None:
    """Why the run is to stop: the reason of the first rank with a reason; None: it continues."""
    if not ranks.largest([stop is not None])[0]:
        return None
    for rank, text in enumerate(ranks.gathered(stop)):
        if text is not None:
            return f"rank {rank}: {text}"
    return None


def effects_of_all(hooks: Installation, ranks: Ranks) -> None:
    """Set the counts of hooks to those of all ranks: changed elements are summed, firings those of the rank with most.

    A hook may fire on some ranks only: by `when.rank`, or where the model calls its module for some rows. Changes in
    the gradients of parameters are equal already.
    """
    sites = hooks.sites
    of_batch = [site for site in sites if site.hook_type.batch]
    changed = list[float]()
    for site in of_batch:
        changed += [int(site.changed), site.total]
    changed = ranks.total(changed)
    for place, site in enumerate(of_batch):
        site.changed = int(changed[2 * place])
        site.total = int(changed[2 * place + 1])
    of_ranks = ranks.gathered([site.by_step for site in of_batch])
    for site, *by_step in zip(of_batch, *of_ranks, strict=True):
        site.by_step = summed(by_step)
    fired = list[int]()
    for site in sites:
        fired += [site.fired, site.fired - site.idle]
    fired = ranks.largest(fired)
    for place, site in enumerate(sites):
        site.fired = fired[2 * place]
        site.idle = site.fired - fired[2 * place + 1]


def folds_of(hooks: Installation, states: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Folded]]:
    """Hook -> module -> what its fold has accumulated on all ranks.

    states: of each rank, with `sites` as in `Installation.state_dict`
    """
    found: dict[str, dict[str, Folded]] = {}
    for site in hooks.sites:
        if site.fold is None:
            continue
        of_ranks = [state["sites"][site.hook_name][site.path]["fold"] for state in states]
        result = _joined(of_ranks, site.fold.wanted).result()
        if result is not None:
            found.setdefault(site.hook_name, {})[site.path] = result
    return found


def folds_of_all(hooks: Installation, ranks: Ranks) -> dict[str, dict[str, Folded]]:
    """The same at this moment; every rank calls it."""
    sites: dict[str, dict[str, Any]] = {}
    for site in hooks.sites:
        if site.fold is not None:
            sites.setdefault(site.hook_name, {})[site.path] = {"fold": site.fold.state_dict()}
    mine = {"sites": sites}
    return folds_of(hooks, gathered_trees(ranks, mine) if ranks.several and sites else [mine])


def _joined(states: Iterable[Mapping[str, Any]], wanted: Wanted) -> Folding:
    """What was accumulated in several states of a fold together."""
    whole = Folding(wanted)
    for state in states:
        whole.load_state_dict(state)
    return whole


def bytes_of_all(counted: Counter[str], rank_local: Collection[str], ranks: Ranks) -> None:
    """Set the counted bytes of these hooks to the sum over all ranks.

    rank_local: the hooks that see only a rank's own rows; the bytes of other hooks are the same on every rank
    """
    names = sorted(rank_local)
    totals = ranks.total([counted[name] for name in names])
    for name, total in zip(names, totals, strict=True):
        if total:
            counted[name] = int(total)


def counts_of_all(
    counts: dict[tuple[str, str], Count], ranks: Ranks, reached: PositionRecord | None = None
) -> None:
    """Set the counts of captures to their totals over all ranks: rows and bytes are summed, tensors are not.

    reached: the position of the captures when the run was resumed, with the counts of ranks that it had then
    """
    mine = [[*key, count.tensors, count.bytes, count.rows] for key, count in counts.items()]
    lines: list[Any] = []
    for rank, counted in enumerate(ranks.gathered(mine)):
        if rank != ranks.rank:
            lines += counted
    if reached is not None:
        for absent in reached.captures.others[ranks.size - 1 :]:
            for hook, modules in absent.counts.items():
                lines += [[hook, module, *counted] for module, counted in modules.items()]
    for hook, module, tensors, size, rows in lines:
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
    main = before[0]
    summed = before if ranks.is_main else []
    sums: dict[str, Any] = {}
    for place in main["sums"]:
        sums[place] = sum_of(state["sums"][place] for state in summed).state_dict()
    part = {"hooks": _hooks_of_all([state["hooks"] for state in before], ranks, of_batch), "sums": sums}
    if ranks.is_main:
        part["generators"] = main["generators"]
    return part


def left_out(before: int, ranks: Ranks, hooks: Mapping[str, Collection[int]]) -> list[str]:
    """A note on hooks that act only on ranks which the run does not have anymore.

    before: the number of ranks that it had
    hooks:  name -> the ranks on which it acts (`when.rank`)
    """
    gone = [name for name, acting in hooks.items() if ranks.size <= min(acting) < before]
    if not gone:
        return []
    return [
        f"{listed(gone)}: `when.rank` names only ranks that the run does not have anymore ({before} before, "
        f"{ranks.size} now): it does not act anymore"
    ]


def with_sums(parts: dict[str, Any], sums: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a state, in which the states of Averages are replaced.

    sums: key path, such as ``train.means`` -> the state of the Average
    """
    for place, state in sums.items():
        *path, last = place.split(".")
        node = parts
        for key in path:
            node = node[key]
        node[last] = state
    return parts


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
    main = states[0]
    sites: dict[str, dict[str, Any]] = {}
    for hook, modules in main["sites"].items():
        is_of_rows = hook in of_batch  # the others have the same counts on every rank
        sites[hook] = {}
        for path, counts in modules.items():
            of_ranks = [state["sites"][hook][path] for state in states]
            merged = dict(counts)
            for key in ("fired", "idle"):
                merged[key] = max(each[key] for each in of_ranks)
            if is_of_rows:
                for key in ("changed", "total"):
                    merged[key] = sum(each[key] for each in of_ranks) if ranks.is_main else 0
                by_step = summed(each.get("by_step", ()) for each in of_ranks)
                merged.pop("by_step", None)
                if by_step and ranks.is_main:
                    merged["by_step"] = by_step
                if "fold" in merged:
                    folds = [each["fold"] for each in of_ranks if ranks.is_main]
                    merged["fold"] = _joined(folds, Wanted()).state_dict()
            sites[hook][path] = merged
    return {
        **main,
        "sites": sites,
        "sink": _sink_of_all([state["sink"] for state in states], ranks, of_batch),
    }


def _sink_of_all(
    states: Sequence[Mapping[str, Any]], ranks: Ranks, of_batch: Collection[str]
) -> dict[str, Any]:
    counted = Counter[str]()
    texts = set[Any]()
    for state in states:
        texts.update(state["texts"])
        if ranks.is_main:
            counted.update(state["bytes"])
    budgets: dict[str, Any] = {}
    for hook in states[0]["budgets"]:
        of_ranks = [state["budgets"][hook] for state in states]
        used = [budget["used"] for budget in of_ranks]
        part = sum(used) // ranks.size if hook in of_batch else max(used)
        budgets[hook] = {"used": part, "spent": all(budget["spent"] for budget in of_ranks)}
    return {**states[0], "bytes": dict(counted), "texts": sorted(texts), "budgets": budgets}
