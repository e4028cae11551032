"""The results of task=attribute: maps over the pictures of samples, and tokens coloured by their attributions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor
from torch.nn import functional as F

from hookrun.errors import HookrunError, printable
from hookrun.studies.attribute.records import ATTRIBUTIONS
from hookrun.studies.kit.drawing import (
    MOST_SAMPLES,
    MOST_TOKENS,
    Facts,
    Figure,
    Strips,
    Token,
    encoded,
    strips,
)
from hookrun.studies.kit.files import open_tensors, read_tensor

ID = "attribution"
TITLE = "Attribution"
POSITION = 20

MOST_PICTURES = 24
_SIDE = 64
"""The largest side of a map in pixels, as of the pictures; larger maps are averaged down."""

Place = tuple[str, int]
"""The split and the number of a sample."""


def build(facts: Facts) -> dict[str, Any] | None:
    """Maps of the samples that have a picture, and strips of the first sequences; None if there is no such file.

    Attributions that are neither are not drawn, and a file that cannot be read is a note.
    """
    if not os.path.lexists(facts.path / ATTRIBUTIONS):
        return None
    drawn: dict[str, Any] = {"overlays": [], "figures": [], "note": ""}
    try:
        with open_tensors(facts.path / ATTRIBUTIONS, facts.path) as file:
            metadata, names = file.metadata() or {}, sorted(file.keys())
            ids = read_tensor(file, "sample_ids") if "sample_ids" in names else torch.zeros(0)
            places = [(str(metadata.get("split")), sample) for sample in ids.flatten().tolist()]
            for name in (each for each in names if each.startswith("attributions")):
                part = file.get_slice(name)
                dims = len(part.get_shape())
                if part.get_shape()[:1] != [len(places)]:
                    raise HookrunError(f"{name} does not have a row for each sample")
                if 0 in part.get_shape() or part.get_dtype() == "C64":
                    raise HookrunError(f"{name} holds no real numbers")
                known = facts.pictures if dims == 4 else facts.sequences if dims in (2, 3) else {}
                most = MOST_PICTURES if dims == 4 else MOST_SAMPLES
                chosen = islice((row for row, place in enumerate(places) if place in known), most)
                rows = {places[row]: part[row : row + 1][0].float() for row in chosen}
                if dims == 4:
                    smooth = metadata.get("method") == "grad_cam"
                    drawn["overlays"] += [
                        _overlay(facts, name, *item, smooth=smooth) for item in rows.items()
                    ]
                elif rows:
                    drawn["figures"].append(_strips(facts, name, rows))
    except HookrunError as error:
        drawn["note"] = f"{ATTRIBUTIONS} can't be read: {error}"
    return drawn


def _overlay(facts: Facts, name: str, place: Place, values: Tensor, *, smooth: bool) -> Figure:
    """The picture of a sample below the map [channels, height, width] summed over its channels.

    smooth: the map is of a layer: its few places are large in the picture, with colours that change gradually
    """
    values = values.sum(0)[None, None]
    longest = max(values.shape[2:])
    if longest > _SIDE:
        values = F.avg_pool2d(values, -(-longest // _SIDE), ceil_mode=True)
    elif smooth and values.isfinite().all():
        values = F.interpolate(values, scale_factor=float(_SIDE // longest), mode="bilinear")
    # centred: what lowers the score has the same colour in all maps
    address, scale = encoded(values[0, 0].numpy(), centre=0.0)
    body = Markup('<div class="overlay"><img alt="the input" src="{}"><img alt="{}" src="{}"></div>').format(
        facts.pictures[place], f"the map of {name}", address
    )
    caption = " · ".join(filter(None, (f"{place[0]} sample {place[1]}", facts.called.get(place, ""))))
    return Figure(
        printable(caption), body, scale=scale, note="" if name == "attributions" else printable(name)
    )


def _strips(facts: Facts, name: str, rows: Mapping[Place, Tensor]) -> Figure:
    """The tokens of sequences, coloured by their attributions [length] or [length, width], which are summed."""
    samples = Strips()
    for place, values in rows.items():
        of_tokens = (values if values.dim() == 1 else values.sum(1)).tolist()
        texts = facts.sequences[place].names[:MOST_TOKENS]
        samples[f"{place[0]} sample {place[1]}"] = [
            Token(text, at, value) for at, (text, value) in enumerate(zip(texts, of_tokens, strict=False))
        ]
    note = f"{name}: how much each token raises or lowers the score"
    return strips(
        "attribution of each token", samples, what="attribution", note=note, ends=("lowers", "raises")
    )
