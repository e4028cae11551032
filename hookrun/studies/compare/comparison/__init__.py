"""What differs between two runs, from their directories alone; `Run.compare` calls the functions here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hookrun.studies.compare.comparison.pairing import Pairing
from hookrun.studies.compare.comparison.rows import (
    NEVER,
    Compared,
    Difference,
    Pair,
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
    Run,
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
    run: Run,
    other: Run,
    pairing: Pairing,
    *,
    by: Sequence[By],
    tolerance: float,
    trains: bool,
    cka: Cka | None,
) -> tuple[Row | None, list[Row], list[Row]]:
    """Where captures differ first, a row for each of both runs, and those of one run only, in the order of execution.

    trains: the weights change from step to step, so that the first step that differs counts before the first module
    """
    rows: list[Row] = []
    unpaired: list[Row] = []
    paired = set[StoredCapture]()
    first: Row | None = None
    first_time = (math.inf, 0)
    for capture in _in_order(run):
        about = _about(capture)
        partner = pairing.partner_of(capture, other)
        if partner is None:
            is_expected = pairing.is_expected(capture, pairing.partner(capture.module), other)
            unpaired.append(about | _only("run", is_expected))
            continue
        paired.add(partner)
        comparison = compared(
            capture,
            partner,
            run.samples.by_sample,
            tolerance,
            by_token="tokens" in by,
            order=pairing.orders.get(partner.module, ()),
            counts=pairing.counts.get(capture.hook, (0, 0)),
        )
        rows += [about | row for row in _rows(comparison, cka)]
        if comparison.first == NEVER:
            continue
        time, sample, token = comparison.first
        place = (time if trains else 0, capture.number)
        if place < first_time:
            first_time = place
            first = {"module": capture.module, "sample": known(sample), "token": known(token)}
    for capture in _in_order(other):
        if capture not in paired:
            is_expected = pairing.is_expected(capture, pairing.first(capture.module), run)
            unpaired.append(_about(capture) | _only("other", is_expected))
    return first, rows, unpaired


def _in_order(run: Run) -> list[StoredCapture]:
    return sorted(captured_tensors(run.captures), key=lambda capture: capture.number)


def _about(capture: StoredCapture) -> Row:
    return {"hook": capture.hook, "module": capture.module, "path": capture.path}


def _only(side: str, is_expected: bool) -> Row:
    """What one run captured alone. It is a difference where a partner is expected in the other one."""
    return {"only": side} if is_expected else {"only": side, "differs": False}


def _rows(comparison: Compared, cka: Cka | None) -> Iterator[Row]:
    """The rows of the table of captures; a single one with the reason if no values were compared."""
    pairs = comparison.pairs
    more: Row = {"cka": None, "differs": comparison.other_shape, "note": "; ".join(comparison.notes)}
    if any(pair.projections for pair in pairs):
        more |= {"largest": None, "fingerprint": pairs[0].projections}
    elif cka is not None and len(pairs) == 1:
        more["cka"] = cka(pairs[0].rows, pairs[0].other)
    if not comparison.by_token:
        yield {"token": None, **dict.fromkeys(Difference().numbers()), "rows": 0, **more}
    for token, difference in sorted(comparison.by_token.items()):
        differs = comparison.other_shape or difference.first != NEVER
        yield {"token": known(token), **difference.numbers(), **more, "differs": differs}


# ---- records

_OF_PLACE = ("module", "other", "kind", "layer", "head")
_OF_RECORD = ("hook", "module", "path", "action", "mode", "epoch", "step", "call")
_KEPT = ("last", "best", "ema")


def metrics(lines: Lines) -> dict[str, float]:
    """``split/name`` -> the last value of each metric of a whole pass; ``split/name module`` for those of a module."""
    values: dict[str, float] = {}
    for line in lines:
        if is_batch(line) or is_part(line):
            continue
        place = [str(line[key]) for key in _OF_PLACE if line.get(key) is not None]
        for name in line.keys() - ABOUT - OF_PARTS:
            if isinstance(line[name], int | float):  # True and False too
                values[" ".join([f"{line.get('split')}/{name}", *place])] = float(line[name])
    return dict(sorted(values.items()))


def side_by_side(before: dict[str, float], now: dict[str, float], tolerance: float) -> list[Row]:
    """A row for each metric of two runs."""
    rows: list[Row] = []
    for key in before | now:
        row = {"key": key, "run": before.get(key), "other": now.get(key)}
        rows.append(row | {"differs": is_apart(row["run"], row["other"], tolerance)})
    return rows


def is_apart(value: Any, other: Any, tolerance: float) -> bool:
    """Whether two values differ, numbers by more than the tolerance relative to the larger one; NaN equals NaN."""
    for each in (value, other):
        if isinstance(each, bool) or not isinstance(each, int | float):
            return bool(value != other)
    if math.isnan(value) and math.isnan(other):
        return False
    return not math.isclose(value, other, rel_tol=tolerance)


def differing(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float = 0.0) -> list[Row]:
    """A row for each key path at which two nested mappings differ, of lists with the first item that does."""
    rows: list[Row] = []
    for key, old, new in differences(before, now):
        rows += islice(_apart(key, old, new, tolerance), 1)
    return rows


def _apart(key: str, old: Any, new: Any, tolerance: float) -> Iterator[Row]:
    """A row for each place at which two values differ, in lists of the same length ``key[2].edges[0]``."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (item, other) in enumerate(zip(old, new, strict=True)):
            yield from _apart(f"{key}[{number}]", item, other, tolerance)
    elif isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for name in old:
            yield from _apart(f"{key}.{name}", old[name], new[name], tolerance)
    elif is_apart(old, new, tolerance):
        yield {"key": key, "run": old, "other": new}


