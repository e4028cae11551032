"""The results of task=attribute: maps over the pictures of samples, and tokens coloured by their attributions."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from typing import Any

from markupsafe import Markup
from torch import Tensor
from torch.nn import functional as F

from hookrun.errors import HookrunError, printable
from hookrun.studies.attribute.records import ATTRIBUTIONS, Place, parts_of, places_in
from hookrun.studies.kit.drawing import (
    MOST_SAMPLES,
    MOST_TOKENS,
    Figure,
    RunData,
    Strips,
    Token,
    encoded,
    strips,
)
from hookrun.studies.kit.files import open_tensors

ID = "attribution"
TITLE = "Attribution"
POSITION = 20

MOST_PICTURES = 24
_SIDE = 64
"""The largest side of a map in pixels, as of the pictures; larger maps are averaged down."""


def build(facts: RunData) -> dict[str, Any] | None:
    """Maps of the samples that have a picture, and strips of the first sequences; None if there is no such file.

    Attributions that are neither are not drawn, and a file that cannot be read is a note.
    """
    if not os.path.lexists(facts.path / ATTRIBUTIONS):
        return None
    drawn: dict[str, Any] = {"overlays": [], "figures": [], "note": ""}
    try:
        with open_tensors(facts.path / ATTRIBUTIONS, facts.path) as file:
            about = file.metadata() or {}
            places = places_in(file)
            for name, part in parts_of(file, len(places)):
                shape = part.get_shape()
                if len(shape) == 4:
                    is_smooth = about.get("method") == "grad_cam"
                    for place, values in _rows(part, places, facts.pictures, MOST_PICTURES).items():
                        drawn["overlays"].append(_overlay(facts, name, place, values, smooth=is_smooth))
                elif len(shape) in (2, 3):
                    rows = _rows(part, places, facts.sequences, MOST_SAMPLES)
                    if rows:
                        drawn["figures"].append(_strips(facts, name, rows))
    except HookrunError as error:
        drawn["note"] = f"{ATTRIBUTIONS} can't be read: {error}"
    return drawn


def _rows(part: Any, places: list[Place], shown: Container[Place], most: int) -> dict[Place, Tensor]:
    """The rows of the first `most` samples that can be shown."""
    rows: dict[Place, Tensor] = {}
    for row, place in enumerate(places):
        if place in shown and len(rows) < most:
            rows[place] = part[row : row + 1][0].float()
    return rows


def _overlay(facts: RunData, name: str, place: Place, values: Tensor, *, smooth: bool) -> Figure:
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
    caption = f"{place[0]} sample {place[1]}"
    if facts.called.get(place):
        caption += f" · {facts.called[place]}"
    note = "" if name == "attributions" else printable(name)
    return Figure(printable(caption), body, scale=scale, note=note)


def _strips(facts: RunData, name: str, rows: Mapping[Place, Tensor]) -> Figure:
    """The tokens of sequences, coloured by their attributions [length] or [length, width], which are summed."""
    samples = Strips()
    for place, values in rows.items():
        of_tokens = (values if values.dim() == 1 else values.sum(1)).tolist()
        tokens = zip(facts.sequences[place].names[:MOST_TOKENS], of_tokens, strict=False)
        samples[f"{place[0]} sample {place[1]}"] = [
            Token(text, at, value) for at, (text, value) in enumerate(tokens)
        ]
    note = f"{name}: how much each token raises or lowers the score"
    return strips(
        "attribution of each token", samples, what="attribution", note=note, ends=("lowers", "raises")
    )
