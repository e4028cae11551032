"""The tensors of an action that come from a file or from what another run captured: one, or a row for each sample.

`read_value` reads one, and `runs` finds the named runs and says how they differ from the run that uses them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from hookrun.data.info import SPLITS
from hookrun.engine.actions.values import (
    FileValue,
    InlineFunction,
    InlineTensor,
    PassValue,
    Ramp,
    RunFaults,
    RunValue,
)
from hookrun.engine.spec import HookSpec
from hookrun.engine.trust.callables import tensor_digest
from hookrun.engine.values.index import Item
from hookrun.engine.values.tensors import computable
from hookrun.errors import HookrunError, counted, listed, nearest
from hookrun.run.experiment.run_values.runs import (
    PendingRun,
    RunReferences,
    differences,
    other_runs,
    require_same_model,
    require_same_split,
    with_found_weights,
)
from hookrun.store.captures.read import StoredCapture
from hookrun.store.captures.tensor_file import open_tensors, read_tensor
from hookrun.store.format import encode
from hookrun.store.reader import ROWS_AT_ONCE, Run
from hookrun.store.records import grouped

__all__ = [
    "FaultList",
    "PendingRun",
    "Rows",
    "RunReferences",
    "Source",
    "differences",
    "other_runs",
    "read_faults",
    "read_value",
    "with_found_weights",
]


Places = Mapping[str, tuple[str, ...]]
"""Path of a module or parameter -> all its names."""


def digest_of(source: Source) -> str:
    """The hash of the value."""
    return tensor_digest(source) if isinstance(source, Tensor) else source.digest


class CaptureRows:
    """The rows of a capture by sample: each sample's own row, or that of another sample.

    Rows are read from disk when they are used.

    part: the indices of the rows to use
    """

    def __init__(self, capture: StoredCapture, name: str, part: Tensor, *, resample: bool) -> None:
        self._capture = capture
        self._name = name
        self.draws: bool = resample
        self.shape, self.dtype = capture.shape[1:], capture.dtype
        self._ids, order = capture.sample_ids[part].sort()
        self._order = part[order]
        what = [name, resample, list(capture.shape), str(capture.dtype), self._ids.tolist()]
        self.digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """The rows [B, *shape] of the samples [B]."""
        places = self._places(samples)
        known, count = self._ids[places] == samples, len(self._ids)
        if self.draws:  # a row of another sample, if there is one
            shift = torch.randint(1, max(count, 2), samples.shape, generator=generator)
            drawn = torch.randint(0, count, samples.shape, generator=generator)
            places = torch.where(known, (places + shift) % count, drawn)
        elif not known.all():
            raise HookrunError(self.lacking(samples))
        return self._capture[self._order[places]]

    def lacking(self, samples: Tensor) -> str:
        """The error message for samples that need a row and have none; empty if there is none of them."""
        missing = samples[self._ids[self._places(samples)] != samples]
        if self.draws or not len(missing):
            return ""
        shown = ", ".join(map(str, missing[:4].tolist())) + (", …" if len(missing) > 4 else "")
        return f"{self._name} has no row of sample {shown}: {ids_text(self._capture)}"

    def _places(self, samples: Tensor) -> Tensor:
        return torch.searchsorted(self._ids, samples).clamp_max(len(self._ids) - 1)


def ids_text(capture: StoredCapture) -> str:
    """Text with the number of samples of a capture and the range of their ids."""
    ids = capture.sample_ids
    return f"it has {len(ids)} samples from {int(ids.min())} to {int(ids.max())}"


class MappedRows:
    """Rows that a function computes from one or two values; a tensor is the same for each sample.

    change: [B, *shape of a row] of each value -> [B, ...], for any B
    how:    text that identifies the change, with a {} for each value
    """

    def __init__(self, values: Sequence[Tensor | Rows], change: Callable[..., Tensor], how: str) -> None:
        self._values, self._change = values, change
        self._rows = [value for value in values if not isinstance(value, Tensor)]
        example = self._changed(lambda rows: torch.empty((), dtype=rows.dtype).expand(1, *rows.shape))
        self.shape, self.dtype = tuple(example.shape[1:]), example.dtype
        self.draws: bool = any(rows.draws for rows in self._rows)
        self.digest = hashlib.sha256(how.format(*map(digest_of, values)).encode()).hexdigest()

    def _changed(self, read: Callable[[Rows], Tensor]) -> Tensor:
        return self._change(*(value if isinstance(value, Tensor) else read(value) for value in self._values))

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """The rows [B, *shape]."""
        return self._changed(lambda rows: rows.of(samples, generator))

    def lacking(self, samples: Tensor) -> str:
        """The error message for samples that need a row and have none; empty if there is none of them."""
        return "; ".join(filter(None, (rows.lacking(samples) for rows in self._rows)))


class FaultList:
    """The faults of a hook at one module.

    lines: of faults.jsonl, in order
    fired: how often the hook fired there
    name:  of the hook and its run, for messages
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]], fired: int, name: str) -> None:
        self.count, self.fired, self._name = len(lines), fired, name
        self._by_draw = grouped(lines, lambda line: tuple(line["draw"]))
        self.digest = hashlib.sha256(encode([fired, *lines]).encode()).hexdigest()

    def at(self, draw: tuple[int, ...], firing: int) -> Sequence[Mapping[str, Any]]:
        """The faults of a draw in a firing, counted from 1. ValueError if there were not so many firings."""
        if firing > self.fired:
            raise ValueError(
                f"faults: {self._name} fired {self.fired:,} times there, and this is once more: repeat a run of the "
                "same length, with the same `when`"
            )
        return self._by_draw.get(draw, ())


