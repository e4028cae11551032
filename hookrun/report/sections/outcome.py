"""How the run ended, unless it is done: it failed, was stopped, was cut off, or is still running."""

from __future__ import annotations

from dataclasses import dataclass

from hookrun.report.facts import Facts
from hookrun.report.section import ReportSection

_ENDS = {"interrupted": "It was interrupted", "stopped": "It was stopped by a check"}


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    reason:  the error or the message that ended it; ``""`` if status.json has none
    text:    an explanation
    command: the command that makes the page again
    """

    title: str
    is_mild: bool = False
    reason: str = ""
    text: str = ""
    command: str = ""


def _outcome(facts: Facts) -> Outcome | None:
    status = str(facts.status["status"])
    if reason := facts.status.get("reason"):
        return Outcome(_ENDS.get(status, "It failed"), is_mild=status in _ENDS, reason=str(reason))
    if facts.cut_off:
        return Outcome("It was cut off", text=facts.cut_off)
    if status == "running":
        text = "This page shows the state when it was made. To update it:"
        return Outcome(
            "The run is not finished",
            is_mild=True,
            text=text,
            command=f"python -m hookrun.report {facts.path}",
        )
    return None


SECTION = ReportSection("outcome", "", _outcome, "outcome.html")
