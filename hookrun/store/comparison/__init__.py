"""What differs between two runs, from their directories alone; `Run.compare` calls the functions here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hookrun.errors import Lookup, counted, listed
from hookrun.store.captures.read import Leaf, StoredCapture, captured_tensors
from hookrun.store.comparison.rows import Compared, Difference, MatchedRows, Samples, compared, known
from hookrun.store.records import Comparison

By = Literal["module", "tokens"]
Cka = Callable[[MatchedRows, MatchedRows], float | None]
Row = dict[str, Any]


def reasons(comparison: Comparison) -> list[str]:
    """What differs in the results, in words; empty if nothing does."""
    reasons, first = list[str](), comparison.first
    if first is not None:
        where = [f"{key} {first[key]}" for key in ("sample", "token") if first[key] is not None]
        reasons.append(", ".join([f"first: {first['module'] or '(root)'}", *where]))
    notes = {label(row): row["note"] for row in comparison.captures if row["note"]}
    reasons += [f"{counted(count, 'capture')}: {note}" for note, count in Counter(notes.values()).items()]
    for side in ("run", "other"):
        if names := [label(row) for row in comparison.unpaired if row["only"] == side]:
            reasons.append(f"only {getattr(comparison, side)} has {listed(names, 6)}")
    for name in ("metrics", "weights", "statistics"):
        if count := sum(row.get("differs", True) for row in getattr(comparison, name)):
            reasons.append(f"{name} that differ: {count:,}")
    predictions = comparison.predictions
    if predictions["changed"]:
        reasons.append(f"predictions that changed: {predictions['changed']:,} of {predictions['compared']:,}")
    elif predictions["differs"]:
        note = predictions["note"] or f"relative L2 {predictions['relative_l2']:.3g}"
        reasons.append(f"predictions: {note}")
    return reasons


def label(row: Mapping[str, Any]) -> str:
    """``seen at layers.0``, with the place in a container."""
    return f"{row['hook']} at {row['module'] or '(root)'} {row['path']}".rstrip()


def compare_captures(
    captures: Lookup[Lookup[Leaf]],
    others: Lookup[Lookup[Leaf]],
    samples: Samples,
    *,
    by: Sequence[By],
    tolerance: float,
    trains: bool,
    cka: Cka | None,
) -> tuple[Row | None, list[Row], list[Row]]:
    """Where captures differ first, a row for each of both runs, and those of one run only, in the order of execution.

    trains: the weights change from step to step, so that the first step that differs counts before the first module
    """
    rows, unpaired, paired = list[Row](), list[Row](), set[StoredCapture]()
    firsts = list[tuple[int, int, Row]]()
    for capture in _in_order(captures):
        leaf = others[capture.hook].get(capture.module) if capture.hook in others else None
        partner = leaf.get(capture.path) if isinstance(leaf, Lookup) else None if capture.path else leaf
        if partner is None:
            unpaired.append({**_about(capture), "only": "run"})
            continue
        paired.add(partner)
        comparison = compared(capture, partner, samples, tolerance, by_token="tokens" in by)
        rows += [_about(capture) | row for row in _rows(comparison, cka)]
        found = [each.first for each in comparison.by_token.values() if each.first is not None]
        if found or comparison.other_shape:
            time, sample, token = min(found, default=(0, -1, -1))
            first = {"module": capture.module, "sample": known(sample), "token": known(token)}
            firsts.append((time if trains else 0, capture.number, first))
    unpaired += [{**_about(each), "only": "other"} for each in _in_order(others) if each not in paired]
    return min(firsts, default=(0, 0, None), key=lambda first: first[:2])[2], rows, unpaired


def _in_order(captures: Lookup[Lookup[Leaf]]) -> list[StoredCapture]:
    return sorted(captured_tensors(captures), key=lambda capture: capture.number)


def _about(capture: StoredCapture) -> Row:
    return {"hook": capture.hook, "module": capture.module, "path": capture.path}


def _rows(comparison: Compared, cka: Cka | None) -> list[Row]:
    """The rows of the table of captures; a single one with the reason if no values were compared."""
    matched = comparison.pairs
    similarity = cka(matched[0].rows, matched[0].other) if cka is not None and len(matched) == 1 else None
    return [
        {
            "token": known(token),
            **(found.numbers() if comparison.by_token else {**dict.fromkeys(found.numbers()), "rows": 0}),
            "cka": similarity,
            "differs": comparison.other_shape or found.first is not None,
            "note": "; ".join(comparison.notes),
        }
        for token, found in sorted((comparison.by_token or {-1: Difference()}).items())
    ]
