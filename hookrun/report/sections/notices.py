"""The notices at the top of a run's page: how it ended, failed checks, hooks that did nothing, notes on the page."""

from __future__ import annotations

from typing import Any

from hookrun.engine.actions.check import verdict
from hookrun.report.draw.text import number
from hookrun.report.facts import MOST_HOOKS, RunData
from hookrun.report.lines import is_number, is_place
from hookrun.report.sweep_facts import SweepData

MOST_SPENT = 200
"""Notes on captures that ended early."""


def outcome(facts: RunData) -> bool:
    """Whether the run is not done: it failed, was stopped, was cut off, or is still running."""
    return bool(facts.status.get("reason") or facts.cut_off or facts.status["status"] == "running")


def of_jobs(facts: SweepData) -> bool:
    """Whether jobs of a sweep are not finished or did not end well."""
    return bool(facts.unfinished or facts.failed)


def failed_checks(facts: RunData) -> list[dict[str, Any]]:
    """The first failure of each check at each module, in the order in which modules first failed.

    cls:       the class of the module; "" if the record does not say
    last_good: the last module before it in the same pass at which the check passed, with its class; "" if there is none
    times:     how often it failed there
    rule:      of a statistic, ``max``; "" for a check of elements
    units:     the numbers of the units that broke the rule last
    """
    failures: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in facts.stats.records:
        if record.get("ok") is False:
            module = f"{record['module']}{record.get('path') or ''}"
            site = record["hook"], module, str(record.get("rule") or "")
            failures.setdefault(site, []).append(record)
    rows: list[dict[str, Any]] = []
    for (hook, module, rule), records in failures.items():
        first = records[0]
        units = records[-1].get("units")
        rows.append(
            {
                "hook": hook,
                "module": module,
                "cls": str(first.get("class") or ""),
                "last_good": str(first.get("last_good") or ""),
                "epoch": first["epoch"],
                "step": first["step"],
                "last_step": records[-1]["step"],
                "rule": rule,
                "units": list(filter(is_place, units)) if isinstance(units, list) else [],
                "mode": first["mode"],
                "times": len(records),
                "policy": str(first.get("policy") or ""),
                "message": _message(first),
            }
        )
    return rows


def _message(record: dict[str, Any]) -> str:
    """What a failed check says; the record may be a stranger's."""
    message = record.get("message")
    if isinstance(message, str) and is_number(record.get("least")) and is_number(record.get("largest")):
        return verdict(record)
    return str(message or "")


def inactive_hooks(facts: RunData) -> list[tuple[str, str, list[str]]]:
    """(hook, why it did nothing, at which of the modules that it matched)."""
    modules: dict[tuple[str, str], list[str]] = {}
    for site in facts.hooks.sites:
        if site.silent:
            modules.setdefault((site.hook, site.silent), []).append(site.module)
    return [(*silent, of_hook) for silent, of_hook in modules.items()][:MOST_HOOKS]


def notes(facts: RunData) -> list[str]:
    """What the run did not compute, files that could not be read, and captures that ended early."""
    notes = [*facts.notes]
    if facts.plan.no_output is not None:
        notes.insert(0, facts.plan.no_output)
    ended = [record for record in facts.stats.records if isinstance(record.get("spent"), int)]
    for record in ended[:MOST_SPENT]:
        notes.append(
            f"{record['hook']} captured nothing after epoch {record['epoch']}, step {record['step']} "
            f"({record['mode']} mode): its max_bytes of {number(record['spent'])} were used up"
        )
    return notes
