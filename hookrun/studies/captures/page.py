"""The results of the tasks that analyse captures: a table and bars of probes, a matrix of similarities."""

from __future__ import annotations

import math
from typing import Any

from hookrun.errors import listed
from hookrun.studies.kit.drawing import (
    MOST_ROWS,
    Facts,
    Figure,
    HeatMap,
    bars,
    is_number,
    matrix,
    module_name,
)
from hookrun.studies.kit.record_types import grouped

ID = "analysis"
TITLE = "Analysis"
POSITION = 10

_PROBE = {"module", "features", "samples", "train_accuracy", "accuracy", "majority", "control"}
_SIMILARITY = {"module", "other", "cka"}


def build(facts: Facts) -> dict[str, Any] | None:
    """The results in metrics.jsonl: one line for each probed module, or for each pair of modules.

    projections: texts that say which modules' features were projected, and how
    """
    probes = _lines(facts, _PROBE, "accuracy")[:MOST_ROWS]
    similarities = _lines(facts, _SIMILARITY, "cka")
    if not probes and not similarities:
        return None
    of_modules = (line for line in [*probes, *similarities] if line.get("other") in (None, line["module"]))
    projected = {
        how: dict.fromkeys(module_name(line["module"]) for line in of_how)
        for how, of_how in grouped(of_modules, lambda line: line.get("projection")).items()
    }
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
                mark=majority if is_known else math.nan,
            )
        )
    if similarities:
        names = list(dict.fromkeys(line["module"] for line in similarities))[:MOST_ROWS]
        cells = {(line["module"], str(line["other"])): line["cka"] for line in similarities}
        shown = [module_name(name) for name in names]
        figures.append(
            HeatMap(
                "linear CKA",
                matrix(cells, names, names),
                rows=shown,
                columns=shown,
                x="module",
                numbers=len(names) <= 12,
                limits=(0, 1),
            ).figure()
        )
    return {
        "title": "Probes" if probes else "Similarity",
        "probes": probes,
        "figures": figures,
        "projections": [
            f"{how}, instead of all features: {listed(modules, 40)}"
            for how, modules in projected.items()
            if how is not None
        ],
    }


def _lines(facts: Facts, keys: set[str], result: str) -> list[dict[str, Any]]:
    """The lines that have all of the keys; `result` is the key of the measured number."""
    return [
        line
        for line in facts.metrics.records
        if line.keys() >= keys and is_number(line[result]) and isinstance(line["module"], str)
    ]
