"""The results of the tasks that analyse captures: a table and bars of probes, a matrix of similarities."""

from __future__ import annotations

import math
from typing import Any

from hookrun.errors import listed
from hookrun.studies.captures.records import Line, probes_in, similarities_in
from hookrun.studies.kit.drawing import (
    MOST_ROWS,
    Figure,
    HeatMap,
    RunData,
    bars,
    matrix,
    module_name,
)

ID = "analysis"
TITLE = "Analysis"
POSITION = 10


def build(facts: RunData) -> dict[str, Any] | None:
    """The results in metrics.jsonl: one line for each probed module, or for each pair of modules.

    projections: texts that say which modules' features were projected, and how
    """
    probes = probes_in(facts.metrics.records)[:MOST_ROWS]
    similarities = similarities_in(facts.metrics.records)
    if not probes and not similarities:
        return None
    figures: list[Figure] = []
    if probes:
        figures.append(_scores(probes))
    if similarities:
        figures.append(_similarity(similarities))
    return {
        "title": "Probes" if probes else "Similarity",
        "probes": probes,
        "figures": figures,
        "projections": _projections([*probes, *similarities]),
    }


def _scores(probes: list[Line]) -> Figure:
    """The score of each module's probe, with that of the majority class."""
    score = str(probes[0].get("score", "accuracy"))
    majority = probes[0]["majority"]
    note = ""
    mark = math.nan
    if isinstance(majority, float):
        note = f"dashed: the majority class, {majority:.3f}"
        mark = majority
    values = [float(line["accuracy"]) for line in probes]
    names = [module_name(line["module"]) for line in probes]
    return bars(
        f"{score} on held-out samples", values, x="module", y=score, names=names, note=note, mark=mark
    )


def _similarity(lines: list[Line]) -> Figure:
    """The CKA of each two modules."""
    modules = list(dict.fromkeys(line["module"] for line in lines))[:MOST_ROWS]
    cells = {(line["module"], str(line["other"])): line["cka"] for line in lines}
    names = [module_name(module) for module in modules]
    values = matrix(cells, modules, modules)
    is_small = len(names) <= 12
    heat = HeatMap(
        "linear CKA", values, rows=names, columns=names, x="module", numbers=is_small, limits=(0, 1)
    )
    return heat.figure()


def _projections(lines: list[Line]) -> list[str]:
    """How features were projected, and of which modules."""
    modules: dict[str, dict[str, None]] = {}
    for line in lines:
        how = line.get("projection")
        if how is not None and line.get("other") in (None, line["module"]):
            modules.setdefault(how, {})[module_name(line["module"])] = None
    return [f"{how}, instead of all features: {listed(names, 40)}" for how, names in modules.items()]
