"""The predictions of a classifier: the confusion matrix, and the samples with the highest loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookrun.report.draw.charts import Figure
from hookrun.report.draw.pictures import heat
from hookrun.report.draw.text import shortened
from hookrun.report.facts import Facts
from hookrun.report.lines import is_number
from hookrun.report.section import ReportSection

MOST_CLASSES = 40
"""Classes of a matrix; for more classes only the most frequent confusions are listed."""
MOST_PAIRS = 20
MOST_WORST = 16
MOST_TEXT = 300
"""Characters shown of a sample that is a text."""
_NUMBERED = 12


@dataclass(frozen=True)
class WorstSample:
    """A sample with a high loss.

    picture: its URL; "" if the run kept none
    text:    the text of a token sequence, or the sample's file
    """

    split: str
    sample: int
    label: str
    predicted: str
    loss: float
    picture: str
    text: str


@dataclass(frozen=True)
class Confusions:
    """The confusions of one split.

    right:  how many of the `total` samples were classified correctly
    matrix: the confusion matrix; None if there are too many classes
    pairs:  (class, predicted class, count) of the misclassified samples, the most frequent first
    """

    split: str
    total: int
    right: int
    matrix: Figure | None
    pairs: list[tuple[str, str, int]]


@dataclass(frozen=True)
class Classification:
    """The data of the section. is_sample: only a part of the samples was read."""

    splits: list[Confusions]
    worst: list[WorstSample]
    is_sample: bool


def _classes(facts: Facts) -> Classification | None:
    """None if no sample has both a class and a predicted class."""
    lines = [
        line
        for line in facts.samples.records
        if line.get("class") is not None and line.get("predicted_class") is not None
    ]
    if not lines:
        return None
    splits = dict.fromkeys(str(line["split"]) for line in lines)
    found = [_confusions(split, [line for line in lines if line["split"] == split]) for split in splits]
    return Classification(found, _worst(facts, lines), facts.samples.is_sample)


def _confusions(split: str, lines: Sequence[dict[str, Any]]) -> Confusions:
    counts = Counter((str(line["class"]), str(line["predicted_class"])) for line in lines)
    names = sorted({name for pair in counts for name in pair}, key=_by_number)
    right = sum(count for (label, predicted), count in counts.items() if label == predicted)
    wrong = [(*pair, count) for pair, count in counts.most_common() if pair[0] != pair[1]]
    pairs = [
        (shortened(label), shortened(predicted), count) for label, predicted, count in wrong[:MOST_PAIRS]
    ]
    matrix = _matrix(counts, names, split) if 1 < len(names) <= MOST_CLASSES else None
    return Confusions(split, len(lines), right, matrix, pairs)


def _matrix(counts: Counter[tuple[str, str]], names: Sequence[str], split: str) -> Figure:
    values = np.array([[counts[row, column] for column in names] for row in names], dtype=np.float32)
    shown = [shortened(name, 24) for name in names]
    return heat(
        f"confusion matrix, {split}",
        values,
        rows=shown,
        columns=shown,
        x="across: predicted; down: class",
        numbers=len(names) <= _NUMBERED,
        note="how many samples of each class have each predicted class",
    )


def _worst(facts: Facts, lines: Sequence[dict[str, Any]]) -> list[WorstSample]:
    known = [line for line in lines if is_number(line.get("loss")) and math.isfinite(line["loss"])]
    known.sort(key=lambda line: (-line["loss"], line["split"], line["sample"]))
    return [
        WorstSample(
            str(line["split"]),
            line["sample"],
            shortened(str(line["class"])),
            shortened(str(line["predicted_class"])),
            float(line["loss"]),
            facts.pictures.get((line["split"], line["sample"]), ""),
            _text(facts, line),
        )
        for line in known[:MOST_WORST]
    ]


def _text(facts: Facts, line: dict[str, Any]) -> str:
    sequence = facts.sequences.get((line["split"], line["sample"]))
    if sequence is not None:
        return shortened("".join(facts.texts.get(token, "?") for token in line["tokens"]), MOST_TEXT)
    return shortened(str(line.get("file") or ""))


def _by_number(name: str) -> tuple[bool, int, str]:
    """A sort key: numbers by size, then other names."""
    is_number = name.isascii() and name.isdecimal() and len(name) < 10
    return not is_number, int(name) if is_number else 0, name


SECTION = ReportSection("classes", "Classes", _classes, "classes.html")
