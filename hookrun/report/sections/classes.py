"""The predictions of a classifier: the confusion matrix, and the samples with the highest loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from hookrun.errors import shortened
from hookrun.report.draw.pictures import HeatMap, matrix
from hookrun.report.draw.text import by_number
from hookrun.report.facts import RunData
from hookrun.report.lines import is_number
from hookrun.store.records import grouped

MOST_CLASSES = 40
"""Classes of a matrix; for more classes only the most frequent confusions are listed."""
MOST_PAIRS = 20
MOST_WORST = 16
MOST_TEXT = 300
"""Characters shown of a sample that is a text."""
_NUMBERED = 12


def build(facts: RunData) -> dict[str, Any] | None:
    """The confusions of each split and the worst samples; None if no sample has both a class and a predicted class.

    is_random: the model has random weights, which nothing has trained
    is_sample: only a part of the samples was read
    """
    lines = [line for line in facts.samples.records if _is_classified(line)]
    if not lines:
        return None
    by_split = grouped(lines, itemgetter("split"))
    return {
        "splits": [_confusions(split, of_split) for split, of_split in by_split.items()],
        "worst": _worst(facts, lines),
        "is_random": facts.has_random_weights,
        "is_sample": facts.samples.is_sample,
    }


def _is_classified(line: Mapping[str, Any]) -> bool:
    return line.get("class") is not None and line.get("predicted_class") is not None


def _confusions(split: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many samples of a split were classified correctly, and the confusions, as a matrix if it is not too large.

    confused: (class, predicted class, count), the most frequent first
    """
    counts = Counter((str(line["class"]), str(line["predicted_class"])) for line in lines)
    names = sorted(set(chain.from_iterable(counts)), key=by_number)
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
    right = 0
    confused = list[tuple[str, str, int]]()
    for (label, predicted), count in counts.most_common():
        if label == predicted:
            right += count
        else:
            confused.append((shortened(label), shortened(predicted), count))
    return {
        "split": split,
        "total": len(lines),
        "right": right,
        "matrix": confusions,
        "confused": confused[:MOST_PAIRS],
    }


def _worst(facts: RunData, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The misclassified samples with the highest loss: each with the URL of its picture, and its text or its file."""
    wrong = list[dict[str, Any]]()
    for line in lines:
        is_wrong = line["class"] != line["predicted_class"]
        if is_wrong and is_number(line.get("loss")) and math.isfinite(line["loss"]):
            wrong.append(line)
    wrong.sort(key=lambda line: (-line["loss"], line["split"], line["sample"]))
    worst = list[dict[str, Any]]()
    for line in wrong[:MOST_WORST]:
        text = shortened(str(line.get("file") or ""))
        if line.get("tokens"):
            words = "".join(facts.texts.get(token, "?") for token in line["tokens"])
            text = shortened(words, MOST_TEXT)
        worst.append(
            {
                "split": line["split"],
                "sample": line["sample"],
                "label": shortened(str(line["class"])),
                "predicted": shortened(str(line["predicted_class"])),
                "loss": line["loss"],
                "picture": facts.pictures.get((line["split"], line["sample"]), ""),
                "text": text,
            }
        )
    return worst
