"""Sums and agreements over the ranks of a run, between two batches. All ranks must call these functions together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from hookrun.ranks.alone import Ranks
from hookrun.runtime import Installation
from hookrun.store.position import PositionRecord
from hookrun.store.rank_trees import gathered_trees
from hookrun.store.writer import Count
from hookrun.tasks.loop.average import Average


def summed(average: Average, empty: Callable[[], Average], ranks: Ranks) -> Average:
    """The sum of the Averages of all ranks; that of a rank without rows is empty.

    empty: makes an empty Average of the same metrics
    """
    if not ranks.several:
        return average
    whole = empty()
    for state in gathered_trees(ranks, average.state_dict()):
        of_rank = empty()
        of_rank.load_state_dict(state)
        whole.include(of_rank)
    return whole


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
    reasons = ranks.gathered(stop)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None), None)


def effects_of_all(hooks: Installation, ranks: Ranks) -> None:
    """Set the counts of hooks to those of all ranks. Hooks on gradients of parameters have equal counts already."""
    if not ranks.several:
        return
    sites = [site for site in hooks.sites if site.hook_type.batch]
    counted = ranks.total([number for site in sites for number in (int(site.changed), site.total)])
    chosen = [site for site in hooks.sites if site.spec.keys.when.rank is not None]
    fired = ranks.largest([number for site in chosen for number in (site.fired, site.idle)]) if chosen else []
    for place, site in enumerate(chosen):  # they fire only on the ranks of `when.rank`
        site.fired, site.idle = fired[2 * place], fired[2 * place + 1]
    for place, site in enumerate(sites):
        site.changed, site.total = int(counted[2 * place]), int(counted[2 * place + 1])


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
    """Set the counts of captures to those of all ranks, as in one process: rows and bytes are summed, tensors are not.

    reached: the position of the captures when the run was resumed, with the counts of ranks that it had then
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
