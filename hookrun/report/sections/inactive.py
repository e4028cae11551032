"""The hooks that matched modules but did nothing there."""

from __future__ import annotations

from collections import defaultdict

from hookrun.report.facts import MOST_HOOKS, Facts
from hookrun.report.section import ReportSection


def _inactive(facts: Facts) -> list[tuple[str, str, list[str]]] | None:
    """(hook, why it did nothing, at which modules)."""
    modules = defaultdict[tuple[str, str], list[str]](list)
    for site in facts.hooks.sites:
        if site.silent:
            modules[site.hook, site.silent].append(site.module)
    return [(hook, why, paths) for (hook, why), paths in modules.items()][:MOST_HOOKS] or None


SECTION = ReportSection("inactive", "", _inactive, "inactive.html")
