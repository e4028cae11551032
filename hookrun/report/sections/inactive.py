"""The hooks that matched modules but did nothing there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hookrun.report.facts import MOST_HOOKS, Facts
from hookrun.report.section import ReportSection


@dataclass(frozen=True)
class InactiveModules:
    """The modules where a hook did nothing, and why."""

    hook: str
    why: str
    modules: tuple[str, ...]


def _inactive(facts: Facts) -> list[InactiveModules] | None:
    found = defaultdict[tuple[str, str], list[str]](list)
    for (hook, module), site in facts.sites.items():
        if site.silent:
            found[hook, site.silent].append(module)
    every = [InactiveModules(hook, why, tuple(modules)) for (hook, why), modules in found.items()]
    return every[:MOST_HOOKS] or None


SECTION = ReportSection("inactive", "", _inactive, "inactive.html")