Rows = CaptureRows | MappedRows
"""A value for each sample of a batch. Its `shape` is the shape of one row; `draws`: rows are drawn at each firing."""

Found = Tensor | Rows | PendingRun
"""A value from a file or from another run: one tensor, a row for each sample, or one that is not known yet."""

Source = Found | InlineFunction | PassValue | FaultList
"""A value from a file or run, from Python (a tensor, or a function of the action's tensor), or from another hook; or a
list of faults."""


def form(source: Source) -> tuple[str, int]:
    """The shape of the value, or of one row of it, as text, and its bytes."""
    match source:
        case PendingRun():
            return "not known yet", 0
        case InlineFunction() | PassValue():
            return "computed at each firing", 0
        case FaultList():
            return f"of {counted(source.count, 'fault')}", 0
    shape = tuple(source.shape)
    return str(list(shape)), math.prod(shape) * source.dtype.itemsize


def part(source: Tensor | Rows, items: tuple[Item, ...]) -> Tensor | Rows:
    """The part of the tensor, or of each row. Raises IndexError if there is no such part."""
    plain = tuple(list(item) if isinstance(item, tuple) else item for item in items)
    batch = () if isinstance(source, Tensor) else (slice(None),)
    return _changed(lambda value: value[*batch, *plain], f"{{}} {items}", source)


def difference(left: Tensor | Rows, right: Tensor | Rows) -> Tensor | Rows:
    """One value minus another of the same shape."""
    return _changed(lambda left, right: computable(left) - computable(right), "{}-{}", left, right)


def multiple(source: Tensor | Rows, factor: float) -> Tensor | Rows:
    """The value times the factor."""
    return _changed(lambda value: computable(value) * factor, f"{{}} times {factor!r}", source)


