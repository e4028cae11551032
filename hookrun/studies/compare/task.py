"""task=compare: what differs between two runs, or between the jobs of two sweeps, and where it begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from hookrun.errors import HookrunError, counted
from hookrun.studies.compare.records import COMPARE_CSV, COMPARE_JSON, label
from hookrun.studies.kit.tasks import Experiment, JobCache, TaskOfRuns

if TYPE_CHECKING:
    from hookrun.studies.compare.records import Comparison
    from hookrun.studies.kit.files import RunDir, StoredCapture
    from hookrun.studies.kit.passes import Screen, TwoRuns

_MOST_BYTES = 2**31
"""The memory that the CKA of two captures may use."""

_SHOWN = 40
"""The rows of the table in the terminal."""

_LINES = 8
"""The lines of the configuration there."""

_COLUMNS = {
    "cosine": ("cosine", ".6f"),
    "relative L2": ("relative_l2", ".2e"),
    "largest": ("largest", ".2e"),
    "sample": ("largest_sample", ""),
}
"""Heading -> the key of a row, and the format of its value."""


class CompareTask(TaskOfRuns):
    """Compares two runs, and writes compare.json and compare.csv.

    other:         the run, or the sweep, with which `run` is compared
    by:            module; with tokens, each position of a token by itself
    tolerance:     a row differs if the norm of its difference is above this times the norm of the row of `run`
    on_difference: report; stop: the exit code is 3 if results differ
    cka:           also compute the linear CKA of each two captures
    """

    task_name: ClassVar[str] = "compare"

    other: str | None = None
    by: tuple[Literal["module", "tokens"], ...] = ("module",)
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-3
    on_difference: Literal["report", "stop"] = "report"
    cka: bool = False

    @field_validator("by")
    @classmethod
    def _of_modules(cls, by: tuple[str, ...]) -> tuple[str, ...]:
        if by not in (("module",), ("module", "tokens")):
            raise ValueError(f"found {list(by)}, expected [module] or [module, tokens]")
        return by

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> TwoRuns:
        """Find both runs. Raises SpecError if one is missing, or only one is a sweep."""
        from hookrun.studies.kit.passes import find_both

        return find_both(experiment, self.run, self.other, self.rows)

    def examine(self, prepared: TwoRuns, run_dir: RunDir, screen: Screen) -> str | None:
        """Compare the runs, job by job if they are sweeps. Returns what differs under `on_difference: stop`."""
        from hookrun.studies.kit.files import write_table

        jobs = dict[str, dict[str, Any]]()
        rows = list[dict[str, Any]]()
        reasons = list[str]()
        first: Any = None
        cka = self._cka if self.cka else None
        for job, (run, other) in prepared.jobs.items():
            screen.say(f"{job} {run.path} and {other.path}".lstrip())
            comparison = run.compare(other, by=self.by, tolerance=self.tolerance, cka=cka)
            if job:
                rows += [{"job": job} | row for row in comparison.captures]
                reasons += [f"{job}: {reason}" for reason in comparison.reasons]
            else:
                rows += comparison.captures
                reasons += comparison.reasons
            first = first or comparison.first
            jobs[job] = comparison.to_dict()
            self._show(comparison, screen)
        if not rows:
            screen.say("no module was captured by both runs")
        reasons += [f"only one of the sweeps has {job}" for job in prepared.unpaired]
        content = jobs.get("", {"first": first, "unpaired": list(prepared.unpaired), "jobs": jobs})
        run_dir.write(COMPARE_JSON, {**content, "reasons": reasons})
        heads = rows[0].keys() if rows else ("hook", "module")
        write_table(run_dir.path / COMPARE_CSV, [heads, *(row.values() for row in rows)])
        for reason in reasons or ["no difference"]:
            screen.say(reason)
        return "; ".join(reasons) if reasons and self.on_difference == "stop" else None

    def _cka(self, rows: StoredCapture, other: StoredCapture) -> float | None:
        """Linear CKA; None for rows that are not of samples or not finite, and if it would need too much memory."""
        from hookrun.studies.kit.passes import Features, chosen_way, linear_cka_of_all

        features = [Features.within(_MOST_BYTES, "", each) for each in (rows, other)]
        way = chosen_way(features, _MOST_BYTES)
        if len(rows) < 2 or not rows.is_by_sample or way.needed > _MOST_BYTES:
            return None
        try:
            return float(linear_cka_of_all(features, way)[0, 1])
        except HookrunError:  # values that are not finite, which the table counts
            return None

    def _show(self, comparison: Comparison, screen: Screen) -> None:
        """Print the table of captures, or of those that differ if there are many, and the configuration."""
        from hookrun.studies.kit.passes import show_table

        rows = comparison.captures
        if len(rows) > _SHOWN:
            rows = [row for row in rows if row["differs"]][:_SHOWN]
        if rows:
            show_table(screen.console, ["capture", *_COLUMNS, ""], [_texts(row) for row in rows])
        if comparison.captures:
            screen.say(
                f"{len(rows)} of {counted(len(comparison.captures), 'row')} of {COMPARE_CSV} are shown"
            )
        for line in comparison.config[:_LINES]:
            value = json.dumps(line["run"], ensure_ascii=False)[:100]
            other = json.dumps(line["other"], ensure_ascii=False)[:100]
            screen.say(f"configuration: {line['key']}: {value}, other {other}")
        if (more := len(comparison.config) - _LINES) > 0:
            screen.say(f"configuration: and {more} more, in {COMPARE_JSON}")


def _texts(row: Mapping[str, Any]) -> list[str]:
    """A row of the table in the terminal."""
    name = label(row)
    if row["token"] is not None:
        name += f", token {row['token']}"
    texts = [name]
    for key, form in _COLUMNS.values():
        texts.append("" if row[key] is None else format(row[key], form))
    return [*texts, "differs" if row["differs"] else ""]
