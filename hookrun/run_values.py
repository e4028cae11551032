"""The tensors of an action that come from a file or from what another run captured."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Generator, Tensor

from hookrun.actions.values import FileValue, RunValue
from hookrun.data.info import SPLITS, Split
from hookrun.errors import HookrunError, Problem, nearest
from hookrun.spec import HookSpec, Settings, Spec
from hookrun.store.captures import StoredCapture
from hookrun.store.files import StoreError
from hookrun.store.reader import Run, open_run

ROWS_AT_ONCE = 4096
_MOST_SHOWN = 500


class Rows(Protocol):
    """A value for each sample of a batch.

    shape:  of one row
    digest: what identifies the rows, for the plan's hash
    draws:  it gives other rows at each firing
    """

    shape: tuple[int, ...]
    digest: str
    draws: bool

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """[B, *shape] on the CPU: a row for each of the samples [B] int64.

        Raises HookrunError for a sample without a row.
        """

    def missing(self, samples: Tensor) -> Tensor:
        """Those of the samples that have no row and need one."""

    def lacks(self, samples: Tensor) -> str:
        """The error message for samples without a row."""


Source = Tensor | Rows
"""A value from a file or from another run: one tensor, or a row for each sample."""


@dataclass(frozen=True)
class UsedBy:
    """The run that will use the values; None in its place: a model of the user's own.

    split: the part of the data that its hooks meet; None: several
    """

    settings: Settings
    split: Split | None


def read_value(value: FileValue | RunValue, used_by: UsedBy | None = None) -> Source:
    """What `value` names, in float32 where it is computed.

    Raises HookrunError where there is no such thing, or where it is of another model or another split than `used_by`.
    """
    return _read_file(value) if isinstance(value, FileValue) else _read_run_value(value, used_by)


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


def _read_run_value(value: RunValue, used_by: UsedBy | None) -> Source:
    found = _read_one(value, used_by)
    if value.minus is None:
        return found
    other = _read_run_value(value.minus, used_by)
    shapes = [tuple(each.shape) for each in (found, other)]
    if shapes[0] != shapes[1]:
        raise HookrunError(f"minus: {value.minus} has shape {list(shapes[1])}, {value} has {list(shapes[0])}")
    if isinstance(found, Tensor) and isinstance(other, Tensor):
        return found - other
    return Difference(found, other)


def _read_one(value: RunValue, used_by: UsedBy | None) -> Source:
    run = open_run(value.run)
    if used_by is not None:
        _require_same_model(run, value, used_by.settings)
    capture = _capture(run, value)
    if value.sample == "mean":
        return _mean(capture)
    if used_by is not None and used_by.split is None:
        raise HookrunError(
            f"sample: {value.sample} names samples of one split, and this run meets those of several: "
            "set task.split to train or val, or take sample: mean"
        )
    part = _part_of(capture, used_by)
    _require_one_row_each(capture, part, value)
    if isinstance(value.sample, int):
        positions = part[capture.sample_ids[part] == value.sample]
        if not len(positions):
            raise HookrunError(f"{_named(run, value)} has no row of sample {value.sample}: {_ids(capture)}")
        return capture[int(positions[0])].float()
    if value.sample == "same" and used_by is not None:
        _require_same_split(run, capture, value, used_by.split)
    return RunRows(capture, _named(run, value), part, resample=value.sample == "resample")


def _named(run: Run, value: RunValue) -> str:
    return f"{value.capture}/{value.module}{value.path or ''} of the run {run.path}"


def _capture(run: Run, value: RunValue) -> StoredCapture:
    found = run.captures[value.capture][value.module]
    if value.path is not None:
        if isinstance(found, StoredCapture):
            raise HookrunError(f"{_named(run, value)} is one tensor: leave `path` out")
        found = found[value.path]
    if not isinstance(found, StoredCapture):
        raise HookrunError(
            f"{_named(run, value)} holds several tensors, name one with `path`: {', '.join(found)}"
        )
    if not len(found):
        raise HookrunError(f"{_named(run, value)} holds no rows")
    return found


def _mean(capture: StoredCapture) -> Tensor:
    blocks = (capture[start : start + ROWS_AT_ONCE] for start in range(0, len(capture), ROWS_AT_ONCE))
    total = sum((block.double().sum(0) for block in blocks), start=capture[0].double() * 0)
    return (total / len(capture)).float()


def _part_of(capture: StoredCapture, used_by: UsedBy | None) -> Tensor:
    """The positions of the rows that may be meant: of several splits those of the one that will be met."""
    splits = capture.splits
    if used_by is None or used_by.split is None or len(splits.unique()) < 2:
        return torch.arange(len(capture))
    return (splits == SPLITS.index(used_by.split)).nonzero().squeeze(1)


def _require_one_row_each(capture: StoredCapture, part: Tensor, value: RunValue) -> None:
    ids = capture.sample_ids[part]
    if (ids < 0).any():
        what = "keeps whole firings, not a row for each sample"
    elif len(ids.unique()) != len(ids):
        what = f"has {len(ids)} rows for {len(ids.unique())} samples"
    else:
        return
    raise HookrunError(f"{value.capture}/{value.module} in {value.run} {what}: capture it with task=predict")


def _require_same_split(run: Run, capture: StoredCapture, value: RunValue, split: Split | None) -> None:
    """Sample ids match only within one split."""
    theirs = sorted({SPLITS[part] for part in capture.splits.unique().tolist() if part >= 0})
    if theirs and split not in theirs:
        what = f"its samples are of the split {' and '.join(map(repr, theirs))}, these of {split!r}"
        raise HookrunError(f"{_named(run, value)} has other samples: {what}")


def _require_same_model(run: Run, value: RunValue, settings: Settings) -> None:
    theirs, ours = _section(run, "model"), settings.model.model_dump(mode="json")
    for key in ("name", "factory"):
        if theirs and theirs.get(key) != ours[key]:
            what = f"model.{key} is {_shown(theirs.get(key))} there and {ours[key]!r} here"
            raise HookrunError(f"{_named(run, value)} is of another model: {what}")


_MAY_DIFFER = {"model": ("args", "weights"), "data": ("name", "root", "args", "transforms")}


def differences(spec: Spec, settings: Settings) -> tuple[str, ...]:
    """A note on each run that values of `spec` come from and that differs from this one in weights, data or seed."""
    notes = list[str]()
    for path in dict.fromkeys(path for hook in spec.hooks for path in _runs(hook)):
        with suppress(StoreError):  # that there is no such run is among the problems of its hook
            if differing := _differences(open_run(path), settings):
                notes.append(f"values come from {path}, where {'; '.join(differing)}")
    return tuple(notes)


def _differences(run: Run, settings: Settings) -> list[str]:
    found = list[str]()
    for section, keys in _MAY_DIFFER.items():
        theirs, ours = _section(run, section), getattr(settings, section).model_dump(mode="json")
        found += [
            f"{section}.{key} is {_shown(theirs.get(key))} there and {ours[key]!r} here"
            for key in keys
            if theirs and theirs.get(key) != ours[key]
        ]
    seed = run.config.get("seed", settings.seed)
    if seed != settings.seed and settings.model.weights is None:
        found.append(
            f"seed is {_shown(seed)} there and {settings.seed} here, from which the weights are drawn"
        )
    return found


def _shown(value: Any) -> str:
    """A value of another run's configuration, which may be of any length."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _section(run: Run, name: str) -> dict[str, Any]:
    section = run.config.get(name)
    return section if isinstance(section, dict) else {}


