"""What differs between two runs, from their directories alone; `Run.compare` calls the functions here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from hookrun.errors import Lookup
from hookrun.studies.compare.comparison.rows import (
    Compared,
    Difference,
    Pair,
    Samples,
    compared,
    known,
    measured,
    positions_of,
)
from hookrun.studies.kit.files import (
    ABOUT,
    CHECKPOINTS,
    OF_PARTS,
    Leaf,
    SampleTable,
    StoredCapture,
    captured_tensors,
    differences,
    is_batch,
    is_part,
)
from hookrun.studies.kit.passes import read_weights

By = Literal["module", "tokens"]
Cka = Callable[[StoredCapture, StoredCapture], float | None]
Row = dict[str, Any]
Lines = Iterable[Mapping[str, Any]]


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
    similarity = cka(*comparison.pairs[0]) if cka is not None and len(comparison.pairs) == 1 else None
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


# ---- records

_OF_PLACE = ("module", "other", "kind", "layer", "head")
_OF_RECORD = ("hook", "module", "path", "action", "mode", "epoch", "step", "call")
_KEPT = ("last", "best", "ema")


def metrics(lines: Lines) -> dict[str, float]:
    """``split/name`` -> the last value of each metric of a whole pass; ``split/name module`` for those of a module."""
    of_passes = (line for line in lines if not (is_batch(line) or is_part(line)))
    places = (
        (line, [str(line[key]) for key in _OF_PLACE if line.get(key) is not None]) for line in of_passes
    )
    values = {
        " ".join([f"{line.get('split')}/{name}", *place]): float(line[name])
        for line, place in places
        for name in line.keys() - ABOUT - OF_PARTS
        if isinstance(line[name], int | float)  # True and False too
    }
    return dict(sorted(values.items()))


def side_by_side(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float) -> list[Row]:
    """A row for each key of two mappings."""
    return [
        {
            "key": key,
            "run": before.get(key),
            "other": now.get(key),
            "differs": is_apart(before.get(key), now.get(key), tolerance),
        }
        for key in dict.fromkeys([*before, *now])
    ]


def is_apart(value: Any, other: Any, tolerance: float) -> bool:
    """Whether two values differ, numbers by more than the tolerance relative to the larger one; NaN equals NaN."""
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in (value, other)):
        return bool(value != other)
    is_close = math.isclose(value, other, rel_tol=tolerance)
    return not is_close and not (math.isnan(value) and math.isnan(other))


def differing(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float = 0.0) -> list[Row]:
    """A row for each key path at which two nested mappings differ."""
    return [
        {"key": key, "run": old, "other": new}
        for key, old, new in differences(before, now)
        if is_apart(old, new, tolerance)
    ]


def statistics(lines: Lines) -> dict[str, dict[str, Any]]:
    """Hook, module and moment of each line of stats.jsonl -> its numbers."""
    return {
        " ".join(f"{key} {line[key]}" for key in _OF_RECORD if line.get(key) not in (None, "")): {
            key: value for key, value in line.items() if key not in _OF_RECORD
        }
        for line in lines
    }


def plan(content: Mapping[str, Any]) -> dict[str, Any]:
    """plan.json with hooks by name and modules by path, without its hash."""
    hooks = {
        hook["name"]: {**hook, "targets": {target["path"]: target for target in hook.get("targets", [])}}
        for hook in content.get("hooks", [])
    }
    return {**{key: value for key, value in content.items() if key != "hash"}, "hooks": hooks}


def weights_file(run: Path, source: Any) -> Path | None:
    """The file with the weights of a run at its end: a checkpoint, or `source`, from which the weights came."""
    files = [run / CHECKPOINTS / f"{name}.safetensors" for name in _KEPT]
    files += [Path(source)] if isinstance(source, str) else []
    return next((file for file in files if file.suffix and file.is_file()), None)


def weights(file: Path | None, other: Path | None, tolerance: float) -> tuple[list[Row], str]:
    """A row for each tensor that is not the same, and which files were compared, or why none were.

    `differs` says whether the norm of the difference is above the tolerance.
    """
    if file is None or other is None:
        return [], "not compared: a run has neither a checkpoint nor a file that its weights come from"
    here, there, rows = read_weights(file), read_weights(other), list[Row]()
    for name in dict.fromkeys([*here, *there]):
        left, right = here.get(name), there.get(name)
        if left is None or right is None or left.shape != right.shape:
            shapes = ["none" if side is None else str(list(side.shape)) for side in (left, right)]
            rows.append({"weight": name, "differs": True, "note": f"shape {shapes[0]}, other {shapes[1]}"})
        elif left.numel():
            sums, apart, differs = measured(left.reshape(1, -1), right.reshape(1, -1), tolerance)
            found = Difference(sums[0], float(apart.max()))
            if found.relative_l2 != 0:
                rows.append(
                    {
                        "weight": name,
                        "differs": bool(differs),
                        "note": "",
                        "relative_l2": found.relative_l2,
                        "largest": found.largest,
                    }
                )
    return rows, f"{file} and {other}"


# ---- predictions

MOST_CHANGES = 1_000
"""The changed predictions that are listed; all are counted."""

Predicted = Mapping[tuple[str, int], Any]
"""(split, sample) -> the predicted class, or the text that was generated."""


def predictions(
    here: Predicted,
    there: Predicted,
    outputs: Leaf | None,
    others: Leaf | None,
    samples: SampleTable,
    tolerance: float,
) -> dict[str, Any]:
    """How the predictions of two runs, and the outputs that they wrote, differ.

    compared:    the number of samples, or of tokens if each has a prediction; `changed`: how many have another one
    changes:     the first of these, from what to what
    kl:          the mean of KL(P || Q) in nats, P of the first run, Q of the other one; None: there are no scores
    relative_l2: of all outputs; `largest`: the largest difference of two outputs
    """
    common = [place for place in here if place in there]
    changes = [
        _change(*place, None, here[place], there[place]) for place in common if here[place] != there[place]
    ]
    if outputs is not None and others is not None:
        comparison = compared(_main(outputs), _main(others), samples.by_sample, tolerance)
    else:
        is_one = outputs is not None or others is not None
        comparison = Compared([], {}, ["only one of the runs wrote its outputs"] if is_one else [], False)
    divergences, difference = list[float](), comparison.by_token.get(-1)
    for pair in comparison.pairs:
        of_pair, of_tokens = _scores(pair, samples, is_class=bool(common))
        divergences += of_pair
        changes += of_tokens
    return {
        "compared": len(common) or len(divergences),
        "kl": sum(divergences) / len(divergences) if divergences else None,
        "relative_l2": None if difference is None else difference.relative_l2,
        "largest": None if difference is None else difference.largest,
        "note": "; ".join(comparison.notes),
        "changed": len(changes),
        "differs": bool(changes or comparison.notes or (difference is not None and difference.first)),
        "changes": changes[:MOST_CHANGES],
    }


def _scores(pair: Pair, samples: SampleTable, *, is_class: bool) -> tuple[list[float], list[dict[str, Any]]]:
    """KL of each sample or token, and the changed predictions of tokens; empty if the rows are not scores of classes.

    is_class: a predicted class was recorded for each sample
    """
    rows, (_, *shape) = pair.rows, pair.rows.shape
    positions = positions_of(rows, samples.by_sample)
    samples_of = list(zip(rows.splits, rows.sample_ids.tolist(), strict=True))
    is_known = is_class and len(shape) == 1 if positions is None else len(shape) == 2
    divergences, changes = list[float](), list[dict[str, Any]]()
    for place in pair.places() if is_known and pair.other.shape == rows.shape and shape[-1] > 1 else ():
        logs, others = (side[place].double().log_softmax(-1) for side in (pair.rows, pair.other))
        if positions is not None:
            at = positions[place]
            best, now = logs.argmax(-1), others.argmax(-1)
            for row, column in ((best != now) & (at >= 0)).nonzero().tolist():
                tokens = int(best[row, column]), int(now[row, column])
                names = [samples.texts.get(token) or token for token in tokens]
                split, sample = samples_of[place][row]
                changes.append(_change(split, sample, int(at[row, column]), *names))
            logs, others = logs[at >= 0], others[at >= 0]
        terms = torch.where(logs == -torch.inf, 0.0, logs.exp() * (logs - others))
        divergences += terms.sum(-1).clamp(min=0).tolist()
    return divergences, changes


def _change(split: str, sample: int, token: int | None, before: Any, now: Any) -> dict[str, Any]:
    return {"split": split, "sample": sample, "token": token, "run": before, "other": now}


def _main(leaf: Leaf) -> StoredCapture:
    """The model's main output, as for its loss."""
    if isinstance(leaf, StoredCapture):
        return leaf
    named = (leaf[path] for name in ("logits", "out") for path in leaf if path.strip(".") == name)
    return next(named, next(iter(leaf.values())))
