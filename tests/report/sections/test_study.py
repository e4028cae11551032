"""The results of an optimizing sweeper on the page."""

from __future__ import annotations

from pathlib import Path

from hookrun.report.sections.study import SECTION
from hookrun.report.study import Trial
from hookrun.report.sweep_facts import SweepFacts


def facts(*values: float | None) -> SweepFacts:
    trials = [Trial(n, str(n), {"lr": "0.1"}, value) for n, value in enumerate(values)]
    return SweepFacts(Path(), [], {}, chosen=trials)


def test_trials_without_a_value_are_counted_and_not_drawn() -> None:
    found = SECTION.build(facts(0.5, None, 0.25))
    assert (found.trials, found.without) == (3, 1)
    (figure,) = found.figures  # one value of the key: nothing has an importance
    assert figure.title == "objective by trial" and figure.table.rows == (("0", "0.5"), ("2", "0.25"))


def test_without_any_value_there_is_no_section() -> None:
    assert SECTION.build(facts(None)) is None and SECTION.build(facts()) is None
