"""The checks that failed: what they required, what they found, and where and when they first did."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hookrun.actions.check import verdict
from hookrun.report.facts import Facts
from hookrun.report.section import ReportSection


@dataclass(frozen=True)
class CheckFailure:
    """The first failure of a check at one module, and the number of its failures there."""

    hook: str
    module: str
    epoch: int
    step: int
    mode: str
    message: str
    policy: str
    times: int = 1


def _failures(facts: Facts) -> list[CheckFailure] | None:
    """By the order of the first failures."""
    found = dict[tuple[str, str], CheckFailure]()
    for record in facts.stats.records:
        if record.get("ok") is not False:
            continue
        key = (record["hook"], f"{record['module']}{record.get('path', '')}")
        if key in found:
            found[key] = replace(found[key], times=found[key].times + 1)
        else:
            message = verdict(record) if "least" in record else str(record.get("message", ""))
            when = (record["epoch"], record["step"], record["mode"])
            found[key] = CheckFailure(*key, *when, message, str(record.get("policy", "")))
    return list(found.values()) or None


SECTION = ReportSection("checks", "", _failures, "checks.html")
