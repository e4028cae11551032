"""folds.safetensors: what the folds of a run have accumulated, written and read back."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from hookrun.engine.values.folded import COUNT, COV, MEAN, QUANTILES, TOP, Folded
from hookrun.errors import Lookup
from hookrun.store.captures.tensor_file import read_tensors, write_tensors
from hookrun.store.files import StoreError, replacing
from hookrun.store.format import FOLDS, decode, encode
from hookrun.store.records import Count, Listing, Name, Record, Whole, checked

Folds = Mapping[str, Mapping[str, Folded]]
"""Hook -> module -> what it has accumulated."""

_CONTENTS = "folds"
"""The table of contents, in the metadata of the file: a list of FoldRecord."""


class FoldRecord(Record):
    """An entry of the table of contents: the tensors of the n-th are called ``n.mean``, ``n.top.values`` and so on."""

    hook: Name
    module: Name
    labels: list[Whole] | None = None
    at: Listing[float] = []
    places: list[Count] | None = None


def write_folds(folder: Path, folds: Folds) -> Path:
    """Write the file into a run directory, and return its path."""
    contents: list[dict[str, object]] = []
    tensors: dict[str, Tensor] = {}
    for hook, modules in folds.items():
        for module, fold in modules.items():
            for name, tensor in fold.tensors.items():
                tensors[f"{len(contents)}.{name}"] = tensor
            about = {"labels": fold.labels, "at": fold.at, "places": fold.places}
            contents.append({"hook": hook, "module": module, **about})
    path = folder / FOLDS
    with replacing(path, flushes_folder=False) as file:
        write_tensors(file, tensors, {_CONTENTS: encode(contents)})
    return path


def read_folds(folder: Path, aliases: Mapping[str, str]) -> Lookup[Lookup[Folded]]:
    """The folds of a run directory; none if it has no file of them. StoreError if that is broken.

    aliases: another name of a module -> its path
    """
    path = folder / FOLDS
    found: dict[str, dict[str, Folded]] = {}
    if os.path.lexists(path):
        tensors, about = read_tensors(path, folder)
        try:
            entries = checked(decode(about[_CONTENTS].encode()), list[FoldRecord])
            by_number = defaultdict[str, dict[str, Tensor]](dict)
            for name, tensor in tensors.items():
                number, _, kind = name.partition(".")
                by_number[number][kind] = tensor
            for place, entry in enumerate(entries):
                of_entry = by_number[str(place)]
                _require_form(of_entry, entry)
                fold = Folded(of_entry, entry.labels, entry.at, entry.places)
                found.setdefault(entry.hook, {})[entry.module] = fold
        except (KeyError, ValueError) as error:
            raise StoreError(f"{path} does not describe its folds: {error}") from error
    where = f"the folds of {folder.name}"
    by_hook = {
        name: Lookup("module", f"{where}, {name}", modules, aliases) for name, modules in found.items()
    }
    return Lookup("hook", where, by_hook)


def _require_form(tensors: Mapping[str, Tensor], entry: FoldRecord) -> None:
    """ValueError if a tensor does not have the form that it should have; KeyError if one is missing."""
    first = [] if entry.labels is None else [len(entry.labels)]
    units = list(tensors[MEAN].shape[len(first) :]) or [1]
    has_top = TOP[0] in tensors
    most = max(tensors[TOP[0]].shape[-1:], default=1) if has_top else 1
    shapes: dict[str, Sequence[int]] = {
        COUNT: first,
        MEAN: [*first, *units],
        COV: [*first, *units, *units],
        QUANTILES: [*first, *units, len(entry.at)],
        **{name: [*first, *units, max(most, 1)] for name in TOP},
    }
    for name in [COUNT, *tensors, *(TOP if has_top else ())]:
        tensor = tensors[name]
        if list(tensor.shape) != list(shapes[name]):
            raise ValueError(
                f"{name} of {entry.hook} has shape {list(tensor.shape)}, expected {shapes[name]}"
            )
        if tensor.is_complex() or tensor.is_floating_point() == (name in (COUNT, *TOP[1:])):
            raise ValueError(f"{name} of {entry.hook} is {tensor.dtype}")
