"""The notices at the top of a run's page: how it ended, failed checks, hooks that did nothing, notes on the page."""

from __future__ import annotations

from typing import Any

from hookrun.engine.actions.check import verdict
from hookrun.report.draw.text import number
from hookrun.report.facts import MOST_HOOKS, Facts
from hookrun.report.lines import is_number
from hookrun.report.sweep_facts import SweepFacts
from hookrun.store.records import grouped

MOST_SPENT = 200
"""Notes on captures that ended early."""


def outcome(facts: Facts) -> bool:
    """Whether the run is not done: it failed, was stopped, was cut off, or is still running."""
    return bool(facts.status.get("reason") or facts.cut_off or facts.status["status"] == "running")


def of_jobs(facts: SweepFacts) -> bool:
    """Whether jobs of a sweep are not finished or did not end well."""
    return bool(facts.unfinished or facts.failed)


def failed_checks(facts: Facts) -> list[dict[str, Any]]:
    """The first failure of each check at each module, in the order in which modules first failed.

    cls:       the class of the module; "" if the record does not say
    last_good: the last module before it in the same pass at which the check passed, with its class; "" if there is none
    times:     how often it failed there
    """
    failures = grouped(
        (record for record in facts.stats.records if record.get("ok") is False),
        lambda record: (record["hook"], f"{record['module']}{record.get('path') or ''}"),
    )
    return [
        {
            "hook": hook,
            "module": module,
            "cls": str(first.get("class") or ""),
            "last_good": str(first.get("last_good") or ""),
            "epoch": first["epoch"],
            "step": first["step"],
            "mode": first["mode"],
            "times": 1 + len(others),
            "policy": str(first.get("policy") or ""),
            "message": verdict(first)
            if isinstance(first.get("message"), str)
            and is_number(first.get("least"))
            and is_number(first.get("largest"))
            else str(first.get("message") or ""),
        }
        for (hook, module), (first, *others) in failures.items()
    ]


def inactive_hooks(facts: Facts) -> list[tuple[str, str, list[str]]]:
    """(hook, why it did nothing, at which of the modules that it matched)."""
    silent = (site for site in facts.hooks.sites if site.silent)
    return [
        (hook, why, [site.module for site in sites])
        for (hook, why), sites in grouped(silent, lambda site: (site.hook, str(site.silent))).items()
    ][:MOST_HOOKS]


def notes(facts: Facts) -> list[str]:
    """What the run did not compute, files that could not be read, and captures that ended early."""
    spent = [
        f"{record['hook']} captured nothing after epoch {record['epoch']}, step {record['step']} "
        f"({record['mode']} mode): its max_bytes of {number(record['spent'])} were used up"
        for record in facts.stats.records
        if isinstance(record.get("spent"), int)
    ]
    stopped = [] if facts.plan.no_output is None else [facts.plan.no_output]
    return [*stopped, *facts.notes, *spent[:MOST_SPENT]]
