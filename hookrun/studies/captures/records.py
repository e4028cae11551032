"""probes.safetensors: weight and bias of the probe of each module; and the lines of metrics.jsonl about captures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookrun.studies.kit.files import Run

PROBES = "probes.safetensors"

_PROBE = frozenset({"module", "features", "samples", "train_accuracy", "accuracy", "majority", "control"})
_SIMILARITY = frozenset({"module", "other", "cka"})
_SCORES = ("module", "accuracy", "majority", "control")

Line = dict[str, Any]


def probes_in(lines: Iterable[Line]) -> list[Line]:
    """The lines about the probe of a module."""
    return _measured(lines, _PROBE, "accuracy")


def similarities_in(lines: Iterable[Line]) -> list[Line]:
    """The lines about the similarity of two modules."""
    return _measured(lines, _SIMILARITY, "cka")


def _measured(lines: Iterable[Line], keys: frozenset[str], result: str) -> list[Line]:
    """The lines that have all of the keys; `result` is the key of the measured number."""
    measured: list[Line] = []
    for line in lines:
        if line.keys() >= keys and type(line[result]) in (int, float) and isinstance(line["module"], str):
            measured.append(line)
    return measured


def answer_of(run: Run) -> dict[str, Any] | None:
    """The accuracy of each module's probe, or the similarity of each two modules."""
    probes = probes_in(run.metrics)
    if probes:
        layers = [{key: line[key] for key in _SCORES} for line in probes]
        return {"what": "accuracy_by_layer", "score": probes[0].get("score", "accuracy"), "layers": layers}
    pairs: list[Line] = []
    for line in similarities_in(run.metrics):
        if line["module"] != line["other"]:
            pairs.append({key: line[key] for key in ("module", "other", "cka")})
    return {"what": "similarity", "pairs": pairs} if pairs else None
