"""compare.json and compare.csv: how a run differs from another one, and the comparison itself for `Run.compare`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookrun.errors import counted, listed
from hookrun.studies.kit.record_types import (
    Listing,
    Name,
    Record,
    Text,
    functions_of_studies,
    html,
    typed_record,
)

if TYPE_CHECKING:
    from hookrun.studies.compare.comparison import By, Cka
    from hookrun.studies.compare.comparison.pairing import Names
    from hookrun.studies.kit.files import Run

COMPARE_JSON = "compare.json"
COMPARE_CSV = "compare.csv"

_OF_CAPTURES = ("token", "relative_l2", "largest", "differs", "note")
_OF_METRICS = ("key", "run", "other", "differs")
"""What a notebook shows of captures, or if there are none of metrics."""

Rows = Listing[dict[Name, Any]]
"""A table: a mapping for each row."""

MOST_LISTED = 1_000
"""The statistics of a comparison that are listed, and the captures in compare.json."""


class Comparison(html.Shown, Record):
    """How a run differs from another one, or the jobs of two sweeps. Each list is a table: a mapping for each row.

    run, other:  their directories
    first:       where they differ first, in the order of execution: `module`, `sample` and `token`, of which the last
                 two may be None; None: no captured value differs by more than the tolerance
    reasons:     what differs in the results, in words; empty if nothing does
    captures:    a row for each capture of both runs, or with `tokens` for each position of a token of it, in the order
                 of execution
    unpaired:    captures of one of the runs only
    metrics:     each metric of both
    predictions: what `comparison.predictions` returns
    weights:     tensors that differ; `weights_of` says what was compared, or why nothing was
    names:       a row for each two compared modules with other names, or with dimensions in another order
    statistics, plan, config: values that differ; plan and configuration are not results
    jobs:        for two sweeps: the name of a job -> its comparison
    """

    run: Text = ""
    other: Text = ""
    first: dict[Name, Any] | None = None
    reasons: Listing[Text] = []
    captures: Rows = []
    unpaired: Rows = []
    metrics: Rows = []
    predictions: dict[Name, Any] = {}
    weights: Rows = []
    weights_of: Text = ""
    statistics: Rows = []
    plan: Rows = []
    config: Rows = []
    names: Rows = []
    jobs: dict[Name, Comparison] = {}

    def _view(self) -> html.View:
        title = f"{self.run} and {self.other}: {'; '.join(self.reasons) or 'nothing differs'}"
        if not self.captures:
            rows = [[row[key] for key in _OF_METRICS] for row in self.metrics[: html.MOST_ROWS]]
            return html.View(title, _OF_METRICS, rows, len(self.metrics))
        rows = [[label(row), *map(row.get, _OF_CAPTURES)] for row in self.captures[: html.MOST_ROWS]]
        return html.View(title, ("capture", *_OF_CAPTURES), rows, len(self.captures))

    def __str__(self) -> str:
        return repr(self)

    def to_dict(self) -> dict[str, Any]:
        """The content of compare.json for two runs; all captures are in compare.csv."""
        content = {**vars(self), "captures": self.captures[:MOST_LISTED]}
        del content["jobs"]
        return content

    def differences(self) -> Iterator[str]:
        """What differs in the results, in words; nothing if nothing does."""
        if self.first is not None:
            yield self._first_difference(self.first)
        notes = {label(row): row["note"] for row in self.captures if row["note"]}
        for note, count in Counter(notes.values()).items():
            yield f"{counted(count, 'capture')}: {note}"
        for side in ("run", "other"):
            names = [label(row) for row in _differing(self.unpaired) if row["only"] == side]
            if names:
                yield f"only {getattr(self, side)} has {listed(names, 6)}"
        for name in ("metrics", "weights", "statistics"):
            rows = _differing(getattr(self, name))
            if rows:
                yield f"{name} that differ: {len(rows):,}"
        predictions = self.predictions
        if predictions["changed"]:
            yield f"predictions that changed: {predictions['changed']:,} of {predictions['compared']:,}"
        elif predictions["differs"]:
            note = predictions["note"] or f"relative L2 {predictions['relative_l2']:.3g}"
            yield f"predictions: {note}"

    def _first_difference(self, first: Mapping[str, Any]) -> str:
        """Where the runs differ first, with the module's name in the other run if that is another one."""
        module = first["module"]
        place = module or "(root)"
        for row in self.names:
            if row["module"] == module != row["other"]:
                place += f" ({row['other'] or '(root)'} in the other run)"
        place += _place(first)
        for row in self.captures:
            if row["module"] == module and row["differs"] and row.get("fingerprint"):
                return (
                    f"fingerprints: first difference at {place}, relative L2 about {row['relative_l2']:.2g}"
                )
        return f"first: {place}"


