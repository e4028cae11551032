"""task=compare: what differs between two runs, or between the jobs of two sweeps, and where it begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from hookrun.engine.spec.selector import paired
from hookrun.errors import counted
from hookrun.studies.compare.records import COMPARE_CSV, COMPARE_JSON, label
from hookrun.studies.kit.tasks import Experiment, JobCache, TaskOfRuns

if TYPE_CHECKING:
    from hookrun.studies.compare.records import Comparison
    from hookrun.studies.kit.files import RunDir
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
    names:         globs of the modules of `run` -> globs of those of `other` that belong to them; or a file of these
    transpose:     globs of the modules of `other` -> the dimensions of their captures in the order of `run`, rows first
    """

    task_name: ClassVar[str] = "compare"
    stopped: ClassVar[str] = "stopped"

    other: str | None = None
    by: tuple[Literal["module", "tokens"], ...] = ("module",)
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-3
    on_difference: Literal["report", "stop"] = "report"
    cka: bool = False
    names: dict[paired.Name, paired.Name] | str | None = None
    transpose: dict[paired.Name, tuple[int, ...]] | None = None

    @field_validator("by")
    @classmethod
    def _of_modules(cls, by: tuple[str, ...]) -> tuple[str, ...]:
        if by not in (("module",), ("module", "tokens")):
            raise ValueError(f"found {list(by)}, expected [module] or [module, tokens]")
        return by

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> TwoRuns:
        """Find both runs. Raises SpecError if one is missing, only one is a sweep, or names do not fit."""
        from hookrun.studies.compare.comparison.pairing import pairing_of
        from hookrun.studies.kit.passes import find_both

        found = find_both(experiment, self.run, self.other, self.rows)
        for run, other in found.jobs.values():
            pairing_of(run, other, self.names, self.transpose)
        return found

    def examine(self, prepared: TwoRuns, run_dir: RunDir, screen: Screen) -> str | None:
        """Compare the runs, job by job if they are sweeps. Returns what differs under `on_difference: stop`."""
        from hookrun.studies.kit.files import write_table
        from hookrun.studies.kit.passes import linear_cka

        jobs: dict[str, dict[str, Any]] = {}
        rows: list[dict[str, Any]] = []
        reasons: list[str] = []
        first: Any = None
        cka = partial(linear_cka, max_bytes=_MOST_BYTES) if self.cka else None
        for job, (run, other) in prepared.jobs.items():
            screen.say(f"{job} {run.path} and {other.path}".lstrip())
            comparison = run.compare(
                other,
                by=self.by,
                tolerance=self.tolerance,
                cka=cka,
                names=self.names,
                transpose=self.transpose,
            )
            about = {"job": job} if job else {}
            rows += [about | row for row in comparison.captures]
            reasons += [f"{job}: {reason}" if job else reason for reason in comparison.reasons]
            first = first or comparison.first
            jobs[job] = comparison.to_dict()
            self._show(comparison, screen)
        if not rows:
            screen.say("no module was captured by both runs")
        reasons += [f"only one of the sweeps has {job}" for job in prepared.unpaired]
        content = jobs.get("", {"first": first, "unpaired": list(prepared.unpaired), "jobs": jobs})
        run_dir.write(COMPARE_JSON, {**content, "reasons": reasons})
        heads = list(dict.fromkeys(chain(*rows))) or ["hook", "module"]
        write_table(run_dir.path / COMPARE_CSV, [heads, *(map(row.get, heads) for row in rows)])
        for reason in reasons or ["no difference"]:
            screen.say(reason)
        return "; ".join(reasons) if reasons and self.on_difference == "stop" else None

    def _show(self, comparison: Comparison, screen: Screen) -> None:
        """Print the table of captures, or of those that differ if there are many, and the configuration."""
        from hookrun.studies.kit.passes import show_table

        rows = comparison.captures
        if len(rows) > _SHOWN:
            rows = [row for row in rows if row["differs"]][:_SHOWN]
        if rows:
            show_table(screen.console, ["capture", *_COLUMNS, ""], [_texts(row) for row in rows])
        if comparison.captures:
            of_all = counted(len(comparison.captures), "row")
            screen.say(f"{len(rows)} of {of_all} of {COMPARE_CSV} are shown")
        for row in comparison.names[:_LINES]:
            order = f", its dimensions in the order {row['transpose']}" if row["transpose"] else ""
            screen.say(f"paired: {row['module'] or '(root)'} and {row['other'] or '(root)'}{order}")
        if len(comparison.names) > _LINES:
            screen.say(f"paired: all {len(comparison.names)} are in {COMPARE_JSON}")
        for line in comparison.config[:_LINES]:
            value, other = (json.dumps(line[side], ensure_ascii=False)[:100] for side in ("run", "other"))
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
