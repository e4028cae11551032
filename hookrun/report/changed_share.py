"""The share of elements that the edits of a hook changed, over the steps of a training, as curves by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hookrun.engine.actions import actions
from hookrun.errors import counted
from hookrun.report.curves import MOST_OPEN, charts
from hookrun.report.draw.charts import Figure, Series
from hookrun.report.draw.text import module_name
from hookrun.report.facts import RunData, on_parameters
from hookrun.store.records import PlannedHookRecord, SiteRecord

MOST_CURVES = 200
TITLE = "share of changed elements"
ORDER = "those with the largest mean share come first"
NOT_COUNTED = "How many elements it changed is not counted inside of compiled graphs (compute.compile=true)."


@dataclass(frozen=True)
class ChangedShare:
    """What the page shows of a hook's changes.

    figures: of the layers that changed most
    folded:  of the others
    title:   of the folded figures
    note:    why changes are missing, or ""
    """

    figures: Sequence[Figure] = ()
    folded: Sequence[Figure] = ()
    title: str = ""
    note: str = ""


NOTHING_CHANGED = ChangedShare()


def changed_share(hook: PlannedHookRecord, facts: RunData) -> ChangedShare:
    """The curves of a hook, those of the layers with the largest mean share first; empty without at least two steps."""
    sites = [
        facts.sites[hook.name, match.path] for match in hook.targets if (hook.name, match.path) in facts.sites
    ]
    curves = [_curve(site) for site in sites if site.by_step]
    curves.sort(key=lambda curve: sum(curve.y) / len(curve.y), reverse=True)
    if max((len(curve.x) for curve in curves), default=0) < 2:
        return ChangedShare(note=_why_missing(hook, sites, facts))
    noun = "parameter" if on_parameters(hook.hook) else "layer"
    last = min(len(curves), MOST_CURVES)
    title = f"{TITLE}: {counted(last - MOST_OPEN, noun)} that changed less"
    if last < len(curves):
        title += f"; hooks.json has {len(curves) - last:,} more"
    drawing = partial(
        charts, TITLE, y="changed elements, %", total=len(curves), noun=noun, order=ORDER, log=False
    )
    figures = list(drawing(curves[:MOST_OPEN]))
    folded = list(drawing(curves[MOST_OPEN:last], first=MOST_OPEN))
    return ChangedShare(figures, folded, title)


def _curve(site: SiteRecord) -> Series:
    """The share in percent on each step."""
    steps: list[float] = []
    shares: list[float] = []
    for step, changed, total in sorted(site.by_step):
        steps.append(step)
        shares.append(100 * changed / max(total, 1))
    return Series(module_name(site.module), steps, shares)


def _why_missing(hook: PlannedHookRecord, sites: Sequence[SiteRecord], facts: RunData) -> str:
    """A note for a hook that edits inside of compiled graphs."""
    action = actions().get(hook.action or "")
    edits = action is not None and not action.observes
    if not edits or not facts.named("compute", "compile"):
        return ""
    fired = sum(site.fired for site in sites)
    total = sum(site.total for site in sites)
    return NOT_COUNTED if fired and not total else ""
