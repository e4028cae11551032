"""One sample through all captured layers of a hook, in the order in which they ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
from torch import Tensor

from hookrun.errors import HookrunError, listed, shortened
from hookrun.report.captures import place
from hookrun.report.draw.charts import Figure
from hookrun.report.draw.pictures import MOST_PAGED_PIXELS, HeatMap, mosaic
from hookrun.report.draw.text import module_name
from hookrun.report.facts import RunData
from hookrun.report.sampling import DrawnRows, rows_of_samples
from hookrun.store.captures.read import StoredCapture, spread

MOST_SAMPLES = 8
MOST_PICTURES = 160
"""Pictures on a page; with more captured layers there are fewer samples."""
MOST_CHANNELS = 12
MOST_LINES = 48
"""Tokens of a sample, or lines of a matrix."""
MOST_ELEMENTS = 128
MOST_TEXT = 400


@dataclass
class SampleLayers:
    """What the captured layers of a hook have of one sample: a figure for each.

    picture: the address of its picture, or ""
    text:    its tokens, or ""
    """

    name: str
    picture: str
    text: str
    figures: list[Figure] = field(default_factory=list)


@dataclass
class SampleChooser:
    """The samples of a hook. notes: which layers are not shown, and why"""

    samples: list[SampleLayers] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def sample_layers(captures: Sequence[StoredCapture], facts: RunData) -> SampleChooser:
    """The first samples, those with a picture or tokens before others.

    Of each sample the last epoch, its latest step, and the first call of each layer.
    """
    preferred = facts.pictures.keys() | facts.sequences.keys()
    most = max(1, min(MOST_SAMPLES, MOST_PICTURES // max(len(facts.captured), 1)))
    samples = dict[tuple[str, int], SampleLayers]()
    notes = list[str]()
    without = list[str]()
    for capture in sorted(captures, key=attrgetter("number")):
        name = module_name(place(capture))
        try:
            drawn = list(rows_of_samples(capture, most, preferred, MOST_LINES))
        except (HookrunError, OSError) as error:
            notes.append(f"{name} can't be read: {error}")
            continue
        if not drawn:
            without.append(name)
        for rows in drawn:
            key = rows.sample_of(0)
            if key not in samples and len(samples) < most:
                samples[key] = _without_layers(key, rows.name, facts)
            if key in samples and rows.values.numel():
                samples[key].figures.append(_figure(name, rows, facts))
    if without:
        notes.append(f"their rows do not belong to a sample: {listed(without, MOST_CHANNELS)}")
    return SampleChooser(list(samples.values()), notes)


def _without_layers(key: tuple[str, int], name: str, facts: RunData) -> SampleLayers:
    if called := facts.called.get(key):
        name += f" · {called}"
    text = ""
    if key in facts.sequences:
        text = shortened(" ".join(facts.sequences[key].names), MOST_TEXT)
    return SampleLayers(name, facts.pictures.get(key, ""), text)


def _figure(title: str, rows: DrawnRows, facts: RunData) -> Figure:
    """Maps of channels, or a map with a line for each token, or for each row of a matrix."""
    values = rows.values
    shape = " × ".join(map(str, values.shape[1:])) or "one number"
    if not rows.by_token:
        values = values[0]
        if values.dim() > 2:
            return _maps(title, values.flatten(0, -3), shape)
    names, matrix = _lines(values, rows, facts)
    lines = spread(range(len(names)), MOST_LINES)
    stride = -(-matrix.shape[1] // MOST_ELEMENTS)
    shown = matrix[lines][:, ::stride].numpy()
    shape += " elements" if values.dim() else ""
    if stride > 1:
        shape += f", every {stride}th"
    if len(lines) < len(names):
        shape += f", {len(lines)} of {len(names):,} lines"
    figure = HeatMap(
        title,
        shown,
        rows=[names[line] for line in lines],
        columns=list(map(str, range(0, matrix.shape[1], stride))),
        x=shape,
        numbers=shown.shape[1] <= MOST_CHANNELS,
        valid=np.ones(shown.shape, dtype=bool),
    ).figure()
    return replace(figure, table=None)


def _lines(values: Tensor, rows: DrawnRows, facts: RunData) -> tuple[list[str], Tensor]:
    """The names and values of the lines of a map: tokens with their positions, rows of a matrix, or the one vector."""
    sequence = facts.sequences.get(rows.sample_of(0))
    if rows.by_token:
        places = zip(rows.source.positions.tolist(), rows.source.text, strict=True)
        return [f"{place} {text}" for place, text in places], values.reshape(len(values), -1)
    if values.dim() < 2:
        return [""], values.reshape(1, -1)
    if sequence is None or sequence.width != len(values):
        return list(map(str, range(len(values)))), values
    real = values[sequence.before :][: len(sequence.ids)]  # without padding
    return [f"{place} {name}" for place, name in enumerate(sequence.names)], real


def _maps(title: str, tiles: Tensor, shape: str) -> Figure:
    if len(tiles) > MOST_CHANNELS:
        shape += f", the first {MOST_CHANNELS} of {len(tiles):,}"
    shown = tiles[None, :MOST_CHANNELS].numpy()
    figure = mosaic(title, shown, rows=[""], columns=shape, pixels=MOST_PAGED_PIXELS)
    return replace(figure, table=None)