def _ids(capture: StoredCapture) -> str:
    ids = capture.sample_ids
    return f"it has {len(ids)} samples from {int(ids.min())} to {int(ids.max())}"


class RunRows:
    """The rows of a capture by sample: each sample's own, or another's.

    Rows are read when they are asked for.
    """

    def __init__(self, capture: StoredCapture, name: str, part: Tensor, *, resample: bool) -> None:
        self._capture = capture
        self._name = name
        self.draws = resample
        self.shape = capture.shape[1:]
        self._ids, order = capture.sample_ids[part].sort()
        self._order = part[order]
        what = [name, resample, list(capture.shape), str(capture.dtype), self._ids.tolist()]
        self.digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """[B, *shape]: a row for each of the samples [B]."""
        places = self._places(samples)
        known = self._ids[places] == samples
        if not self.draws:
            if not known.all():
                raise HookrunError(self.lacks(samples[~known]))
        else:  # not its own row, where it has one and there is another
            count = len(self._ids)
            shift = torch.randint(1, max(count, 2), samples.shape, generator=generator)
            drawn = torch.randint(0, count, samples.shape, generator=generator)
            places = torch.where(known, (places + shift) % count, drawn)
        rows: Tensor = self._capture[self._order[places]]
        return rows

    def missing(self, samples: Tensor) -> Tensor:
        """Those of the samples that have no row and need one."""
        return samples[self._ids[self._places(samples)] != samples] if not self.draws else samples[:0]

    def lacks(self, samples: Tensor) -> str:
        """The error message for samples without a row."""
        shown = ", ".join(map(str, samples[:4].tolist())) + (", …" if len(samples) > 4 else "")
        return f"{self._name} has no row of sample {shown}: {_ids(self._capture)}"

    def _places(self, samples: Tensor) -> Tensor:
        return torch.searchsorted(self._ids, samples).clamp_max(len(self._ids) - 1)


