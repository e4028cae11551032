"""Statistics with lists: a histogram is a ridge, quantiles are curves, and what each index has is a map over steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hookrun.errors import counted, listed, shortened
from hookrun.report.curves import (
    Points,
    Record,
    Statistic,
    charts,
    layer_map,
    place_of,
    statistics_in,
)
from hookrun.report.draw.charts import COLOURS, MOST_ROWS, Figure, Series, lines
from hookrun.report.draw.ridge import Histogram, ridge
from hookrun.report.draw.text import module_name, number
from hookrun.report.lines import is_listing, is_number
from hookrun.store.captures.read import spread
from hookrun.store.records import PlannedHookRecord

OF_EXPERTS = ("dead", "hot")
"""Lists of records that name experts."""
MOST_UNITS = 128
"""Rows of a map of units; of more, neighbours share a row."""
_FEW = 12
"""Up to so many experts, the map of their load has numbers."""


def quantiles_of(hook: PlannedHookRecord | None) -> list[str]:
    """The quantiles that the plan asks a hook for, in the order of the numbers; empty if there are none."""
    of = (hook.params or {}).get("of") if hook is not None else None
    for item in of if isinstance(of, list) else [of]:
        if isinstance(item, dict) and isinstance(item.get("quantiles"), list):
            return list(map(str, item["quantiles"]))
    return []


def distributions(
    records: Sequence[Record], places: Mapping[str, int], quantiles: Sequence[str], most: int
) -> Iterator[Figure]:
    """A picture of each statistic of measured records that has lists, at modules in the model's order.

    places:    module or parameter -> its position in the model
    quantiles: which ones were recorded
    most:      how many pictures there are: of more, the modules are evenly spaced
    """
    found = [each for each in statistics_in(records, places, is_listing) if each.name not in OF_EXPERTS]
    for statistic in found[:most]:
        noun = "unit"
        if statistic.name == "counts":
            noun = "expert" if "dead" in records[0] else "value"
            yield from _load(statistic, records, noun)
        for path in spread(list(statistic.modules), max(1, most // len(found))):
            yield from _pictures(path, statistic, noun, quantiles)


def _pictures(path: str, statistic: Statistic, noun: str, quantiles: Sequence[str]) -> Iterator[Figure]:
    """The picture of a statistic at a module; if each unit of a dimension has a list, that of the last step."""
    name, _, suffix, modules, unit = statistic
    at, values = modules[path]
    last = values[-1]
    of_units = isinstance(last, list) and bool(last) and not is_number(last[0])
    title = f"{module_name(path)}{suffix}"
    if of_units or len(at) == 1:
        title += f", {unit} {number(at[-1])}"
    if of_units:
        at = list(map(float, range(len(last))))
        values = last
        unit = "unit"
    histograms, points = _separated(at, values)
    if histograms:
        yield ridge(f"{name} of {title}", histograms, unit)
    elif name == "quantiles":
        if len(quantiles) != len(points):
            quantiles = [f"{place + 1} of {len(points)}" for place in range(len(points))]
        curves = [Series(share, *curve) for share, curve in zip(quantiles, points.values(), strict=True)]
        yield from charts(f"{name} of {title}", spread(curves, COLOURS), x=unit, y="value")
    elif len(at) > 1 and points:
        yield layer_map(f"{name} of each {noun} of {title}", points, unit, noun=noun, most=MOST_UNITS)
    elif points:
        row = [of_index[0] for _, of_index in points.values()]
        dots = Series(name, range(len(row)), row, dots=True)
        yield lines(f"{name} of each {noun} of {title}", [dots], x=noun, y="value")


def _separated(at: Sequence[float], values: Sequence[Any]) -> tuple[dict[float, Histogram], Points]:
    """The histograms of at least one element by their place, and the numbers of each index over the places."""
    histograms: dict[float, Histogram] = {}
    points = Points()
    for place, value in zip(at, values, strict=True):
        if isinstance(value, dict) and any(value["counts"]):
            histograms[place] = value
        if isinstance(value, list):
            for index, item in enumerate(filter(is_number, value)):
                steps, of_index = points.setdefault(str(index), ([], []))
                steps.append(place)
                of_index.append(item)
    return histograms, points


def _load(statistic: Statistic, records: Sequence[Record], noun: str) -> Iterator[Figure]:
    """A map of the share that each index has of the counts of a layer, over all steps."""
    shares = Points()
    for path, of_layer in statistic.modules.items():
        sums = [sum(values) for _, values in _separated(*of_layer)[1].values()]
        if any(sums):
            shares[path] = list(range(len(sums))), [each / sum(sums) for each in sums]
    if len(shares) > 1:
        length = max(len(places) for places, _ in shares.values())
        facts = [*_of_experts(records, statistic.mode), f"an even share is {1 / length:.1%}"]
        title = f"share of each {noun} by layer{statistic.suffix}"
        yield layer_map(title, shares, noun, facts=facts, numbers=length <= _FEW, written="{:.1%}".format)


def _of_experts(records: Sequence[Record], mode: str) -> Iterator[str]:
    """Texts that name the dead and the hot experts, as the last record of each layer has them."""
    last = {module_name("".join(place_of(record))): record for record in records if record["mode"] == mode}
    for kind in OF_EXPERTS:
        named = [
            f"{name}: {shortened(str(record[kind]))}" for name, record in last.items() if record.get(kind)
        ]
        if named:
            yield f"{kind} at the end in {counted(len(named), 'layer')}: {listed(named, MOST_ROWS)}"
