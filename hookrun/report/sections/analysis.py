"""The results of the tasks that analyse captures: a table and bars of probes, a matrix of similarities."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from hookrun.errors import listed
from hookrun.report.draw.charts import Figure, bars
from hookrun.report.draw.pictures import heat
from hookrun.report.draw.text import module_name
from hookrun.report.facts import Facts
from hookrun.report.lines import is_number

MOST_MODULES = 400
"""The largest number of rows in the table of probes, and in the matrix of similarities."""

_PROBE = {"module", "features", "samples", "train_accuracy", "accuracy", "majority", "control"}
_SIMILARITY = {"module", "other", "cka"}

Line = dict[str, Any]


def build(facts: Facts) -> dict[str, Any] | None:
    """The results in metrics.jsonl: one line for each probed module, or for each pair of modules.

    projections: texts that say which modules' features were projected, and how
    """
    probes = _lines(facts, _PROBE, "accuracy")[:MOST_MODULES]
    similarities = _lines(facts, _SIMILARITY, "cka")
    if not probes and not similarities:
        return None
    projected = defaultdict[str, dict[str, None]](dict)
    for line in [*probes, *similarities]:
        if line.get("projection") is not None and line.get("other") in (None, line["module"]):
            projected[str(line["projection"])][module_name(line["module"])] = None
    return {
        "title": "Probes" if probes else "Similarity",
        "probes": probes,
        "figures": ([_bars(probes)] if probes else []) + ([_matrix(similarities)] if similarities else []),
        "projections": [
            f"{how}, instead of all features: {listed(names, 40)}" for how, names in projected.items()
        ],
    }


def _lines(facts: Facts, keys: set[str], result: str) -> list[Line]:
    """The lines that have all of the keys; `result` is the key of the measured number."""
    return [
        line
        for line in facts.metrics.records
        if line.keys() >= keys and is_number(line[result]) and isinstance(line["module"], str)
    ]


def _bars(probes: list[Line]) -> Figure:
    """A bar for the score of each module's probe, with a line at the score of the majority class."""
    score, majority = str(probes[0].get("score", "accuracy")), probes[0]["majority"]
    is_known = isinstance(majority, float)
    return bars(
        f"{score} on held-out samples",
        [float(line["accuracy"]) for line in probes],
        x="module",
        y=score,
        names=[module_name(str(line["module"])) for line in probes],
        note=f"dashed: the majority class, {majority:.3f}" if is_known else "",
        mark=majority if is_known else None,
    )


def _matrix(similarities: list[Line]) -> Figure:
    names = list(dict.fromkeys(str(line["module"]) for line in similarities))[:MOST_MODULES]
    cells = {(str(line["module"]), str(line["other"])): line["cka"] for line in similarities}
    values = np.array([[cells.get((row, column), np.nan) for column in names] for row in names])
    values = values.clip(-1e30, 1e30).astype(np.float32)
    shown = [module_name(name) for name in names]
    return heat(
        "linear CKA",
        values,
        rows=shown,
        columns=shown,
        x="module",
        numbers=len(names) <= 12,
        limits=(0, 1),
    )
