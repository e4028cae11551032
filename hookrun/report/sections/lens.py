"""The results of task=lens: the most likely token by layer and position, and what each part adds to the answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookrun.report.draw.charts import Figure, bars
from hookrun.report.draw.pictures import LEVELS, heat, palette
from hookrun.report.draw.text import number, one_line, shortened
from hookrun.report.facts import Facts
from hookrun.report.lines import is_number, is_place, sampled
from hookrun.report.section import ReportSection
from hookrun.store.format import LENS
from hookrun.store.records import LensLine

MOST_SAMPLES = 8
MOST_PARTS = 200
MOST_POSITIONS = 96
MOST_CELLS = 6_000
"""Of all tables together."""
_BYTES = 16 * 2**20
_CHARACTERS = 24
_LIGHT = 0.55
"""Above this fraction of the scale the colours are light and need dark letters."""

Line = dict[str, Any]


@dataclass(frozen=True)
class LensCell:
    """The most likely token, its probability as text, the style of the cell, and a tooltip with the details."""

    token: str
    probability: str
    style: str
    title: str


@dataclass(frozen=True)
class LensTable:
    """One sample: a column for each position, a row for each part, the last one first."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[LensCell | None]]]


@dataclass(frozen=True)
class LensResult:
    """The tables of the first samples and figures of the means.

    notes: what is not shown
    """

    kind: str
    tables: list[LensTable]
    figures: list[Figure]
    notes: list[str]


def _lens(facts: Facts) -> LensResult | None:
    found = sampled(facts.path / LENS, LensLine, limit=_BYTES, from_start=True)
    means = [line for line in facts.metrics.records if _is_mean(line)]
    if not found.records and not means:
        return None
    kind = str((found.records or means)[0]["kind"])
    by_sample = dict[tuple[str, int], list[Line]]()
    for line in found.records:
        by_sample.setdefault((line["split"], line["sample"]), []).append(line)
    if found.is_sample and len(by_sample) > 1:
        by_sample.popitem()  # it may lack its last lines
    tables, notes = _tables(by_sample), [*found.notes]
    if found.is_sample or len(by_sample) > len(tables):
        notes.append(f"the first {len(tables)} samples are shown; {LENS} holds all of them")
    longest = max((len({line["position"] for line in lines}) for lines in by_sample.values()), default=0)
    most = max((len(table.columns) for table in tables), default=longest)
    if most < longest:
        notes.append(f"of each sample at most the first {most} positions are shown")
    return LensResult(kind, [table for table in tables if table.rows], _figures(kind, means), notes)


def _is_mean(line: Line) -> bool:
    """Whether a line of metrics.jsonl is the mean of a part, with valid numbers of layer and head or without them."""
    return (
        "kind" in line
        and "layer" in line
        and isinstance(line.get("module"), str)
        and all(line.get(key) is None or is_place(line[key]) for key in ("layer", "head"))
    )


# ---- tables ----------------------------------------------------------------------------------------------------