def _changed(change: Callable[..., Tensor], how: str, *values: Tensor | Rows) -> Tensor | Rows:
    """The change of one or two values: at once of tensors, of rows when they are read, see `MappedRows`."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return change(*tensors) if len(tensors) == len(values) else MappedRows(values, change, how)


BY_TOKEN = (
    "it has a row for each token: capture one position of each sample, such as tokens: -1, or the whole value, from "
    "which `at: same` takes the tokens"
)
"""The hint for a capture with several rows for each sample, where one is needed."""


def is_by_token(capture: StoredCapture) -> bool:
    """Whether it was captured with `tokens`, so that its rows are of tokens."""
    return bool((capture.positions >= 0).any())


class NotCaptured(HookrunError):
    """A run captured nothing at a module."""


def read_value(
    value: FileValue | RunValue | PassValue | InlineTensor | InlineFunction,
    places: Places,
    runs: RunReferences,
) -> dict[str, Source]:
    """Path -> the value for that module; the same object for all paths if the value names one module.

    Raises HookrunError if there is no such value, or it is of another model or another split than the run that uses it.
    """
    match value:
        case InlineFunction() | PassValue():
            return dict.fromkeys(places, value)
        case InlineTensor():
            return dict.fromkeys(places, value.tensor)
    if not _is_by_module(value):
        return dict.fromkeys(places, _read(value, (), runs))
    found, lacking = dict[str, Source](), defaultdict[str, list[str]](list)
    for path, names in places.items():
        try:
            found[path] = _read(value, names, runs)
        except NotCaptured as error:
            lacking[str(error)].append(path or "(root)")
    if lacking:
        texts = [f"{listed(paths)} {text}" for text, paths in lacking.items()]
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
            raise HookrunError(
                f"index {value.index} of the value, which has shape {list(source.shape)}: {error}"
            ) from error
    if value.minus is not None:
        other = _read(value.minus, names, runs)
        if isinstance(other, PendingRun):
            return other
        if tuple(source.shape) != tuple(other.shape):
            raise HookrunError(
                f"minus: {value.minus} has shape {list(other.shape)}, {value} has {list(source.shape)}"
            )
        source = difference(source, other)
    if isinstance(value.factor, Ramp) or value.factor == 1:  # the hook multiplies by a Ramp when it fires
        return source
    return multiple(source, value.factor)


def _read_file(value: FileValue) -> Tensor:
    path = Path(value.file).expanduser().absolute()
    if not path.is_file():
        raise HookrunError(f"there is no file {path}")
    with open_tensors(path.resolve()) as file:
        keys = list(file.keys())
        key = value.key if value.key is not None else keys[0] if len(keys) == 1 else None
        if key is None:
            raise HookrunError(f"{path} holds {len(keys)} tensors: name one with `key`; {nearest('', keys)}")
        if key not in keys:
            raise HookrunError(f"{path} has no tensor {key!r}: {nearest(key, keys)}")
        return read_tensor(file, key)


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
    part = torch.arange(len(capture))
    if runs.split is not None and len(capture.split_numbers.unique()) > 1:
        part = (capture.split_numbers == SPLITS.index(runs.split)).nonzero().squeeze(1)
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
    shown = listed([name or "(root)" for name in there], 12)
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
    blocks = (block.double().sum(0) for block in capture.batches(ROWS_AT_ONCE))
    return (sum(blocks, start=capture[0].double() * 0) / len(capture)).float()


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


def read_faults(
    value: RunFaults, spec: HookSpec, places: Places, runs: RunReferences
) -> Mapping[str, FaultList | PendingRun]:
    """Path -> the faults there.

    spec:   the hook that repeats them
    places: path of a module or parameter -> all its names

    HookrunError if the run is of another model or has no such hook, or if the hook was on other modules.
    """
    run, name = runs.open(value.run), spec.name
    if run is None:
        return dict.fromkeys(places, PendingRun(value.run))
    named = f"{name} of the run {run.path}"
    if runs.settings is not None:
        require_same_model(run, named, runs.settings)
    hooks = {
        hook["name"]: f"{hook.get('action')} on {hook.get('hook')}" for hook in run.plan.get("hooks", [])
    }
    if hooks.get(name) != (wanted := f"{spec.action.action_name} on {spec.hook_type}"):
        raise HookrunError(f"{named} is {hooks.get(name, 'not there')}, expected {wanted}: it has {hooks}")
    fired = {site["module"]: site["fired"] for site in run.hooks.get("sites", []) if site["hook"] == name}
    of_hook = (line for line in run.faults if line["hook"] == name)
    lines = grouped(of_hook, itemgetter("module"))
    there = {path: next((each for each in names if each in fired), None) for path, names in places.items()}
    strange = [path for path, module in there.items() if module is None]
    missing = [module for module in lines if module not in there.values()]
    for modules, what in (
        (strange, "was not there, or the run was cut off"),
        (missing, "has faults there, and `select` leaves it out"),
    ):
        if modules:
            shown = listed(module or "(root)" for module in modules)
            raise HookrunError(f"{shown}: {named} {what}")
    return {
        path: FaultList(lines.get(module, []), fired[module], named)
        for path, module in there.items()
        if module is not None
    }
