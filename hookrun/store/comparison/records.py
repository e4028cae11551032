"""The records of two runs side by side: metrics, statistics, weights and plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hookrun.errors import Lookup
from hookrun.models.weights import read_weights
from hookrun.store.captures.read import Leaf, SampleTable
from hookrun.store.comparison.rows import BLOCK_BYTES, measured, relative
from hookrun.store.format import CHECKPOINTS, differences
from hookrun.store.scores import ABOUT, OF_PARTS, is_batch, is_part

Row = dict[str, Any]


class StoredRun(Protocol):
    """What a comparison reads of a run; `hookrun.store.reader.Run` has it."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def plan(self) -> dict[str, Any]: ...

    @property
    def model(self) -> dict[str, Any]: ...

    @property
    def metrics(self) -> list[dict[str, Any]]: ...

    @property
    def stats(self) -> list[dict[str, Any]]: ...

    @property
    def generations(self) -> list[dict[str, Any]]: ...

    @property
    def samples(self) -> SampleTable: ...

    @property
    def captures(self) -> Lookup[Lookup[Leaf]]: ...

    @property
    def predictions(self) -> Leaf | None: ...


_OF_PLACE = ("split", "module", "other", "kind", "layer", "head")
_OF_RECORD = ("hook", "module", "path", "action", "mode", "epoch", "step", "call")
_KEPT = ("last", "best", "ema")


def metrics(run: StoredRun) -> dict[str, float]:
    """``split/name`` -> the last value of each metric of a whole pass; ``split/name module`` for those of a module."""
    values = dict[str, float]()
    for line in run.metrics:
        if is_batch(line) or is_part(line):
            continue
        split, *place = (str(line[key]) for key in _OF_PLACE if line.get(key) is not None)
        for name, value in line.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in ABOUT | OF_PARTS and is_number:
                values[" ".join([f"{split}/{name}", *place])] = float(value)
    return values


def side_by_side(run: StoredRun, other: StoredRun, tolerance: float) -> list[Row]:
    """Each metric of both runs; None where a run does not have it."""
    here, there = metrics(run), metrics(other)
    names = dict.fromkeys([*here, *there])
    return [
        {
            "metric": name,
            "run": here.get(name),
            "other": there.get(name),
            "differs": is_apart(here.get(name), there.get(name), tolerance),
        }
        for name in names
    ]


def is_apart(value: Any, other: Any, tolerance: float) -> bool:
    """Whether two values differ, numbers by more than the tolerance relative to the larger one."""
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in (value, other)):
        return bool(value != other)
    if math.isnan(value) or math.isnan(other):
        return math.isnan(value) != math.isnan(other)
    return value != other and not abs(value - other) <= tolerance * max(abs(value), abs(other))


def mapped(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Row]:
    """A row for each key path at which two nested mappings differ."""
    return [{"key": key, "run": old, "other": new} for key, old, new in differences(before, now)]


def statistics(run: StoredRun, other: StoredRun, tolerance: float) -> list[Row]:
    """A row for each number of stats.jsonl that differs, or that only one run has."""
    rows = mapped(_by_place(run), _by_place(other))
    return [row for row in rows if is_apart(row["run"], row["other"], tolerance)]


def _by_place(run: StoredRun) -> dict[str, dict[str, Any]]:
    lines = dict[str, dict[str, Any]]()
    for line in run.stats:
        place = " ".join(f"{key} {line[key]}" for key in _OF_RECORD if line.get(key) not in (None, ""))
        lines[place] = {key: value for key, value in line.items() if key not in _OF_RECORD}
    return lines


def plan(run: StoredRun) -> dict[str, Any]:
    """plan.json with hooks by name and modules by path, without its hash."""
    hooks = {
        hook["name"]: {**hook, "targets": {target["path"]: target for target in hook.get("targets", [])}}
        for hook in run.plan.get("hooks", [])
    }
    return {**{key: value for key, value in run.plan.items() if key != "hash"}, "hooks": hooks}


def weights(run: StoredRun, other: StoredRun, tolerance: float) -> tuple[list[Row], str]:
    """A row for each tensor that is not the same, and which files were compared, or why none were.

    `differs` says whether the norm of the difference is above the tolerance.
    """
    files = [_weights_of(each) for each in (run, other)]
    if files[0] is None or files[1] is None:
        lacking = [str(each.path) for each, file in zip((run, other), files, strict=True) if file is None]
        return [], f"not compared: there is no file with the weights of {' and '.join(lacking)}"
    here, there = (read_weights(file) for file in files if file is not None)
    rows = list[Row]()
    for name in dict.fromkeys([*here, *there]):
        left, right = here.get(name), there.get(name)
        if left is None or right is None:
            rows.append({"weight": name, "note": f"only in {(run if right is None else other).path}"})
        elif left.shape != right.shape:
            rows.append({"weight": name, "note": f"shape {list(left.shape)}, other {list(right.shape)}"})
        else:
            rows += _weight(name, left, right, tolerance)
    return rows, f"{len(here)} tensors of {files[0]} and {len(there)} of {files[1]}"


def _weight(name: str, left: Tensor, right: Tensor, tolerance: float) -> Iterator[Row]:
    """The row of a tensor that is not the same in both runs; read in blocks, since in float64 it may be large."""
    blocks = (side.reshape(1, -1).split(BLOCK_BYTES // 8, dim=1) for side in (left, right))
    parts = [measured(*sides) for sides in zip(*blocks, strict=True) if sides[0].numel()]
    norm, norm_difference = (
        math.sqrt(sum(float(part[key]) for part in parts)) for key in ("square", "square_difference")
    )
    broken = any(bool(part["broken"]) for part in parts)
    if norm_difference or broken:
        yield {
            "weight": name,
            "relative_l2": relative(norm_difference, norm),
            "largest": max(float(part["largest"]) for part in parts),
            "differs": broken or norm_difference > tolerance * norm,
        }


def _weights_of(run: StoredRun) -> Path | None:
    """The file with the weights of a run at its end: a checkpoint, or the file that they come from."""
    kept = [run.path / CHECKPOINTS / f"{name}.safetensors" for name in _KEPT]
    source = run.model.get("weights")
    files = [*kept, Path(source)] if isinstance(source, str) else kept
    return next((file for file in files if file.suffix and file.is_file()), None)
