"""The tensors of an action that come from a file or from what another run captured: one, or a row for each sample.

`RunValues` reads them for the engine, and `runs` finds the named runs and says how they differ from the run that uses
them.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from hookrun.data.info import SPLITS
from hookrun.engine.actions.values import (
    FileValue,
    FolderValue,
    InlineFunction,
    InlineTensor,
    PassValue,
    Ramp,
    RunFaults,
    RunValue,
)
from hookrun.engine.plan.outside import FaultList, Found, PendingRun, Places, Rows, Source, digest_of, form
from hookrun.engine.spec import HookSpec, Spec
from hookrun.engine.values.index import Item
from hookrun.engine.values.tensors import computable
from hookrun.errors import HookrunError, Problem, listed, nearest
from hookrun.run.experiment.run_values.folders import read_autoencoder
from hookrun.run.experiment.run_values.runs import (
    RunReferences,
    differences,
    other_runs,
    padded_otherwise,
    require_same_model,
    require_same_split,
    used_runs,
    with_found_weights,
    with_origins,
)
from hookrun.store.captures.read import StoredCapture
from hookrun.store.captures.tensor_file import open_tensors, read_tensor
from hookrun.store.files import is_file, near
from hookrun.store.format import encode
from hookrun.store.reader import ROWS_AT_ONCE, Run
from hookrun.store.records import UsedRunRecord, grouped

__all__ = [
    "FaultList",
    "PendingRun",
    "Rows",
    "RunReferences",
    "RunValues",
    "Source",
    "computable",
    "differences",
    "digest_of",
    "form",
    "other_runs",
    "read_faults",
    "read_value",
    "with_found_weights",
]


class RunValues(RunReferences):
    """Reads files and the named runs for the engine, see `hookrun.engine.plan.outside.Values`."""

    @property
    def of_run(self) -> bool:
        """Whether a run uses the values; False: a user's own loop."""
        return self.settings is not None

    def read(self, value: FileValue | FolderValue | RunValue, places: Places) -> dict[str, Source]:
        """Path -> the value for that module, see `read_value`."""
        return read_value(value, places, self)

    def faults(self, value: RunFaults, hook: HookSpec, places: Places) -> dict[str, FaultList | PendingRun]:
        """Path -> the faults there, see `read_faults`."""
        return read_faults(value, hook, places, self)

    def padded_otherwise(self, value: object) -> str | None:
        """Why a token of this run is at another position in the captures that the value is read from, or None."""
        return padded_otherwise(value, self)

    def used_runs(self, spec: Spec) -> tuple[UsedRunRecord, ...]:
        """The runs that values of the enabled hooks come from; missing runs are left out."""
        return used_runs(spec, self)

    def with_origins(self, problems: list[Problem], spec: Spec) -> list[Problem]:
        """The problems; where a hook takes values from other runs, its problems say which plans those have."""
        return with_origins(problems, spec, self)


class CaptureRows(Rows):
    """The rows of a capture by sample: each sample's own row, or that of another sample.

    Rows are read from disk when they are used.

    part: the indices of the rows to use
    """

    def __init__(self, capture: StoredCapture, name: str, part: Tensor, *, resample: bool) -> None:
        self.draws = resample
        self.shape = capture.shape[1:]
        self.dtype = capture.dtype
        self._capture = capture
        self._name = name
        self._ids, order = capture.sample_ids[part].sort()
        self._order = part[order]
        content = [name, resample, list(capture.shape), str(capture.dtype), self._ids.tolist()]
        self.digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """The rows [B, *shape] of the samples [B]."""
        places = self._places(samples)
        has_row = self._ids[places] == samples
        if self.draws:  # a row of another sample, if there is one
            count = len(self._ids)
            shift = torch.randint(1, max(count, 2), samples.shape, generator=generator)
            drawn = torch.randint(0, count, samples.shape, generator=generator)
            places = torch.where(has_row, (places + shift) % count, drawn)
        elif not has_row.all():
            raise HookrunError(self.lacking(samples))
        return self._capture[self._order[places]]

    def lacking(self, samples: Tensor) -> str:
        """The error message for samples that need a row and have none; empty if there is none of them."""
        missing = samples[self._ids[self._places(samples)] != samples]
        if self.draws or not len(missing):
            return ""
        shown = ", ".join(map(str, missing[:4].tolist()))
        if len(missing) > 4:
            shown += ", …"
        return f"{self._name} has no row of sample {shown}: {ids_text(self._capture)}"

    def _places(self, samples: Tensor) -> Tensor:
        return torch.searchsorted(self._ids, samples).clamp_max(len(self._ids) - 1)


