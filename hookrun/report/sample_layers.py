"""One sample through all captured layers of a hook, in the order in which they ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from torch import Tensor

from hookrun.errors import HookrunError, counted, listed, shortened
from hookrun.report.captures import place
from hookrun.report.draw.charts import Figure
from hookrun.report.draw.pictures import MOST_PAGED_PIXELS, HeatMap, mosaic
from hookrun.report.draw.text import module_name
from hookrun.report.facts import RunData
from hookrun.report.sampling import DrawnRows, rows_of_samples
from hookrun.store.captures.read import StoredCapture

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


@dataclass(frozen=True)
class SampleChooser:
    """The samples of a hook. notes: which layers are not shown, and why"""

    samples: Sequence[SampleLayers] = ()
    notes: Sequence[str] = ()


NO_SAMPLES = SampleChooser()


def sample_layers(captures: Sequence[StoredCapture], facts: RunData) -> SampleChooser:
    """The first samples, those with a picture or tokens before others.

    Of each sample the last epoch, its latest step, and the first call of each layer.
    """
    preferred = facts.pictures.keys() | facts.sequences.keys()
    most = max(1, min(MOST_SAMPLES, MOST_PICTURES // max(len(facts.captured), 1)))
    samples: dict[tuple[str, int], SampleLayers] = {}
    notes: list[str] = []
    without: list[str] = []
    for capture in sorted(captures, key=attrgetter("number")):
        name = module_name(place(capture))
        has_rows = False
        try:
            for rows in rows_of_samples(capture, most, preferred, MOST_LINES + 1):
                has_rows = True
                key = rows.sample_of(0)
                if key not in samples and len(samples) < most:
                    samples[key] = _without_layers(key, rows.name, facts)
                if key in samples and rows.values.numel():
                    samples[key].figures.append(_figure(name, rows))
        except (HookrunError, OSError) as error:
            notes.append(f"{name} can't be read: {error}")
        else:
            if not has_rows:
                without.append(name)
    if without:
        names = listed(without, MOST_CHANNELS)
        notes.append(f"rows that do not belong to one sample or token, or are too large to draw: {names}")
    return SampleChooser(list(samples.values()), notes)


def _without_layers(key: tuple[str, int], name: str, facts: RunData) -> SampleLayers:
    if called := facts.called.get(key):
        name += f" · {called}"
    text = ""
    if key in facts.sequences:
        text = shortened(" ".join(facts.sequences[key].names), MOST_TEXT)
    return SampleLayers(name, facts.pictures.get(key, ""), text)


def _figure(title: str, rows: DrawnRows) -> Figure:
    """Maps of channels, or a map with a line for each token, or for each row of a matrix."""
    values = rows.values
    if rows.by_token:
        places = zip(rows.source.positions.tolist(), rows.source.text, strict=True)
        return _lines(title, values, [f"{position} {text}" for position, text in places])
    values = values[0]
    if values.dim() > 2:
        return _maps(title, values.flatten(0, -3))
    if values.dim() == 2:
        return _lines(title, values, list(map(str, range(len(values)))))
    return _lines(title, values, [""])


def _maps(title: str, tiles: Tensor) -> Figure:
    """The first of the tiles [n, height, width]."""
    count, height, width = tiles.shape
    says = f"{counted(count, 'map')} of {height} × {width}"
    if count > MOST_CHANNELS:
        says += f", the first {MOST_CHANNELS}"
    shown = tiles[None, :MOST_CHANNELS].numpy()
    return mosaic(title, shown, rows=[""], columns=says, pixels=MOST_PAGED_PIXELS)


def _lines(title: str, values: Tensor, names: Sequence[str]) -> Figure:
    """The first lines, each with this name, and evenly spaced elements of them."""
    matrix = values.reshape(len(names), -1)
    length = matrix.shape[1]
    stride = -(-length // MOST_ELEMENTS)
    says = counted(length, "element")
    if stride > 1:
        says += f", every {stride}th"
    if len(names) > MOST_LINES:
        says += f", the first {MOST_LINES} lines"
    shown = matrix[:MOST_LINES, ::stride].numpy()
    return HeatMap(
        title,
        shown,
        rows=names[:MOST_LINES],
        columns=list(map(str, range(0, length, stride))),
        x=says,
        numbers=length <= MOST_CHANNELS,
        valid=np.ones(shown.shape, dtype=bool),
    ).figure()
