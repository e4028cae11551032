"""The results of task=lens: the most likely token by layer and position, and what each part adds to the answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from hookrun.errors import shortened
from hookrun.studies.kit.drawing import (
    LEVELS,
    Figure,
    HeatMap,
    RunData,
    bars,
    is_light,
    is_number,
    is_place,
    matrix,
    number,
    palette,
    sampled,
    token_name,
)
from hookrun.studies.kit.record_types import grouped
from hookrun.studies.lens.records import LENS, LensLine

ID = "lens"
TITLE = "Lens"
POSITION = 50

MOST_SAMPLES = 8
MOST_PARTS = 200
MOST_POSITIONS = 96
MOST_CELLS = 6_000
"""Of all tables together."""
_BYTES = 16 * 2**20
_CHARACTERS = 24

Line = dict[str, Any]


def build(facts: RunData) -> dict[str, Any] | None:
    """The tables of the first samples, figures of the means, and notes on what is not shown."""
    read = sampled(facts.path / LENS, LensLine, limit=_BYTES, from_start=True)
    means = [line for line in facts.metrics.records if _is_mean(line)]
    lines = read.records or means
    if not lines:
        return None
    kind = str(lines[0]["kind"])
    by_sample = grouped(read.records, itemgetter("split", "sample"))
    if read.is_sample and len(by_sample) > 1:
        by_sample.popitem()  # it may lack its last lines
    tables = _tables(by_sample)
    notes = [*read.notes]
    if read.is_sample or len(by_sample) > len(tables):
        notes.append(f"the first {len(tables)} samples are shown; {LENS} holds all of them")
    if tables:
        most = max(len(table["columns"]) for table in tables)
        if any(len(_tokens(lines)) > most for lines in by_sample.values()):
            notes.append(f"of each sample at most the last {most} positions are shown")
    return {
        "kind": kind,
        "tables": [table for table in tables if table["rows"]],
        "figures": _figures(kind, means[: MOST_PARTS * 20]),
        "notes": notes,
    }


def _is_mean(line: Line) -> bool:
    """Whether a line of metrics.jsonl has the means of a part of the model."""
    if not {"kind", "layer"} <= line.keys() or not isinstance(line.get("module"), str):
        return False
    return all(line.get(key) is None or is_place(line[key]) for key in ("layer", "head"))


def _tables(by_sample: Mapping[tuple[str, int], list[Line]]) -> list[dict[str, Any]]:
    """Tables of the first samples, as many as fit the page; at least the first, with as many positions as fit."""
    tables: list[dict[str, Any]] = []
    left = MOST_CELLS
    for (split, sample), lines in list(by_sample.items())[:MOST_SAMPLES]:
        names = list(dict.fromkeys(map(_name, lines)))[:MOST_PARTS]
        tokens = _tokens(lines)
        most = min(MOST_POSITIONS, MOST_CELLS // len(names))
        positions = sorted(tokens)[-most:]  # the answer is the last
        if tables and len(names) * len(positions) > left:
            break
        left -= len(names) * len(positions)
        columns = [f"{position} {tokens[position]}" for position in positions]
        rows = _rows(lines, names, positions)
        tables.append({"title": f"{split} sample {sample}", "columns": columns, "rows": rows})
    return tables


def _rows(
    lines: list[Line], names: list[str], positions: list[int]
) -> list[tuple[str, list[dict[str, str] | None]]]:
    """A row for each part, the last one first, with a cell for each position; parts without a token are left out."""
    cells: dict[tuple[str, int], Line] = {}
    for line in lines:
        if line["top"]:
            cells[_name(line), line["position"]] = line
    rows: list[tuple[str, list[dict[str, str] | None]]] = []
    for name in reversed(names):
        row: list[dict[str, str] | None] = []
        for position in positions:
            line_of_cell = cells.get((name, position))
            row.append(None if line_of_cell is None else _cell(line_of_cell))
        if any(row):
            rows.append((name, row))
    return rows


def _tokens(lines: list[Line]) -> dict[int, str]:
    """Position -> its token, as text."""
    return {line["position"]: _token(line["token"], line["text"]) for line in lines}


def _name(line: Line) -> str:
    name = shortened(str(line["part"]))
    if line.get("head") is not None:
        name += f" head {line['head']}"
    return name


def _token(token: int, text: str | None) -> str:
    return token_name(text or "", token, _CHARACTERS)


def _cell(line: Line) -> dict[str, str]:
    """The most likely token and its probability, the colour of the probability, and a tooltip with the details."""
    best = [f"{_token(token, text)} {number(chance)}" for token, text, chance in line["top"][:10]]
    details = [f"{_name(line)}, position {line['position']} {_token(line['token'], line['text'])}"]
    details.append(", ".join(best))
    for key in _DETAILS:
        if is_number(line.get(key)):
            details.append(f"{key.replace('_', ' ')} {number(line[key])}")
    token, text, probability = line["top"][0]
    share = 0.0
    if math.isfinite(probability):
        share = min(max(probability, 0.0), 1.0)
    red, green, blue = palette(diverging=False)[round(share * (LEVELS - 1))]
    colour = "#111" if is_light(red, green, blue) else "#fff"
    return {
        "token": _token(token, text),
        "probability": f"{probability:.2f}",
        "style": f"background:rgb({red} {green} {blue});color:{colour}",
        "title": "\n".join(details),
    }


_DETAILS = ("answer_logit", "wrong_logit", "logit_difference", "kl_to_output")
_OF_RESIDUAL = ("kl", "accuracy", "logit_difference")
_OF_CONTRIBUTIONS = ("logit_difference", "answer_logit")


def _figures(kind: str, means: list[Line]) -> list[Figure]:
    """For the residual stream the divergence from the output and the metrics by layer; else what each part adds."""
    if kind == "residual":
        figures = list[Figure]()
        for name in _OF_RESIDUAL:
            figures += _figures_of(name, _TITLES[name], means)
        return figures
    for name in _OF_CONTRIBUTIONS:
        figures = _figures_of(name, f"{_TITLES[name]}: what each part adds, mean", means)
        if figures:
            return figures
    return []


def _figures_of(name: str, title: str, means: list[Line]) -> list[Figure]:
    """A map of the heads of each layer, and bars of the parts without heads, as far as the lines have this mean."""
    by_head: dict[tuple[str, int], float] = {}
    parts = list[Line]()
    for line in means:
        if not is_number(line.get(name)):
            continue
        if line.get("head") is None:
            parts.append(line)
        elif line["head"] < MOST_PARTS:
            by_head[line["module"], line["head"]] = line[name]
    figures: list[Figure] = []
    if by_head:
        rows = list(dict.fromkeys(module for module, _ in by_head))[:MOST_PARTS]
        heads = range(max(head for _, head in by_head) + 1)
        figures.append(
            HeatMap(
                f"{_TITLES[name]}: what each head adds, mean",
                matrix(by_head, rows, heads),
                rows=[shortened(row) for row in rows],
                columns=[str(head) for head in heads],
                x="head",
                numbers=len(heads) <= 12 and len(rows) <= 12,
            ).figure()
        )
    if parts:
        parts = parts[:MOST_PARTS]
        values = [float(line[name]) for line in parts]
        names = [shortened(line["module"]) for line in parts]
        figures.append(bars(title, values, x="part", y=name.replace("_", " "), names=names))
    return figures


_TITLES = {
    "kl": "KL divergence of the output from each layer, in nats",
    "accuracy": "accuracy by layer",
    "logit_difference": "logit difference, answer minus wrong",
    "answer_logit": "logit of the answer",
}