def ids_text(capture: StoredCapture) -> str:
    """Text with the number of samples of a capture and the range of their ids."""
    ids = capture.sample_ids
    return f"it has {len(ids)} samples from {int(ids.min())} to {int(ids.max())}"


class MappedRows(Rows):
    """Rows that a function computes from one or two values; a tensor is the same for each sample.

    change: [B, *shape of a row] of each value -> [B, ...], for any B
    how:    text that identifies the change, with a {} for each value
    """

    def __init__(self, values: Sequence[Tensor | Rows], change: Callable[..., Tensor], how: str) -> None:
        self._values = values
        self._change = change
        self._rows = [value for value in values if not isinstance(value, Tensor)]
        example = self._changed(lambda rows: torch.empty((), dtype=rows.dtype).expand(1, *rows.shape))
        self.shape = tuple(example.shape[1:])
        self.dtype = example.dtype
        self.draws = any(rows.draws for rows in self._rows)
        self.digest = hashlib.sha256(how.format(*map(digest_of, values)).encode()).hexdigest()

    def _changed(self, read: Callable[[Rows], Tensor]) -> Tensor:
        return self._change(*(value if isinstance(value, Tensor) else read(value) for value in self._values))

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """The rows [B, *shape]."""
        return self._changed(lambda rows: rows.of(samples, generator))

    def lacking(self, samples: Tensor) -> str:
        """The error message for samples that need a row and have none; empty if there is none of them."""
        return "; ".join(filter(None, (rows.lacking(samples) for rows in self._rows)))


def part(source: Tensor | Rows, items: tuple[Item, ...]) -> Tensor | Rows:
    """The part of the tensor, or of each row. Raises IndexError if there is no such part."""
    index: list[Any] = [list(item) if isinstance(item, tuple) else item for item in items]
    if isinstance(source, Rows):
        index.insert(0, slice(None))
    return _changed(lambda value: value[tuple(index)], f"{{}} {items}", source)


def difference(left: Tensor | Rows, right: Tensor | Rows) -> Tensor | Rows:
    """One value minus another of the same shape."""
    return _changed(lambda left, right: computable(left) - computable(right), "{}-{}", left, right)


def multiple(source: Tensor | Rows, factor: float) -> Tensor | Rows:
    """The value times the factor."""
    return _changed(lambda value: computable(value) * factor, f"{{}} times {factor!r}", source)


def _changed(change: Callable[..., Tensor], how: str, *values: Tensor | Rows) -> Tensor | Rows:
    """The change of one or two values: at once of tensors, of rows when they are read, see `MappedRows`."""
    if any(isinstance(value, Rows) for value in values):
        return MappedRows(values, change, how)
    return change(*values)


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
    value: FileValue | FolderValue | RunValue | PassValue | InlineTensor | InlineFunction,
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
        case FolderValue():
            return dict.fromkeys(places, read_autoencoder(Path(expanduser(value.folder)).absolute()))
    if not _is_by_module(value):
        return dict.fromkeys(places, _read(value, (), runs))
    values: dict[str, Source] = {}
    lacking = defaultdict[str, list[str]](list)
    for path, names in places.items():
        try:
            values[path] = _read(value, names, runs)
        except NotCaptured as error:
            lacking[str(error)].append(path or "(root)")
    if lacking:
        texts = [f"{listed(paths)} {text}" for text, paths in lacking.items()]
        hint = "narrow `select`"
        if isinstance(value, RunValue):
            hint = f"name one for all with `module`, or {hint}"
        raise HookrunError("; ".join([*texts, hint]))
    return values


def _is_by_module(value: FileValue | RunValue) -> bool:
    if value.is_by_module if isinstance(value, FileValue) else value.module is None:
        return True
    return value.minus is not None and _is_by_module(value.minus)


