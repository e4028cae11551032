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
from hookrun.report.facts import MOST_SAMPLES, RunData
from hookrun.report.lines import is_number
from hookrun.store.records import grouped

MOST_CLASSES = 40
"""Classes of a matrix; for more classes only the most frequent confusions are listed."""
MOST_PAIRS = 20
MOST_WORST = 16
"""Samples that are shown with their picture."""
MOST_TEXT = 300
"""Characters shown of a sample that is a text."""
_NUMBERED = 12


def build(facts: RunData) -> dict[str, Any] | None:
    """The confusions of each split and the worst samples; None if no sample has both a class and a predicted class.

    worst:     the misclassified samples with the highest loss
    wrong:     the first of all misclassified samples, those without a finite loss first, then by loss
    is_random: the model has random weights, which nothing has trained
    is_sample: only a part of the samples was read
    """
    lines = [line for line in facts.samples.records if _is_classified(line)]
    if not lines:
        return None
    by_split = grouped(lines, itemgetter("split"))
    wrong = _misclassified(lines)
    finite = [line for line in wrong if math.isfinite(_loss(line))]
    return {
        "splits": [_confusions(split, of_split) for split, of_split in by_split.items()],
        "worst": [_shown(facts, line) for line in finite[:MOST_WORST]],
        "wrong": [_shown(facts, line) for line in wrong[:MOST_SAMPLES]],
        "total_wrong": len(wrong),
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
    confused: list[tuple[str, str, int]] = []
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


def _misclassified(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples with another predicted class than their own, those with the highest loss first."""
    wrong: list[dict[str, Any]] = []
    for line in lines:
        if line["class"] != line["predicted_class"]:
            wrong.append(line)
    wrong.sort(key=itemgetter("split", "sample"))
    wrong.sort(key=_loss, reverse=True)
    return wrong


def _loss(line: Mapping[str, Any]) -> float:
    """The loss of a sample; infinite if it is missing or not finite."""
    loss = line.get("loss", math.inf)
    if is_number(loss) and math.isfinite(loss):
        return float(loss)
    return math.inf


def _shown(facts: RunData, line: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a misclassified sample: with the URL of its picture, and its text or its file."""
    text = shortened(str(line.get("file") or ""))
    if line.get("tokens"):
        words = "".join(facts.texts.get(token, "?") for token in line["tokens"])
        text = shortened(words, MOST_TEXT)
    return {
        "split": line["split"],
        "sample": line["sample"],
        "label": shortened(str(line["class"])),
        "predicted": shortened(str(line["predicted_class"])),
        "loss": line.get("loss"),
        "picture": facts.pictures.get((line["split"], line["sample"]), ""),
        "text": text,
    }
