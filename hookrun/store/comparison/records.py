"""The records of two runs side by side: metrics, statistics, weights and plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hookrun.models.weights import read_weights
from hookrun.store.comparison.rows import Difference, measured
from hookrun.store.format import CHECKPOINTS, differences
from hookrun.store.scores import ABOUT, OF_PARTS, is_batch, is_part

Row = dict[str, Any]
Lines = Iterable[Mapping[str, Any]]

_OF_PLACE = ("module", "other", "kind", "layer", "head")
_OF_RECORD = ("hook", "module", "path", "action", "mode", "epoch", "step", "call")
_KEPT = ("last", "best", "ema")


def metrics(lines: Lines) -> dict[str, float]:
    """``split/name`` -> the last value of each metric of a whole pass; ``split/name module`` for those of a module."""
    values = dict[str, float]()
    for line in lines:
        place = [str(line[key]) for key in _OF_PLACE if line.get(key) is not None]
        for name in line.keys() - ABOUT - OF_PARTS if not (is_batch(line) or is_part(line)) else ():
            if isinstance(line[name], int | float):
                values[" ".join([f"{line.get('split')}/{name}", *place])] = float(line[name])
    return dict(sorted(values.items()))


def side_by_side(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float) -> list[Row]:
    """A row for each key of two mappings."""
    keys = dict.fromkeys([*before, *now])
    pairs = ((key, before.get(key), now.get(key)) for key in keys)
    return [
        {"key": key, "run": old, "other": new, "differs": is_apart(old, new, tolerance)}
        for key, old, new in pairs
    ]


def is_apart(value: Any, other: Any, tolerance: float) -> bool:
    """Whether two values differ, numbers by more than the tolerance relative to the larger one; NaN equals NaN."""
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in (value, other)):
        return bool(value != other)
    if value == other or (math.isnan(value) and math.isnan(other)):
        return False
    return not abs(value - other) <= tolerance * max(abs(value), abs(other))


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
                numbers = {"relative_l2": found.relative_l2, "largest": found.largest}
                rows.append({"weight": name, "differs": bool(differs), "note": "", **numbers})
    return rows, f"{file} and {other}"
