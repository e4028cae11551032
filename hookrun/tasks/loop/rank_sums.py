"""What the ranks of a run sum and agree on, between two batches. Every rank calls these at the same places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from hookrun.ranks.alone import Ranks
from hookrun.runtime import Installation
from hookrun.store.position import PositionRecord
from hookrun.store.rank_trees import gathered_trees
from hookrun.store.writer import Count
from hookrun.tasks.loop.average import Average


def summed(average: Average, none: Callable[[], Average], ranks: Ranks) -> Average:
    """What all ranks have seen, together. A rank without rows has seen nothing.

    none: makes the means of the same metrics, of no sample
    """
    if not ranks.several:
        return average
    whole = none()
    for state in gathered_trees(ranks, average.state_dict()):
        of_rank = none()
        of_rank.load_state_dict(state)
        whole.include(of_rank)
    return whole


def draws_of_main(hooks: Installation, ranks: Ranks) -> None:
    """Every hook that draws goes on with the draw that comes next on rank 0, which has rows of every batch."""
    drawing = [site for site in hooks.sites if site.draws]
    if not drawing:
        return
    places = ranks.gathered([site.draws_place for site in drawing])[0]
    for site, (draws, total) in zip(drawing, places, strict=True):
        site.draws_place = (draws, total)


def agreed_stop(stop: str | None, ranks: Ranks) -> str | None:
    """Why the run is to stop: the reason of the first rank that has one."""
    if not ranks.largest([stop is not None])[0]:
        return None
    reasons = ranks.gathered(stop)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None), None)


def effects_of_all(hooks: Installation, ranks: Ranks) -> None:
    """What hooks did, of the rows of all ranks; a parameter's gradient is the same on each."""
    if not ranks.several:
        return
    sites = [site for site in hooks.sites if site.hook_type.batch]
    counted = ranks.total([number for site in sites for number in (int(site.changed), site.total)])
    chosen = [site for site in hooks.sites if site.spec.keys.when.rank is not None]
    fired = ranks.largest([number for site in chosen for number in (site.fired, site.idle)]) if chosen else []
    for place, site in enumerate(chosen):  # on the ranks that they are for
        site.fired, site.idle = fired[2 * place], fired[2 * place + 1]
    for place, site in enumerate(sites):
        site.changed, site.total = int(counted[2 * place]), int(counted[2 * place + 1])


def bytes_of_all(counted: Counter[str], of_rows: Collection[str], ranks: Ranks) -> None:
    """The bytes that hooks counted, of the rows of all ranks; what is the same on each counts once."""
    names = sorted(of_rows)
    for name, total in zip(names, ranks.total([counted[name] for name in names]), strict=True):
        if total:
            counted[name] = int(total)


def counts_of_all(
    counts: dict[tuple[str, str], Count], ranks: Ranks, reached: PositionRecord | None = None
) -> None:
    """What every rank captured, counted as one process counts it: rows and bytes add up, and firings are the same.

    reached: how far the captures reached when the run went on: there may have been more ranks then
    """
    mine = [[*key, each.tensors, each.bytes, each.rows] for key, each in counts.items()]
    found = ranks.gathered(mine)
    for absent in () if reached is None else reached.captures.others[ranks.size - 1 :]:
        modules = ((hook, *each) for hook, of in absent.counts.items() for each in of.items())
        found.append([[hook, module, *counted] for hook, module, counted in modules])
    for rank, lines in enumerate(found):
        for hook, module, tensors, size, rows in lines if rank != ranks.rank else ():
            each = counts.setdefault((hook, module), Count())
            each.tensors = max(each.tensors, tensors)
            each.bytes += size
            each.rows += rows
