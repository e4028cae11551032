"""Tensors that hooks take from what other runs captured: a mean, one row, or a row for each sample of the batch."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from hookrun.actions.values import RunValue
from hookrun.data.info import SPLITS
from hookrun.errors import CompileError, HookrunError
from hookrun.plan.rows import Source
from hookrun.spec import Settings, Spec
from hookrun.store.captures import Capture
from hookrun.store.files import StoreError
from hookrun.store.reader import Run, open_run

ROWS_AT_ONCE = 4096


class Reader:
    """Reads what `value`s name, in float32 where it is computed, for a run with these settings.

    notes: how the runs that values came from differ from this one
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.notes = list[str]()

    def __call__(self, value: RunValue) -> Source:
        """Raises HookrunError where there is no such thing, or where it is of another model or another split."""
        found = read_run_value(value, self._settings)
        for each in (value, value.minus):
            if each is not None and (differing := _differences(open_run(each.run), self._settings)):
                note = f"values come from {each.run}, where {'; '.join(differing)}"
                self.notes += [note] if note not in self.notes else []
        return found


def read_run_value(value: RunValue, settings: Settings | None = None) -> Source:
    """What `value` names, in float32 where it is computed. Raises HookrunError where there is no such thing.

    settings: of the run that will use it; model and split of the other run must be the same
    """
    found = _read_one(value, settings)
    if value.minus is None:
        return found
    other = read_run_value(value.minus, settings)
    shapes = [tuple(each.shape) for each in (found, other)]
    if shapes[0] != shapes[1]:
        raise HookrunError(f"minus: {value.minus} has shape {list(shapes[1])}, {value} has {list(shapes[0])}")
    if isinstance(found, Tensor) and isinstance(other, Tensor):
        return found - other
    return Difference(found, other)


def _read_one(value: RunValue, settings: Settings | None) -> Source:
    run = open_run(value.run)
    if settings is not None:
        _require_same_model(run, value, settings)
    capture = _capture(run, value)
    if value.sample == "mean":
        return _mean(capture)
    _require_one_row_each(capture, value)
    if isinstance(value.sample, int):
        positions = capture.where(sample=value.sample)
        if not len(positions):
            raise HookrunError(f"{_named(run, value)} has no row of sample {value.sample}: {_ids(capture)}")
        return capture[int(positions[0])].float()
    if value.sample == "same" and settings is not None:
        _require_same_split(run, capture, value, settings)
    return RunRows(capture, _named(run, value), resample=value.sample == "resample")


def _named(run: Run, value: RunValue) -> str:
    return f"{value.capture}/{value.module}{value.path or ''} of the run {run.path}"


def _capture(run: Run, value: RunValue) -> Capture:
    found = run.captures[value.capture][value.module]
    if value.path is not None:
        if isinstance(found, Capture):
            raise HookrunError(f"{_named(run, value)} is one tensor: leave `path` out")
        found = found[value.path]
    if not isinstance(found, Capture):
        raise HookrunError(
            f"{_named(run, value)} holds several tensors, name one with `path`: {', '.join(found)}"
        )
    if not len(found):
        raise HookrunError(f"{_named(run, value)} holds no rows")
    return found


def _mean(capture: Capture) -> Tensor:
    blocks = (capture[start : start + ROWS_AT_ONCE] for start in range(0, len(capture), ROWS_AT_ONCE))
    total = sum((block.double().sum(0) for block in blocks), start=capture[0].double() * 0)
    return (total / len(capture)).float()


def _require_one_row_each(capture: Capture, value: RunValue) -> None:
    ids = capture.sample_ids
    if (ids < 0).any():
        what = "keeps whole firings, not a row for each sample"
    elif len(ids.unique()) != len(ids):
        what = f"has {len(ids)} rows for {len(ids.unique())} samples"
    else:
        return
    raise HookrunError(f"{value.capture}/{value.module} in {value.run} {what}: capture it with task=predict")


