"""What the ranks of a run sum and agree on, between two batches. Every rank calls these at the same places."""

from __future__ import annotations

from collections.abc import Sequence

from hookrun.ranks.alone import Ranks
from hookrun.runtime import Installation
from hookrun.store.writer import Count
from hookrun.tasks.loop.metrics import LOSS, Average, Metric


def summed(average: Average, metrics: Sequence[Metric], ranks: Ranks) -> Average:
    """The sums of all ranks together. A rank without rows, or whose batches had none, has no sums of its own."""
    if not ranks.several:
        return average
    state = average.state_dict()
    names = list(dict.fromkeys([LOSS, *(metric.name for metric in metrics)]))
    sums = state["sums"]
    mine = [float(state["samples"])]
    for name in names:
        mine += [float(name in sums), float(sums.get(name, 0.0))]
    samples, *found = ranks.total(mine)
    there = {name: found[2 * place + 1] for place, name in enumerate(names) if found[2 * place]}
    whole = Average(metrics)
    whole.load_state_dict({"samples": int(samples), "sums": there})
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


def counts_of_all(counts: dict[tuple[str, str], Count], ranks: Ranks) -> None:
    """What every rank captured, counted as one process counts it: rows and bytes add up, and firings are the same."""
    if not ranks.several:
        return
    mine = [[*key, each.tensors, each.bytes, each.rows] for key, each in counts.items()]
    found = ranks.gathered(mine)
    for rank, lines in enumerate(found):
        for hook, module, tensors, size, rows in lines if rank != ranks.rank else ():
            each = counts.setdefault((hook, module), Count())
            each.tensors = max(each.tensors, tensors)
            each.bytes += size
            each.rows += rows
