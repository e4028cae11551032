"""What differs between two runs, from their directories alone."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from operator import itemgetter
from typing import Any, Literal

from hookrun.errors import Lookup, counted, listed
from hookrun.store.captures.read import StoredCapture, captured_tensors
from hookrun.store.captures.shard import read_index
from hookrun.store.comparison import records
from hookrun.store.comparison.predictions import predictions
from hookrun.store.comparison.records import StoredRun
from hookrun.store.comparison.rows import Compared, Difference, MatchedRows, compared
from hookrun.store.format import CAPTURES

By = Literal["module", "tokens"]
Cka = Callable[[MatchedRows, MatchedRows], float | None]

TOLERANCE = 1e-3
COLUMNS = (
    "hook",
    "module",
    "path",
    "token",
    "rows",
    "cosine",
    "relative_l2",
    "largest",
    "largest_sample",
    "largest_token",
    "largest_index",
    "nans",
    "nans_other",
    "cka",
    "differs",
    "note",
)
"""The columns of the table of captures."""
MOST_LISTED = 1_000
"""The statistics that are listed."""


@dataclass(frozen=True)
class Comparison:
    """How a run differs from another one. Each list is a table: a dict for each row.

    run, other:  their directories
    first:       where they differ first, in the order of execution: `module`, `sample` and `token`, of which the last
                 two may be None; None: no captured value differs by more than the tolerance
    captures:    a row for each capture of both runs, or with `tokens` for each position of a token of it, in the order
                 of execution
    unpaired:    captures of one of the runs only
    metrics:     each metric of both
    predictions: what `hookrun.store.comparison.predictions` returns
    weights:     tensors that differ; `weights_of` says what was compared, or why nothing was
    statistics, plan, config: values that differ
    """

    run: str
    other: str
    by: tuple[By, ...]
    tolerance: float
    first: dict[str, Any] | None
    captures: list[dict[str, Any]]
    unpaired: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    predictions: dict[str, Any]
    weights: list[dict[str, Any]]
    weights_of: str
    statistics: list[dict[str, Any]]
    plan: list[dict[str, Any]]
    config: list[dict[str, Any]]

    @property
    def reasons(self) -> list[str]:
        """What differs in the results, in words; empty if nothing does. Plan and configuration are no results."""
        reasons = list[str]()
        if self.first is not None:
            reasons.append(f"first: {place(self.first)}")
        noted = {
            (row["hook"], row["module"], row["path"]): row["note"] for row in self.captures if row["note"]
        }
        for note, count in Counter(noted.values()).items():
            reasons.append(f"{counted(count, 'capture')}: {note}")
        for side, path in (("run", self.run), ("other", self.other)):
            if names := [label(row) for row in self.unpaired if row["only"] == side]:
                reasons.append(f"only {path} has {listed(names, 6)}")
        for name, rows in (
            ("metric", self.metrics),
            ("weight", self.weights),
            ("statistic", self.statistics),
        ):
            if count := sum(row.get("differs", True) for row in rows):
                reasons.append(f"{counted(count, name)} differ" + ("s" if count == 1 else ""))
        found = self.predictions
        if found["changed"]:
            reasons.append(f"{found['changed']:,} of {counted(found['compared'], 'prediction')} changed")
        elif found["differs"]:
            reasons.append(
                f"predictions: {found['note'] or 'largest difference ' + format(found['largest'], '.3g')}"
            )
        return reasons

    def to_dict(self) -> dict[str, Any]:
        """All except the table of captures, which is compare.csv."""
        return {name: value for name, value in vars(self).items() if name != "captures"}


def label(row: Mapping[str, Any]) -> str:
    """``seen at layers.0``, with the place in a container."""
    return f"{row['hook']} at {row['module'] or '(root)'} {row['path']}".rstrip()


def place(first: Mapping[str, Any]) -> str:
    """``layers.0, sample 12, token 5``."""
    parts = [f"{key} {first[key]}" for key in ("sample", "token") if first[key] is not None]
    return ", ".join([first["module"] or "(root)", *parts])


def compare_runs(
    run: StoredRun,
    other: StoredRun,
    *,
    by: Sequence[By] = ("module",),
    tolerance: float = TOLERANCE,
    cka: Cka | None = None,
) -> Comparison:
    """Compare two runs. Captures are paired by hook and module, and their rows by sample, epoch, call and token.

    by:        module, and tokens: each position of a token by itself
    tolerance: a row differs if the norm of its difference is above this times the norm of the first run's row; metrics
               and statistics if they differ by more than this times the larger one
    cka:       computes the CKA of the rows of two captures; None: it is not computed

    Raises StoreError if a file of a run is missing or damaged.
    """
    rows, unpaired = list[dict[str, Any]](), list[dict[str, Any]]()
    first: tuple[int, dict[str, Any]] | None = None
    trains = _trains(run)
    here, there = _in_order(run), _in_order(other)
    partners = {name: _partner(other, *name) for name in here}
    for name, capture in here.items():
        partner = partners[name]
        if partner is None:
            unpaired.append({**_named(capture), "only": "run"})
            continue
        comparison = compared(capture, partner, run.samples.by_sample, tolerance, by_token="tokens" in by)
        rows += _rows(capture, comparison, cka)
        found = _first(capture.module, comparison)
        # After a step of training all modules may differ, because the weights do.
        if found is not None and (first is None or (trains and found[0] < first[0])):
            first = found
    paired = {_key(partner) for partner in partners.values() if partner is not None}
    unpaired += [{**_named(capture), "only": "other"} for key, capture in there.items() if key not in paired]
    weights, weights_of = records.weights(run, other, tolerance)
    return Comparison(
        run=str(run.path),
        other=str(other.path),
        by=tuple(by),
        tolerance=tolerance,
        first=None if first is None else first[1],
        captures=rows,
        unpaired=unpaired,
        metrics=records.side_by_side(run, other, tolerance),
        predictions=predictions(run, other, tolerance),
        weights=weights,
        weights_of=weights_of,
        statistics=records.statistics(run, other, tolerance)[:MOST_LISTED],
        plan=records.mapped(records.plan(run), records.plan(other)),
        config=records.mapped(run.config, other.config),
    )


def _trains(run: StoredRun) -> bool:
    """Whether the weights change from step to step: a learning rate was logged, or it is a run of an own loop."""
    return not run.config or any("lr" in line for line in run.metrics)


def _in_order(run: StoredRun) -> dict[tuple[str, str, str], StoredCapture]:
    """(hook, module, path) -> its capture, in the order in which they were first recorded."""
    captures = {_key(capture): capture for capture in captured_tensors(run.captures)}
    entries = (entry for shard in read_index(run.path / CAPTURES)[0] for entry in shard.entries)
    return {
        key: captures[key] for key in dict.fromkeys((each.hook, each.module, each.path) for each in entries)
    }


def _key(capture: StoredCapture) -> tuple[str, str, str]:
    return capture.hook, capture.module, capture.path


def _named(capture: StoredCapture) -> dict[str, Any]:
    return dict(zip(("hook", "module", "path"), _key(capture), strict=True))


def _partner(other: StoredRun, hook: str, module: str, path: str) -> StoredCapture | None:
    """The capture of the other run at the same place, under any name of the module; None if there is none."""
    modules = other.captures.get(hook)
    leaf = None if modules is None else modules.get(module)
    return leaf.get(path) if isinstance(leaf, Lookup) else None if path else leaf


def _rows(capture: StoredCapture, comparison: Compared, cka: Cka | None) -> Iterator[dict[str, Any]]:
    """The rows of the table of captures; without a common row there is one with the reason."""
    pairs = comparison.pairs
    similarity = cka(pairs[0].rows, pairs[0].other) if cka is not None and len(pairs) == 1 else None
    none: dict[int | None, Difference | None] = {None: None}
    for token, found in sorted((comparison.by_token or none).items(), key=lambda item: item[0] or 0):
        measured: tuple[Any, ...] = (0, *[None] * 8)
        if found is not None:
            sample, at, index = found.where or (None, None, [])
            numbers = found.rows, found.cosine, found.relative_l2, found.largest
            measured = (*numbers, sample, at, " ".join(map(str, index)), found.nans, found.nans_other)
        differs = comparison.other_shape or (found is not None and found.first is not None)
        values = (*_key(capture), token, *measured, similarity, differs, "; ".join(comparison.notes))
        yield dict(zip(COLUMNS, values, strict=True))


def _first(module: str, comparison: Compared) -> tuple[int, dict[str, Any]] | None:
    """The time, and the sample and token, that differ first; without these two if rows have another shape."""
    firsts = [found.first for found in comparison.by_token.values() if found.first is not None]
    if not firsts and not comparison.other_shape:
        return None
    (time, *_), (sample, token) = min(firsts, default=((0,), (None, None)), key=itemgetter(0))
    return time, {"module": module, "sample": sample, "token": token}


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the table of captures as CSV, `job` first if they are of two sweeps; None is an empty cell."""
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
