"""The summary at the end of a run: how often each hook fired, what it changed or captured, which hooks did nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hookrun.errors import counted, listed
from hookrun.plan.table import SHOWN, size
from hookrun.runtime import Installation
from hookrun.runtime.install import describe_inactive
from hookrun.runtime.site import HookSite
from hookrun.tasks.loop.running import Running


def summary(running: Running) -> list[str]:
    """The lines of the summary."""
    warnings = (f"WARNING: {line}" for line in inactive_lines(running.hooks))
    return [*hook_lines(running), *warnings, f"run directory: {running.run_dir.path}"]


def hook_lines(running: Running) -> Iterator[str]:
    """Lines for each hook: how often it fired on each module, and how much it changed, captured or counted."""
    by_hook = defaultdict[str, list[HookSite]](list)
    for site in running.hooks.sites:
        by_hook[site.hook_name].append(site)
    fired = running.hooks.fired
    for planned in running.hooks.plan.hooks:
        sites = by_hook[planned.spec.name]
        counts = [f"{site.path or '(root)'} x{fired[site.hook_name, site.path]}" for site in sites]
        what = f"{planned.spec.hook_type}, {planned.spec.action.action_name}"
        yield f"{planned.spec.name} ({what}) fired: {listed(counts, SHOWN)}"
        total = sum(site.total for site in sites)
        if total:
            changed = int(sum(int(site.changed) for site in sites))
            steps = "on the logged steps"
            yield f"    changed {changed:,} of {total:,} elements ({changed / total:.1%}) {steps}"
        if planned.spec.action.captures:
            kept = [
                count for key, count in running.run_dir.captures.counts.items() if key[0] == planned.spec.name
            ]
            tensors, count = sum(each.tensors for each in kept), sum(each.bytes for each in kept)
            yield f"    captured {counted(tensors, 'tensor')}, {size(count)}"
        if of_hook := running.sink.bytes[planned.spec.name]:
            yield f"    counted {size(of_hook)}"


def inactive_lines(hooks: Installation) -> list[str]:
    """A line for each hook that matched modules but did nothing."""
    return describe_inactive(hooks.inactive, SHOWN)
