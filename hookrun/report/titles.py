"""The first line of a page: what a run did and which rules tripped; what jobs have in common and what was swept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hookrun.engine.keys import key_of
from hookrun.errors import counted, listed, shortened
from hookrun.report.facts import RunData
from hookrun.report.sweep_facts import JobData, SweepData
from hookrun.report.trips import trips_line
from hookrun.store.summary import RunSummary, headline, hooks_line, summary_of

MOST_COMPARED = 1_000
"""Jobs whose hooks are compared."""

_SHOWN_KEYS = 4
_SHOWN_VALUES = 5
_WORD = 40


def run_headline(facts: RunData) -> str:
    """What the run did, and how many rules tripped: ``watch · cnn · 2 rules tripped: dead at relu, spike at fc``."""
    return " · ".join(filter(None, [headline(summary_of(facts.path)), trips_line(facts)]))


def sweep_headline(facts: SweepData) -> str:
    """``clip_fc · cnn · grad clamp fc.weight, fc.bias · seed=1 · over hooks.clip_fc.max=0.001, 0.01 and 3 more``.

    What differs between jobs is left out, and all that was typed if it is not known what was swept. If hooks differ, or
    are too many to be compared, those of the first job are shown, and the line says so.
    """
    jobs = facts.compared
    summaries = [summary_of(facts.folder / job.name) for job in jobs[:MOST_COMPARED]]
    swept = list(dict.fromkeys([*facts.swept, *facts.varied]))
    line = headline(_common(summaries, swept))
    if len(set(map(hooks_line, summaries))) > 1 or len(jobs) > MOST_COMPARED:
        line += f" · hooks of job {shortened(jobs[0].name, _WORD)}"
    if swept:
        line += f" · over {'; '.join(_values_of(key, jobs) for key in swept[:_SHOWN_KEYS])}"
    if len(swept) > _SHOWN_KEYS:
        line += f"; and {counted(len(swept) - _SHOWN_KEYS, 'more key')}"
    return line


def _common(summaries: Sequence[RunSummary], swept: Collection[str]) -> RunSummary:
    """The first summary without the names that differ between all of them, and without the overrides of swept keys."""
    first = summaries[0]
    changes: dict[str, Any] = {}
    for part in ("experiment", "task", "model", "source"):
        if len({getattr(summary, part) for summary in summaries}) > 1:
            changes[part] = ""
    if not swept:
        return replace(first, overrides=(), override_count=0, **changes)
    typed = tuple(text for text in first.overrides if key_of(text) not in swept)
    left_out = len(first.overrides) - len(typed)
    return replace(first, overrides=typed, override_count=first.override_count - left_out, **changes)


def _values_of(key: str, jobs: Sequence[JobData]) -> str:
    """``seed=0, 1, 2``: a key with its values in the order of the jobs."""
    values = dict.fromkeys(job.given(key) for job in jobs)
    return f"{shortened(key)}={listed([shortened(value, _WORD) for value in values], _SHOWN_VALUES)}"
