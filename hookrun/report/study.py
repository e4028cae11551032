"""The trials of an optimizing sweeper, from study.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hookrun.store.format import STUDY
from hookrun.store.inside import is_there
from hookrun.store.read_records import read_records
from hookrun.store.records import TRIAL_LINE

MOST_TRIALS = 100_000


@dataclass(frozen=True)
class Trial:
    """One job that a sweeper chose.

    job:    its directory within the sweep's
    params: key -> the value that was chosen
    value:  value of the objective; None if the job has none
    """

    number: int
    job: str
    params: Mapping[str, str]
    value: float | None


def read_study(folder: Path) -> list[Trial]:
    """The trials in order; empty without an optimizing sweeper. StoreError if the file cannot be read."""
    if not is_there(folder / STUDY):
        return []
    lines = read_records(folder / STUDY, TRIAL_LINE)[:MOST_TRIALS]
    return [Trial(line["number"], line["job"], line["params"], line.get("value")) for line in lines]