def _differing(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("differs", True)]


def _place(first: Mapping[str, Any]) -> str:
    """``, sample 3, token 5``, as far as they are known."""
    text = ""
    for key in ("sample", "token"):
        if first[key] is not None:
            text += f", {key} {first[key]}"
    return text


def label(row: Mapping[str, Any]) -> str:
    """``seen at layers.0``, with the place in a container."""
    return f"{row['hook']} at {row['module'] or '(root)'} {row['path']}".rstrip()


def compare_runs(
    run: Run,
    other: Run,
    by: Sequence[By],
    tolerance: float,
    cka: Cka | None,
    names: Names | None = None,
    transpose: Mapping[Any, Sequence[int]] | None = None,
) -> Comparison:
    """`Run.compare`: how a run differs from another one."""
    from hookrun.studies.compare import comparison
    from hookrun.studies.compare.comparison.pairing import pairing_of

    pairing = pairing_of(run, other, names, transpose)
    first, captures, unpaired = comparison.compare_captures(
        run,
        other,
        pairing,
        by=by,
        tolerance=tolerance,
        # A learning rate was logged, or it is a run of an own loop.
        trains=not run.config or any("lr" in line for line in run.metrics),
        cka=cka,
    )
    weights, weights_of = comparison.weights(run, other, tolerance, pairing)
    outputs = run.predictions, other.predictions
    metrics = comparison.side_by_side(_numbers(run), _numbers(other), tolerance)
    if not run.config or not other.config:  # a loop of one's own need not write what a run writes
        outputs = (None, None) if None in outputs else outputs
        for row in metrics:
            row["differs"] &= None not in (row["run"], row["other"])
    predictions = comparison.predictions(_predicted(run), _predicted(other), *outputs, run.samples, tolerance)
    statistics = comparison.differing(
        comparison.statistics(run.stats, pairing.paired),
        comparison.statistics(other.stats, pairing.first),
        tolerance,
    )
    result = Comparison.model_construct(
        run=str(run.path),
        other=str(other.path),
        first=first,
        captures=captures,
        unpaired=unpaired,
        metrics=metrics,
        predictions=predictions,
        weights=weights,
        weights_of=weights_of,
        statistics=statistics[:MOST_LISTED],
        plan=comparison.differing(comparison.plan(run.plan), comparison.plan(other.plan)),
        config=comparison.differing(run.config, other.config),
        names=pairing.rows(dict.fromkeys(row["module"] for row in captures)),
    )
    return result.model_copy(update={"reasons": list(result.differences())})


def answer_of(run: Run) -> dict[str, Any] | None:
    """Where the two runs differ first, and what else differs in the results."""
    path = run.path / COMPARE_JSON
    if not os.path.lexists(path):
        return None
    record = typed_record(path, Comparison)
    return {"what": "first_difference", "first": record.first, "reasons": record.reasons}


def _numbers(run: Run) -> dict[str, float]:
    """The metrics of whole passes, and what studies have measured."""
    from hookrun.studies.compare import comparison

    numbers = comparison.metrics(run.metrics)
    for of_study in functions_of_studies("numbers_to_compare"):
        numbers |= of_study(run)
    return numbers


def _predicted(run: Run) -> dict[tuple[str, int], Any]:
    """(split, sample) -> the predicted class, or what a study has predicted."""
    classes = {place: line.get("predicted_class") for place, line in run.samples.by_sample.items()}
    predicted = {place: name for place, name in classes.items() if name is not None}
    for of_study in functions_of_studies("predictions_to_compare"):
        predicted |= of_study(run)
    return predicted