def statistics(lines: Lines, name: Callable[[str], str | None]) -> dict[str, dict[str, Any]]:
    """Hook, module and moment of each line of stats.jsonl -> its numbers.

    name: module -> what it is called here; None: its lines are left out
    """
    numbers: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line.get("module") is not None:
            line = {**line, "module": name(line["module"])}
            if line["module"] is None:
                continue
        place = [f"{key} {line[key]}" for key in _OF_RECORD if line.get(key) not in (None, "")]
        numbers[" ".join(place)] = {key: value for key, value in line.items() if key not in _OF_RECORD}
    return numbers


def plan(content: Mapping[str, Any]) -> dict[str, Any]:
    """plan.json with hooks by name and modules by path, without its hash."""
    hooks: dict[str, Any] = {}
    for hook in content.get("hooks", []):
        targets = {target["path"]: target for target in hook.get("targets", [])}
        hooks[hook["name"]] = {**hook, "targets": targets}
    return {**content, "hooks": hooks, "hash": None}


def _weights_file(run: Run) -> Path | None:
    """The file with the weights of a run at its end: a checkpoint, or the file from which the weights came."""
    files = [run.path / CHECKPOINTS / f"{name}.safetensors" for name in _KEPT]
    source = run.model.get("weights")
    if isinstance(source, str) and Path(source).suffix:
        files.append(Path(source))
    return next(filter(Path.is_file, files), None)


def weights(run: Run, other: Run, tolerance: float, pairing: Pairing) -> tuple[list[Row], str]:
    """A row for each tensor that is not the same, and which files were compared, or why none were.

    `differs` says whether the norm of the difference is above the tolerance.
    """
    if pairing.partners is not None:
        return [], "not compared: the two implementations may store them in other layouts"
    file = _weights_file(run)
    other_file = _weights_file(other)
    if file is None or other_file is None:
        return [], "not compared: a run has neither a checkpoint nor a file that its weights come from"
    before = read_weights(file)
    after = read_weights(other_file)
    rows: list[Row] = []
    for name in before | after:
        row = _compared_weight(before.get(name), after.get(name), tolerance)
        if row is not None:
            rows.append({"weight": name, **row})
    return rows, f"{file} and {other_file}"


def _compared_weight(before: Tensor | None, after: Tensor | None, tolerance: float) -> Row | None:
    """How far a tensor differs; None if it does not."""
    if before is None or after is None or before.shape != after.shape:
        return {"differs": True, "note": f"shape {_shape(before)}, other {_shape(after)}"}
    if not before.numel():
        return None
    sums, apart, differs = measured(before.reshape(1, -1), after.reshape(1, -1), tolerance)
    relative = Difference(sums=sums[0]).relative_l2
    if relative == 0:
        return None
    return {"differs": bool(differs), "note": "", "relative_l2": relative, "largest": float(apart.max())}


