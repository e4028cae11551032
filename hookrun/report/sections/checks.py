"""The checks that failed: what they required, what they found, and where and when they first failed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hookrun.actions.check import verdict
from hookrun.report.facts import Facts
from hookrun.report.lines import is_number
from hookrun.report.section import ReportSection


def _failures(facts: Facts) -> list[dict[str, Any]] | None:
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
    ] or None


def _message(record: dict[str, Any]) -> str:
    """What a check required, and what it found, if the record says that."""
    is_whole = isinstance(record.get("message"), str) and is_number(record.get("least"))
    return (
        verdict(record) if is_whole and is_number(record.get("largest")) else str(record.get("message") or "")
    )


SECTION = ReportSection("checks", "", _failures, "checks.html")