class Difference:
    """One value minus another, sample by sample where they have rows."""

    def __init__(self, left: Source, right: Source) -> None:
        self._sides = (left, right)
        self.shape = tuple(left.shape)
        self.draws = any(not isinstance(side, Tensor) and side.draws for side in self._sides)
        self.digest = hashlib.sha256("-".join(map(_digest, self._sides)).encode()).hexdigest()

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """[B, *shape]."""
        sides = [
            side if isinstance(side, Tensor) else side.of(samples, generator).float() for side in self._sides
        ]
        return sides[0] - sides[1]

    def missing(self, samples: Tensor) -> Tensor:
        """Those of the samples that have no row and need one."""
        found = [side.missing(samples) for side in self._sides if not isinstance(side, Tensor)]
        both: Tensor = torch.cat(found).unique()
        return both

    def lacks(self, samples: Tensor) -> str:
        """The error message for samples without a row."""
        return "; ".join(
            side.lacks(samples)
            for side in self._sides
            if not isinstance(side, Tensor) and len(side.missing(samples))
        )


def _digest(side: Source) -> str:
    return side.digest if not isinstance(side, Tensor) else hashlib.sha256(side.numpy().tobytes()).hexdigest()


def with_origins(problems: list[Problem], spec: Spec) -> list[Problem]:
    """The problems; those of a hook that takes values from another run say which plan that run had."""
    origins = {hook.where: origin for hook in spec.hooks if (origin := "; ".join(map(_origin, _runs(hook))))}
    return [
        replace(each, hint="; ".join(filter(None, [each.hint, origins.get(_hook_of(each.where), "")])))
        for each in problems
    ]


def _runs(hook: HookSpec) -> list[str]:
    """The runs that the hook takes values from, as they are written."""
    runs = list[str]()
    for given in hook.action.outside_values().values():
        value = given if isinstance(given, RunValue) else None
        while value is not None:
            runs.append(value.run)
            value = value.minus
    return list(dict.fromkeys(runs))


def _origin(path: str) -> str:
    try:
        plan = open_run(path).plan
    except StoreError:  # that there is no such run is a problem of its own
        return ""
    model = f"of a {plan.get('model')}, hash {str(plan.get('hash'))[:12]}" if plan else "unknown"
    matches = [match for each in plan.get("hooks", []) for match in each.get("targets", [])]
    shapes = ", ".join(f"{match['path']} {match.get('shape')}" for match in matches[:6])
    return f"the run {path} has the plan {model}: {shapes}"


def _hook_of(where: str) -> str:
    return ".".join(where.split(".")[:2])