def _read(value: FileValue | RunValue, names: tuple[str, ...], runs: RunReferences) -> Found:
    source = _read_file(value, names) if isinstance(value, FileValue) else _read_run(value, names, runs)
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


def _read_file(value: FileValue, names: tuple[str, ...]) -> Tensor:
    path = Path(expanduser(value.file)).absolute()
    if not is_file(path):
        raise HookrunError(f"there is no file {path}{near(path, '*.safetensors')}")
    with open_tensors(path.resolve()) as file:
        keys = list(file.keys())
        key = value.key
        if key is None and len(keys) != 1:
            raise HookrunError(f"{path} holds {len(keys)} tensors: name one with `key`; {nearest('', keys)}")
        if key is None:
            key = keys[0]
        elif value.is_by_module and key not in keys:
            of_module = [name for name in (key.replace("*", each) for each in names) if name in keys]
            if not of_module:
                raise NotCaptured(
                    f"has no tensor {key!r} in {path}: {nearest(key.replace('*', names[0]), keys)}"
                )
            key = of_module[0]
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
    modules = run.captures[value.capture]
    for name in names:
        if name in modules:
            return name
    shown = listed([name or "(root)" for name in modules], 12)
    raise NotCaptured(f"was not captured by {value.capture!r} in {run.path}, which holds {shown}")


def _capture(run: Run, value: RunValue, module: str, named: str) -> StoredCapture:
    capture = run.captures[value.capture][module]
    if value.path is not None:
        if isinstance(capture, StoredCapture):
            raise HookrunError(f"{named} is one tensor: leave `path` out")
        capture = capture[value.path]
    if not isinstance(capture, StoredCapture):
        raise HookrunError(f"{named} holds several tensors, name one with `path`: {', '.join(capture)}")
    if not len(capture):
        raise HookrunError(f"{named} has no rows")
    return capture


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
) -> dict[str, FaultList | PendingRun]:
    """Path -> the faults there.

    spec: the hook that repeats them

    HookrunError if the run is of another model or has no such hook, or if the hook was on other modules.
    """
    run = runs.open(value.run)
    if run is None:
        return dict.fromkeys(places, PendingRun(value.run))
    named = f"{spec.name} of the run {run.path}"
    if runs.settings is not None:
        require_same_model(run, named, runs.settings)
    _require_same_hook(run, spec, named)
    fired = {site["module"]: site["fired"] for site in _of_hook(run.hooks.get("sites", []), spec.name)}
    lines = grouped(_of_hook(run.faults, spec.name), itemgetter("module"))
    faults: dict[str, FaultList | PendingRun] = {}
    strange: list[str] = []
    repeated = set[str]()
    for path, names in places.items():
        modules = [name for name in names if name in fired]
        if not modules:
            strange.append(path)
            continue
        module = modules[0]
        repeated.add(module)
        faults[path] = _fault_list(lines.get(module, []), fired[module], named)
    missing = [module for module in lines if module not in repeated]
    for unfit, why in (
        (strange, "was not there, or the run was cut off"),
        (missing, "has faults there, and `select` leaves it out"),
    ):
        if unfit:
            raise HookrunError(f"{listed(path or '(root)' for path in unfit)}: {named} {why}")
    return faults


def _of_hook(records: Iterable[Mapping[str, Any]], name: str) -> Iterator[Mapping[str, Any]]:
    return (record for record in records if record["hook"] == name)


def _require_same_hook(run: Run, spec: HookSpec, named: str) -> None:
    """Raises HookrunError if the run has no hook of that name with the same action and hook type."""
    hooks = {
        hook["name"]: f"{hook.get('action')} on {hook.get('hook')}" for hook in run.plan.get("hooks", [])
    }
    wanted = f"{spec.action.action_name} on {spec.hook_type}"
    if hooks.get(spec.name) != wanted:
        raise HookrunError(
            f"{named} is {hooks.get(spec.name, 'not there')}, expected {wanted}: it has {hooks}"
        )


def _fault_list(lines: Sequence[Mapping[str, Any]], fired: int, named: str) -> FaultList:
    digest = hashlib.sha256(encode([fired, *lines]).encode()).hexdigest()
    return FaultList(grouped(lines, lambda line: tuple(line["draw"])), fired, named, digest)
