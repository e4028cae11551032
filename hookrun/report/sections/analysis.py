"""The results of the tasks that analyse captures: a table and bars of probes, a matrix of similarities."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hookrun.errors import listed
from hookrun.report.draw.charts import Figure, bars
from hookrun.report.draw.pictures import heat, matrix
from hookrun.report.draw.text import module_name
from hookrun.report.facts import Facts
from hookrun.report.lines import is_number

MOST_MODULES = 400
"""The largest number of rows in the table of probes, and in the matrix of similarities."""

_PROBE = {"module", "features", "samples", "train_accuracy", "accuracy", "majority", "control"}
_SIMILARITY = {"module", "other", "cka"}


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
    figures = list[Figure]()
    if probes:
        score, majority = str(probes[0].get("score", "accuracy")), probes[0]["majority"]
        is_known = isinstance(majority, float)
        figures.append(
            bars(
                f"{score} on held-out samples",
                [float(line["accuracy"]) for line in probes],
                x="module",
                y=score,
                names=[module_name(line["module"]) for line in probes],
                note=f"dashed: the majority class, {majority:.3f}" if is_known else "",
                mark=majority if is_known else None,
            )
        )
    if similarities:
        names = list(dict.fromkeys(line["module"] for line in similarities))[:MOST_MODULES]
        cells = {(line["module"], str(line["other"])): line["cka"] for line in similarities}
        shown = [module_name(name) for name in names]
        figures.append(
            heat(
                "linear CKA",
                matrix(cells, names, names),
                rows=shown,
                columns=shown,
                x="module",
                numbers=len(names) <= 12,
                limits=(0, 1),
            )
        )
    return {
        "title": "Probes" if probes else "Similarity",
        "probes": probes,
        "figures": figures,
        "projections": [
            f"{how}, instead of all features: {listed(names, 40)}" for how, names in projected.items()
        ],
    }


def _lines(facts: Facts, keys: set[str], result: str) -> list[dict[str, Any]]:
    """The lines that have all of the keys; `result` is the key of the measured number."""
    return [
        line
        for line in facts.metrics.records
        if line.keys() >= keys and is_number(line[result]) and isinstance(line["module"], str)
    ]
