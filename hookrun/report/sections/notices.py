"""The notices at the top of a run's page: how it ended, failed checks, hooks that did nothing, notes on the page."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hookrun.actions.check import verdict
from hookrun.report.draw.text import number
from hookrun.report.facts import MOST_HOOKS, Facts
from hookrun.report.lines import is_number

MOST_SPENT = 200
"""Notes on captures that ended early."""

_ENDS = {"interrupted": "It was interrupted", "stopped": "It was stopped by a check"}


def outcome(facts: Facts) -> dict[str, Any] | None:
    """How the run ended, unless it is done: it failed, was stopped, was cut off, or is still running.

    reason:  the error or the message that ended it; "" if status.json has none
    command: the command that makes the page again
    """
    status, reason = str(facts.status["status"]), str(facts.status.get("reason") or "")
    notice = {"title": "", "is_mild": status in _ENDS, "reason": reason, "text": "", "command": ""}
    if reason:
        return {**notice, "title": _ENDS.get(status, "It failed")}
    if facts.cut_off:
        return {**notice, "title": "It was cut off", "text": facts.cut_off}
    if status == "running":
        text, command = (
            "This page shows the state when it was made. To update it:",
            f"python -m hookrun.report {facts.path}",
        )
        return {
            **notice,
            "title": "The run is not finished",
            "is_mild": True,
            "text": text,
            "command": command,
        }
    return None


def failed_checks(facts: Facts) -> list[dict[str, Any]]:
    """The first failure of each check at each module, in the order in which modules first failed.

    cls:       the class of the module; "" if the record does not say
    last_good: the last module before it in the same pass at which the check passed, with its class; "" if there is none
    times:     how often it failed there
    """
    failures = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for record in facts.stats.records:
        if record.get("ok") is False:
            failures[record["hook"], f"{record['module']}{record.get('path') or ''}"].append(record)
    return [
        {
            "hook": hook,
            "module": module,
            "cls": str(records[0].get("class") or ""),
            "last_good": str(records[0].get("last_good") or ""),
            "epoch": records[0]["epoch"],
            "step": records[0]["step"],
            "mode": records[0]["mode"],
            "times": len(records),
            "policy": str(records[0].get("policy") or ""),
            "message": _message(records[0]),
        }
        for (hook, module), records in failures.items()
    ]


def _message(record: dict[str, Any]) -> str:
    """What a check required, and what it found, if the record says that."""
    is_whole = isinstance(record.get("message"), str) and is_number(record.get("least"))
    return (
        verdict(record) if is_whole and is_number(record.get("largest")) else str(record.get("message") or "")
    )


def inactive_hooks(facts: Facts) -> list[tuple[str, str, list[str]]]:
    """(hook, why it did nothing, at which of the modules that it matched)."""
    modules = defaultdict[tuple[str, str], list[str]](list)
    for site in facts.hooks.sites:
        if site.silent:
            modules[site.hook, site.silent].append(site.module)
    return [(hook, why, paths) for (hook, why), paths in modules.items()][:MOST_HOOKS]


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