def _require_same_split(run: Run, capture: Capture, value: RunValue, settings: Settings) -> None:
    """Sample n of the other run is no sample n of this one where they are of other splits."""
    split = settings.task.split if settings.task.name != "train" else "train"
    theirs = sorted({SPLITS[part] for part in capture.splits.unique().tolist() if part >= 0})
    if theirs not in ([split], []):
        what = f"its samples are of the split {' and '.join(map(repr, theirs))}, these of {split!r}"
        raise HookrunError(f"{_named(run, value)} has other samples: {what}")


def _require_same_model(run: Run, value: RunValue, settings: Settings) -> None:
    theirs, ours = _section(run, "model"), settings.model.model_dump(mode="json")
    for key in ("name", "factory"):
        if theirs and theirs.get(key) != ours[key]:
            what = f"model.{key} is {theirs.get(key)!r} there and {ours[key]!r} here"
            raise HookrunError(f"{_named(run, value)} is of another model: {what}")


_MAY_DIFFER = {"model": ("args", "weights"), "data": ("name", "root", "args", "transforms")}


def _differences(run: Run, settings: Settings) -> list[str]:
    """What is not the same in the other run, on purpose or not: its weights, its data."""
    found = list[str]()
    for section, keys in _MAY_DIFFER.items():
        theirs, ours = _section(run, section), getattr(settings, section).model_dump(mode="json")
        found += [
            f"{section}.{key} is {theirs.get(key)!r} there and {ours[key]!r} here"
            for key in keys
            if theirs and theirs.get(key) != ours[key]
        ]
    seed = run.config.get("seed", settings.seed)
    if seed != settings.seed and settings.model.weights is None:
        found.append(f"seed is {seed} there and {settings.seed} here, from which the weights are drawn")
    return found


def _section(run: Run, name: str) -> dict[str, Any]:
    section = run.config.get(name)
    return section if isinstance(section, dict) else {}


def _ids(capture: Capture) -> str:
    ids = capture.sample_ids
    return f"it has {len(ids)} samples from {int(ids.min())} to {int(ids.max())}"


class RunRows:
    """The rows of a capture by sample: each sample's own, or another's.

    Rows are read when they are asked for.
    """

    def __init__(self, capture: Capture, name: str, *, resample: bool) -> None:
        self._capture = capture
        self._name = name
        self.draws = resample
        self.shape = capture.shape[1:]
        self._ids, self._order = capture.sample_ids.sort()
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
        """What to say of samples without a row."""
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
        """What to say of samples without a row."""
        return "; ".join(
            side.lacks(samples)
            for side in self._sides
            if not isinstance(side, Tensor) and len(side.missing(samples))
        )


def _digest(side: Source) -> str:
    return side.digest if not isinstance(side, Tensor) else hashlib.sha256(side.numpy().tobytes()).hexdigest()


def with_origins(error: CompileError, spec: Spec) -> CompileError:
    """The error; what is wrong with a hook that takes values from another run says which plan that run had."""
    origins = dict[str, str]()
    for hook in spec.hooks:
        runs = {value.run for value in hook.action.outside_values().values() if isinstance(value, RunValue)}
        for path in runs:
            with suppress(StoreError):  # that there is no such run is among the problems already
                plan = open_run(path).plan
                model = f"of a {plan['model']}, hash {plan['hash'][:12]}" if plan else "unknown"
                targets = [target for each in plan.get("hooks", []) for target in each["targets"]]
                shapes = ", ".join(f"{target['path']} {target['shape']}" for target in targets[:6])
                origins[hook.where] = f"the run {path} has the plan {model}: {shapes}"
    return CompileError(
        [
            replace(each, hint="; ".join(filter(None, [each.hint, origins.get(_hook_of(each.where))])))
            for each in error.errors
        ]
    )


def _hook_of(where: str) -> str:
    return ".".join(where.split(".")[:2])
