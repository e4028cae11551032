"""The checks that failed: what they required, what they found, and where and when they first failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hookrun.actions.check import verdict
from hookrun.report.facts import Facts
from hookrun.report.lines import is_number
from hookrun.report.section import ReportSection


@dataclass(frozen=True)
class CheckFailure:
    """The first failure of a check at one module, and the number of its failures there.

    cls:       the class of the module; "" if the record does not say
    last_good: the last module before it in the same pass at which the check passed, with its class; "" if there is none
    """

    hook: str
    module: str
    epoch: int
    step: int
    mode: str
    message: str
    policy: str
    cls: str = ""
    last_good: str = ""
    times: int = 1


def _failures(facts: Facts) -> list[CheckFailure] | None:
    """The failures, in the order in which modules first failed."""
    found = dict[tuple[str, str], CheckFailure]()
    for record in facts.stats.records:
        if record.get("ok") is not False:
            continue
        key = (record["hook"], f"{record['module']}{record.get('path') or ''}")
        if key in found:
            found[key] = replace(found[key], times=found[key].times + 1)
        else:
            when = (record["epoch"], record["step"], record["mode"])
            policy, cls, last_good = (
                str(record.get(each) or "") for each in ("policy", "class", "last_good")
            )
            found[key] = CheckFailure(*key, *when, _message(record), policy, cls, last_good)
    return list(found.values()) or None


def _message(record: Mapping[str, Any]) -> str:
    """What a check required, and what it found, if the record says that."""
    found = isinstance(record.get("message"), str) and all(
        map(is_number, map(record.get, ("least", "largest")))
    )
    return verdict(record) if found else str(record.get("message") or "")


SECTION = ReportSection("checks", "", _failures, "checks.html")
