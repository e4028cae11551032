"""The tensors of an action that come from a file or from what another run captured.

`sources` defines the kinds of value, `read_value` reads one from a file or a run, and `runs` finds the named runs and
says how they differ from the run that uses them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hookrun.actions.values import FileValue, InlineFunction, InlineTensor, RunValue
from hookrun.data.info import SPLITS
from hookrun.errors import HookrunError, listed, nearest
from hookrun.run_values.runs import (
    RunReferences,
    differences,
    other_runs,
    require_same_model,
    require_same_split,
    with_found_weights,
)
from hookrun.run_values.sources import (
    BY_TOKEN,
    CaptureRows,
    Found,
    PendingRun,
    Rows,
    Source,
    computable,
    difference,
    ids_text,
    is_by_token,
    multiple,
    part,
)
from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import Run

__all__ = [
    "PendingRun",
    "Rows",
    "RunReferences",
    "Source",
    "differences",
    "other_runs",
    "read_value",
    "with_found_weights",
]


ROWS_AT_ONCE = 4096
_SHOWN = 6

Places = Mapping[str, tuple[str, ...]]
"""Path of a module or parameter -> all its names."""


class NotCaptured(HookrunError):
    """A run captured nothing at a module."""


def read_value(
    value: FileValue | RunValue | InlineTensor | InlineFunction, places: Places, runs: RunReferences
) -> dict[str, Source]:
    """Path -> the value for that module; the same object for all paths if the value names one module.

    Raises HookrunError if there is no such value, or it is of another model or another split than the run that uses it.
    """
    if isinstance(value, InlineFunction):
        return dict.fromkeys(places, value)
    if isinstance(value, InlineTensor):
        return dict.fromkeys(places, value.tensor)
    if not _is_by_module(value):
        shared = _read(value, (), runs)
        return dict.fromkeys(places, shared)
    found, lacking = dict[str, Source](), defaultdict[str, list[str]](list)
    for path, names in places.items():
        try:
            found[path] = _read(value, names, runs)
        except NotCaptured as error:
            lacking[str(error)].append(path or "(root)")
    if lacking:
        texts = [f"{listed(paths, _SHOWN)} {text}" for text, paths in lacking.items()]
        raise HookrunError("; ".join(texts) + "; name one for all with `module`, or narrow `select`")
    return found


def _is_by_module(value: FileValue | RunValue) -> bool:
    own = isinstance(value, RunValue) and value.module is None
    return own or (value.minus is not None and _is_by_module(value.minus))


def _read(value: FileValue | RunValue, names: tuple[str, ...], runs: RunReferences) -> Found:
    source = _read_file(value) if isinstance(value, FileValue) else _read_run(value, names, runs)
    if isinstance(source, PendingRun):
        return source
    if value.index is not None:
        try:
            source = part(source, value.index.items)
        except (IndexError, RuntimeError) as error:
            shape = list(source.shape)
            raise HookrunError(
                f"index {value.index} of the value, which has shape {shape}: {error}"
            ) from error
    if value.minus is not None:
        other = _read(value.minus, names, runs)
        if isinstance(other, PendingRun):
            return other
        if tuple(source.shape) != tuple(other.shape):
            shapes = f"has shape {list(other.shape)}, {value} has {list(source.shape)}"
            raise HookrunError(f"minus: {value.minus} {shapes}")
        source = difference(source, other)
    return source if value.factor == 1 else multiple(source, value.factor)


def _read_file(value: FileValue) -> Tensor:
    path = Path(value.file).expanduser().absolute()
    if not path.is_file():
        raise HookrunError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            key = value.key if value.key is not None else keys[0] if len(keys) == 1 else None
            if key is None:
                raise HookrunError(
                    f"{path} holds {len(keys)} tensors: name one with `key`; {nearest('', keys)}"
                )
            if key not in keys:
                raise HookrunError(f"{path} has no tensor {key!r}: {nearest(key, keys)}")
            tensor: Tensor = file.get_tensor(key)
            return tensor
    except (SafetensorError, OSError) as error:
        raise HookrunError(f"{path} is not a readable safetensors file: {error}") from error


def _read_run(value: RunValue, names: tuple[str, ...], runs: RunReferences) -> Found:
    run = runs.open(value.run)
    if run is None:
        return PendingRun(value.run)
    module = _module(run, value, names)
    named = f"{value.capture}/{module}{value.path or ''} of the run {run.path}"
    if runs.settings is not None:
        require_same_model(run, named, runs.settings)
    capture = _capture(run, value, module, named)
    if value.sample == "mean":
        return _mean(capture)
    if runs.settings is not None and runs.split is None:
        raise HookrunError(
            f"sample: {value.sample} names samples of one split, and this run uses several splits: "
            "set task.split to train or val, or use sample: mean"
        )
    part = _part_of(capture, runs)
    _require_one_row_each(capture, part, value, module)
    if isinstance(value.sample, int):
        positions = part[capture.sample_ids[part] == value.sample]
        if not len(positions):
            raise HookrunError(f"{named} has no row of sample {value.sample}: {ids_text(capture)}")
        return computable(capture[int(positions[0])])
    if value.sample == "same" and runs.split is not None:
        require_same_split(capture, named, runs.split)
    return CaptureRows(capture, named, part, resample=value.sample == "resample")


def _module(run: Run, value: RunValue, names: tuple[str, ...]) -> str:
    """The module in the captures: the named one, else the hooked one under any of its names."""
    if value.module is not None:
        return value.module
    there = run.captures[value.capture]
    for name in names:
        if name in there:
            return name
    shown = ", ".join(name or "(root)" for name in list(there)[:12]) + (", …" if len(there) > 12 else "")
    raise NotCaptured(f"was not captured by {value.capture!r} in {run.path}, which holds {shown}")


def _capture(run: Run, value: RunValue, module: str, named: str) -> StoredCapture:
    found = run.captures[value.capture][module]
    if value.path is not None:
        if isinstance(found, StoredCapture):
            raise HookrunError(f"{named} is one tensor: leave `path` out")
        found = found[value.path]
    if not isinstance(found, StoredCapture):
        raise HookrunError(f"{named} holds several tensors, name one with `path`: {', '.join(found)}")
    if not len(found):
        raise HookrunError(f"{named} has no rows")
    return found


def _mean(capture: StoredCapture) -> Tensor:
    blocks = (capture[start : start + ROWS_AT_ONCE] for start in range(0, len(capture), ROWS_AT_ONCE))
    total = sum((block.double().sum(0) for block in blocks), start=capture[0].double() * 0)
    return (total / len(capture)).float()


def _part_of(capture: StoredCapture, runs: RunReferences) -> Tensor:
    """Indices of the rows to use: if the capture has several splits, those of the split of `runs`."""
    splits = capture.splits
    if runs.split is None or len(splits.unique()) < 2:
        return torch.arange(len(capture))
    return (splits == SPLITS.index(runs.split)).nonzero().squeeze(1)


def _require_one_row_each(capture: StoredCapture, part: Tensor, value: RunValue, module: str) -> None:
    ids = capture.sample_ids[part]
    if (ids < 0).any():
        what = "keeps whole firings, not a row for each sample"
    elif len(ids.unique()) != len(ids):
        what = f"has {len(ids)} rows for {len(ids.unique())} samples"
    else:
        return
    hint = BY_TOKEN if is_by_token(capture) else "capture it with task=predict"
    raise HookrunError(f"{value.capture}/{module} in {value.run} {what}: {hint}")
