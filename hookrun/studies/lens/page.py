"""The results of task=lens: the most likely token by layer and position, and what each part adds to the answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from hookrun.errors import shortened
from hookrun.studies.kit.drawing import (
    LEVELS,
    Facts,
    Figure,
    HeatMap,
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


def build(facts: Facts) -> dict[str, Any] | None:
    """The tables of the first samples, figures of the means, and notes on what is not shown."""
    read = sampled(facts.path / LENS, LensLine, limit=_BYTES, from_start=True)
    means = [
        line
        for line in facts.metrics.records
        if {"kind", "layer"} <= line.keys()
        and isinstance(line.get("module"), str)
        and all(line.get(key) is None or is_place(line[key]) for key in ("layer", "head"))
    ]
    if not read.records and not means:
        return None
    kind = str((read.records or means)[0]["kind"])
    by_sample = grouped(read.records, itemgetter("split", "sample"))
    if read.is_sample and len(by_sample) > 1:
        by_sample.popitem()  # it may lack its last lines
    tables, notes = _tables(by_sample), [*read.notes]
    if read.is_sample or len(by_sample) > len(tables):
        notes.append(f"the first {len(tables)} samples are shown; {LENS} holds all of them")
    longest = max((len({line["position"] for line in lines}) for lines in by_sample.values()), default=0)
    most = max((len(table["columns"]) for table in tables), default=longest)
    if most < longest:
        notes.append(f"of each sample at most the last {most} positions are shown")
    return {
        "kind": kind,
        "tables": [table for table in tables if table["rows"]],
        "figures": _figures(kind, means),
        "notes": notes,
    }


def _tables(by_sample: Mapping[tuple[str, int], list[Line]]) -> list[dict[str, Any]]:
    """Tables of the first samples, as many as fit the page; at least the first, with as many positions as fit.

    A table has a column for each position and a row for each part, the last one first.
    """
    tables, left = list[dict[str, Any]](), MOST_CELLS
    for (split, sample), lines in list(by_sample.items())[:MOST_SAMPLES]:
        names = list(dict.fromkeys(map(_name, lines)))[:MOST_PARTS]
        tokens = {line["position"]: _token(line["token"], line["text"]) for line in lines}
        positions = sorted(tokens)[-min(MOST_POSITIONS, MOST_CELLS // len(names)) :]  # the answer is the last
        if tables and len(names) * len(positions) > left:
            break
        left -= len(names) * len(positions)
        known = {(_name(line), line["position"]): line for line in lines if line["top"]}
        rows = [
            (name, [_cell(known[name, at]) if (name, at) in known else None for at in positions])
            for name in reversed(names)
        ]
        tables.append(
            {
                "title": f"{split} sample {sample}",
                "columns": [f"{at} {tokens[at]}" for at in positions],
                "rows": [(name, row) for name, row in rows if any(row)],
            }
        )
    return tables


def _name(line: Line) -> str:
    head = line.get("head")
    return shortened(str(line["part"])) + ("" if head is None else f" head {head}")


def _token(token: int, text: str | None) -> str:
    return token_name(text or "", token, _CHARACTERS)


def _cell(line: Line) -> dict[str, str]:
    """The most likely token and its probability, the colour of the probability, and a tooltip with the details."""
    (token, text, probability), *_ = line["top"]
    best = ", ".join(f"{_token(each, said)} {number(chance)}" for each, said, chance in line["top"][:10])
    details = [f"{key.replace('_', ' ')} {number(line[key])}" for key in _SAID if is_number(line.get(key))]
    head = f"{_name(line)}, position {line['position']} {_token(line['token'], line['text'])}"
    share = min(max(probability, 0.0), 1.0) if math.isfinite(probability) else 0.0
    red, green, blue = palette(diverging=False)[round(share * (LEVELS - 1))]
    return {
        "token": _token(token, text),
        "probability": f"{probability:.2f}",
        "style": f"background:rgb({red} {green} {blue});color:{'#111' if is_light(red, green, blue) else '#fff'}",
        "title": "\n".join([head, best, *details]),
    }


_SAID = ("answer_logit", "wrong_logit", "logit_difference", "kl_to_output")


def _figures(kind: str, means: list[Line]) -> list[Figure]:
    """For the residual stream the divergence from the output and the metrics by layer; else what each part adds."""
    is_residual = kind == "residual"
    figures = list[Figure]()
    for name in (
        ("kl", "accuracy", "logit_difference") if is_residual else ("logit_difference", "answer_logit")
    ):
        lines = [line for line in means[: MOST_PARTS * 20] if is_number(line.get(name))]
        by_head = {
            (line["module"], line["head"]): line[name]
            for line in lines
            if line.get("head") is not None and line["head"] < MOST_PARTS
        }
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
        if others := [line for line in lines if line.get("head") is None][:MOST_PARTS]:
            figures.append(
                bars(
                    _TITLES[name] if is_residual else f"{_TITLES[name]}: what each part adds, mean",
                    [float(line[name]) for line in others],
                    x="part",
                    y=name.replace("_", " "),
                    names=[shortened(line["module"]) for line in others],
                )
            )
        if figures and not is_residual:
            break
    return figures


_TITLES = {
    "kl": "KL divergence of the output from each layer, in nats",
    "accuracy": "accuracy by layer",
    "logit_difference": "logit difference, answer minus wrong",
    "answer_logit": "logit of the answer",
}