def _shape(tensor: Tensor | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))


# ---- predictions

MOST_CHANGES = 1_000
"""The changed predictions that are listed; all are counted."""

Predicted = Mapping[tuple[str, int], Any]
"""(split, sample) -> the predicted class, or the text that was generated."""


def predictions(
    before: Predicted,
    after: Predicted,
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
    common = [place for place in before if place in after]
    changed = [place for place in common if before[place] != after[place]]
    changes = [_change(*place, None, before[place], after[place]) for place in changed]
    comparison = Compared([], {}, [])
    if outputs is not None and others is not None:
        comparison = compared(_main(outputs), _main(others), samples.by_sample, tolerance)
    elif outputs is not None or others is not None:
        comparison.notes.append("only one of the runs wrote its outputs")
    divergences: list[float] = []
    for pair in comparison.pairs:
        of_pair, of_tokens = _scores(pair, samples, is_class=bool(common))
        divergences += of_pair
        changes += of_tokens
    difference = comparison.by_token.get(-1)
    return {
        "compared": len(common) or len(divergences),
        "kl": sum(divergences) / len(divergences) if divergences else None,
        "relative_l2": None if difference is None else difference.relative_l2,
        "largest": None if difference is None else difference.largest,
        "note": "; ".join(comparison.notes),
        "changed": len(changes),
        "differs": bool(changes or comparison.notes) or comparison.first != NEVER,
        "changes": changes[:MOST_CHANGES],
    }


def _scores(pair: Pair, samples: SampleTable, *, is_class: bool) -> tuple[list[float], list[Row]]:
    """KL of each sample or token, and the changed predictions of tokens; empty if the rows are not scores of classes.

    is_class: a predicted class was recorded for each sample
    """
    shape = pair.rows.shape[1:]
    positions = positions_of(pair.rows, samples.by_sample)
    are_scores = is_class and len(shape) == 1 if positions is None else len(shape) == 2
    if not are_scores or pair.other.shape != pair.rows.shape or shape[-1] == 1:
        return [], []
    divergences: list[float] = []
    changes: list[Row] = []
    for place in pair.places():
        logs = pair.rows[place].double().log_softmax(-1)
        others = pair.other[place].double().log_softmax(-1)
        if positions is not None:
            at = positions[place]
            changes += _changed_tokens(pair.rows, place, at, logs.argmax(-1), others.argmax(-1), samples)
            logs = logs[at >= 0]
            others = others[at >= 0]
        terms = torch.where(logs == -torch.inf, 0.0, logs.exp() * (logs - others))
        divergences += terms.sum(-1).clamp(min=0).tolist()
    return divergences, changes


def _changed_tokens(
    rows: StoredCapture, place: slice, at: Tensor, best: Tensor, now: Tensor, samples: SampleTable
) -> Iterator[Row]:
    """The tokens of the rows at `place` whose prediction has changed, by text if it is known.

    at, best, now: [rows, tokens]: the position of each token, or -1, and its predictions by the two runs
    """
    splits = rows.splits[place]
    ids = rows.sample_ids[place].tolist()
    for row, column in ((best != now) & (at >= 0)).nonzero().tolist():
        token = int(best[row, column])
        other = int(now[row, column])
        texts = samples.texts.get(token) or token, samples.texts.get(other) or other
        yield _change(splits[row], ids[row], int(at[row, column]), *texts)


def _change(split: str, sample: int, token: int | None, before: Any, now: Any) -> dict[str, Any]:
    return {"split": split, "sample": sample, "token": token, "run": before, "other": now}


def _main(leaf: Leaf) -> StoredCapture:
    """The model's main output, as for its loss."""
    if isinstance(leaf, StoredCapture):
        return leaf
    by_name = {path.strip("."): capture for path, capture in leaf.items()}
    for name in ("logits", "out"):
        if name in by_name:
            return by_name[name]
    return next(iter(leaf.values()))
