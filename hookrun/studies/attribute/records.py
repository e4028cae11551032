"""attributions.safetensors: how much each part of an input or a layer adds to a score."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hookrun.errors import HookrunError

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.studies.kit.files import Run

ATTRIBUTIONS = "attributions.safetensors"

Place = tuple[str, int]
"""The split and the number of a sample."""

MOST_ANSWERED = 100
"""Samples whose strongest attribution is in the answer."""


def attributions_of(run: Run) -> dict[str, Tensor]:
    """`Run.attributions`: the tensors of the file; empty if the run has none."""
    from hookrun.studies.kit.files import read_tensors

    path = run.path / ATTRIBUTIONS
    return read_tensors(path, run.path)[0] if os.path.lexists(path) else {}


def places_in(file: Any) -> list[Place]:
    """The sample of each row in an open file of attributions."""
    from hookrun.studies.kit.files import read_tensor

    names = file.keys()
    if "sample_ids" not in names:
        return []
    split = str((file.metadata() or {}).get("split"))
    return [(split, sample) for sample in read_tensor(file, "sample_ids").flatten().tolist()]


def parts_of(file: Any, rows: int) -> Iterator[tuple[str, Any]]:
    """Name and slice of the attributions to each input. HookrunError if one is not of `rows` rows of real numbers."""
    for name in sorted(file.keys()):
        if not name.startswith("attributions"):
            continue
        part = file.get_slice(name)
        shape = part.get_shape()
        if shape[:1] != [rows]:
            raise HookrunError(f"{name} does not have a row for each sample")
        if 0 in shape or part.get_dtype() == "C64":
            raise HookrunError(f"{name} holds no real numbers")
        yield name, part


def answer_of(run: Run) -> dict[str, Any] | None:
    """Of each of the first samples where its strongest attribution is: the row and column, or the token."""
    from hookrun.studies.kit.files import open_tensors

    if not os.path.lexists(run.path / ATTRIBUTIONS):
        return None
    strongest: list[dict[str, Any]] = []
    with open_tensors(run.path / ATTRIBUTIONS, run.path) as file:
        places = places_in(file)
        for name, part in parts_of(file, len(places)):
            for row, (split, sample) in enumerate(places[:MOST_ANSWERED]):
                where, value = _strongest(part[row : row + 1][0].float())
                strongest.append(
                    {"input": name, "split": split, "sample": sample, "place": where, "value": value}
                )
    return {"what": "strongest_attribution", "samples": strongest}


def _strongest(values: Tensor) -> tuple[list[int], float]:
    """The index and the value of the largest, in a map summed over its channels, in tokens over their width."""
    import torch

    if values.dim() == 3:
        values = values.sum(0)
    elif values.dim() == 2:
        values = values.sum(1)
    at = values.abs().nan_to_num(-1.0).argmax()
    place = [int(index) for index in torch.unravel_index(at, values.shape)]
    return place, float(values[tuple(place)])