def _tables(by_sample: Mapping[tuple[str, int], list[Line]]) -> list[LensTable]:
    """Tables of the first samples, as many as fit the page; at least the first, with as many positions as fit."""
    found, left = list[LensTable](), MOST_CELLS
    for (split, sample), lines in list(by_sample.items())[:MOST_SAMPLES]:
        names = list(dict.fromkeys(map(_name, lines)))[:MOST_PARTS]
        heads = {line["position"]: _text(line["token"], line["text"]) for line in lines}
        positions = sorted(heads)[: min(MOST_POSITIONS, MOST_CELLS // len(names))]
        if found and len(names) * len(positions) > left:
            break
        left -= len(names) * len(positions)
        cells = {(_name(line), line["position"]): line for line in lines if line["top"]}
        rows = [
            (name, [_cell(cells[name, at]) if (name, at) in cells else None for at in positions])
            for name in reversed(names)
        ]
        there = [(name, row) for name, row in rows if any(row)]
        columns = [f"{position} {heads[position]}" for position in positions]
        found.append(LensTable(f"{split} sample {sample}", columns, there))
    return found


def _name(line: Line) -> str:
    head = line.get("head")
    return shortened(str(line["part"])) + ("" if head is None else f" head {head}")


def _text(token: int, text: str | None) -> str:
    """The text of a token with visible spaces; its number if it has no text."""
    if not text:
        return str(token)
    return shortened(one_line(text).replace(" ", "␣"), _CHARACTERS)


def _cell(line: Line) -> LensCell:
    (token, text, probability), *_ = line["top"]
    best = ", ".join(f"{_text(each, said)} {number(chance)}" for each, said, chance in line["top"][:10])
    facts = [f"{key.replace('_', ' ')} {number(line[key])}" for key in _SAID if is_number(line.get(key))]
    head = f"{_name(line)}, position {line['position']} {_text(line['token'], line['text'])}"
    return LensCell(
        _text(token, text), f"{probability:.2f}", _style(probability), "\n".join([head, best, *facts])
    )


_SAID = ("answer_logit", "wrong_logit", "logit_difference", "kl_to_output")


def _style(probability: float) -> str:
    """CSS with the colour of a probability and a text colour that can be read on it."""
    part = min(max(probability, 0.0), 1.0) if math.isfinite(probability) else 0.0
    red, green, blue = palette(diverging=False)[round(part * (LEVELS - 1))]
    return f"background:rgb({red} {green} {blue});color:{'#111' if part > _LIGHT else '#fff'}"


# ---- pictures --------------------------------------------------------------------------------------------------


def _figures(kind: str, means: list[Line]) -> list[Figure]:
    """For the residual stream the divergence from the output and the metrics by layer; else what each part adds."""
    means = means[: MOST_PARTS * 20]
    measures = (
        ("kl", "accuracy", "logit_difference") if kind == "residual" else ("logit_difference", "answer_logit")
    )
    known = [name for name in measures if any(is_number(line.get(name)) for line in means)]
    if kind != "residual":
        known = known[:1]
    found = list[Figure]()
    for name in known:
        lines = [line for line in means if is_number(line.get(name))]
        by_head = [line for line in lines if line.get("head") is not None and line["head"] < MOST_PARTS]
        others = [line for line in lines if line.get("head") is None]
        if by_head:
            found.append(_by_head(name, by_head))
        if others:
            found.append(_bars(kind, name, others))
    return found


_TITLES = {
    "kl": "KL divergence of the output from each layer, in nats",
    "accuracy": "accuracy by layer",
    "logit_difference": "logit difference, answer minus wrong",
    "answer_logit": "logit of the answer",
}


def _bars(kind: str, name: str, lines: list[Line]) -> Figure:
    said = "" if kind == "residual" else ": what each part adds, mean"
    names = [shortened(line["module"]) for line in lines][:MOST_PARTS]
    values = [float(line[name]) for line in lines][:MOST_PARTS]
    return bars(f"{_TITLES[name]}{said}", values, x="part", y=name.replace("_", " "), names=names)


def _by_head(name: str, lines: list[Line]) -> Figure:
    rows = list(dict.fromkeys(line["module"] for line in lines))[:MOST_PARTS]
    count = max(line["head"] for line in lines) + 1
    values = np.full((len(rows), count), np.nan, dtype=np.float32)
    place = {row: n for n, row in enumerate(rows)}
    for line in lines:
        row, head = place.get(line["module"]), line["head"]
        if row is not None:
            values[row, head] = np.clip(line[name], -1e30, 1e30)
    columns = [str(head) for head in range(count)]
    names = [shortened(row) for row in rows]
    title = f"{_TITLES[name]}: what each head adds, mean"
    return heat(title, values, rows=names, columns=columns, x="head", numbers=count <= 12 and len(rows) <= 12)


SECTION = ReportSection("lens", "Lens", _lens, "lens.html")
