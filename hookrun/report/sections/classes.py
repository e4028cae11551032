"""The predictions of a classifier: the confusion matrix, and the samples with the highest loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from hookrun.errors import shortened
from hookrun.report.draw.pictures import HeatMap, matrix
from hookrun.report.draw.text import by_number
from hookrun.report.facts import Facts
from hookrun.report.lines import is_number
from hookrun.store.records import grouped

MOST_CLASSES = 40
"""Classes of a matrix; for more classes only the most frequent confusions are listed."""
MOST_PAIRS = 20
MOST_WORST = 16
MOST_TEXT = 300
"""Characters shown of a sample that is a text."""
_NUMBERED = 12


def build(facts: Facts) -> dict[str, Any] | None:
    """The confusions of each split and the worst samples; None if no sample has both a class and a predicted class.

    is_random: the model has random weights, which nothing has trained
    is_sample: only a part of the samples was read
    """
    lines = [
        line
        for line in facts.samples.records
        if line.get("class") is not None and line.get("predicted_class") is not None
    ]
    if not lines:
        return None
    return {
        "splits": [
            _confusions(split, of_split) for split, of_split in grouped(lines, itemgetter("split")).items()
        ],
        "worst": _worst(facts, lines),
        "is_random": facts.has_random_weights,
        "is_sample": facts.samples.is_sample,
    }


def _confusions(split: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many samples of a split were classified correctly, and the confusions, as a matrix if it is not too large.

    confused: (class, predicted class, count), the most frequent first
    """
    counts = Counter((str(line["class"]), str(line["predicted_class"])) for line in lines)
    names = sorted({name for pair in counts for name in pair}, key=by_number)
    confusions = None
    if 1 < len(names) <= MOST_CLASSES:
        shown = [shortened(name, 24) for name in names]
        confusions = HeatMap(
            f"confusion matrix, {split}",
            matrix(counts, names, names, otherwise=0),
            rows=shown,
            columns=shown,
            x="across: predicted; down: class",
            numbers=len(names) <= _NUMBERED,
            note="how many samples of each class have each predicted class",
        ).figure()
    wrong = [(*pair, count) for pair, count in counts.most_common() if pair[0] != pair[1]]
    return {
        "split": split,
        "total": len(lines),
        "right": len(lines) - sum(count for *_, count in wrong),
        "matrix": confusions,
        "confused": [
            (shortened(label), shortened(other), count) for label, other, count in wrong[:MOST_PAIRS]
        ],
    }


def _worst(facts: Facts, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The misclassified samples with the highest loss: each with the URL of its picture, and its text or its file."""
    wrong = (line for line in lines if line["class"] != line["predicted_class"])
    known = sorted(
        (line for line in wrong if is_number(line.get("loss")) and math.isfinite(line["loss"])),
        key=lambda line: (-line["loss"], line["split"], line["sample"]),
    )
    return [
        {
            "split": line["split"],
            "sample": line["sample"],
            "label": shortened(str(line["class"])),
            "predicted": shortened(str(line["predicted_class"])),
            "loss": line["loss"],
            "picture": facts.pictures.get((line["split"], line["sample"]), ""),
            "text": shortened("".join(facts.texts.get(token, "?") for token in line["tokens"]), MOST_TEXT)
            if line.get("tokens")
            else shortened(str(line.get("file") or "")),
        }
        for line in known[:MOST_WORST]
    ]
