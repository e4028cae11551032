"""At most 20 curves are open on a page; the others are folded, the largest first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_curves import made_run, planned, record, shown

STATISTICS = ("mean", "std", "min", "max", "norm", "zeros")


def layers(count: int, steps: int, hook: str = "watch") -> Iterator[dict[str, Any]]:
    """Six statistics of each layer, which are larger in later layers."""
    for step in range(steps):
        for layer in range(count):
            values = {name: layer + math.sin(step) / 10 for name in STATISTICS}
            yield record(hook, f"layers.{layer}", step, **values)


@pytest.mark.parametrize(("count", "hooks"), [(4, 1), (4, 5), (12, 1), (12, 3)])
def test_never_more_than_twenty_curves_are_open(count: int, hooks: int, tmp_path: Path) -> None:
    names = [f"watch{number}" for number in range(hooks)]
    records = [each for name in names for each in layers(count, 3, name)]
    path = made_run(tmp_path / "run", records, [], losses=[1.0, 2.0, 3.0])
    page = shown(path)
    assert 10 < page.open_curves <= 20
    assert page.folded_curves > 0
    assert "further picture" in page.source


def test_few_curves_are_all_open(tmp_path: Path) -> None:
    page = shown(made_run(tmp_path / "run", layers(2, 3)))
    assert (page.open_curves, page.folded_curves) == (12, 0)


def test_the_layers_with_the_largest_values_come_first(tmp_path: Path) -> None:
    records = [
        record("watch", f"layer{number}", step, norm=number) for number in range(30) for step in (0, 1)
    ]
    records[6]["norm"] = math.nan
    records[8]["norm"] = -1e6
    page = shown(made_run(tmp_path / "run", records))
    [first] = re.findall(r"<span>norm, 1–8 of 30 layers</span>.*?</figure>", page.source, re.S)
    legend = re.findall(r"<i></i>(\w+)</span>", first)
    assert legend == [f"layer{number}" for number in (3, 4, 29, 28, 27, 26, 25, 24)]
    assert "those with the largest values come first" in first


def test_thousands_of_curves_make_a_small_page(tmp_path: Path) -> None:
    page = shown(made_run(tmp_path / "run", layers(622, 4), [planned("watch", ["layers.0"])]))
    assert len(page.source) < 800_000
    assert page.open_curves <= 20
    for name in STATISTICS:
        assert f"<span>{name} by layer</span>" in page.source, "a map has all layers"


def test_many_metrics_are_folded_too(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", [])
    lines = ""
    for step in range(3):
        values = ", ".join(f'"metric{number}": {step}' for number in range(30))
        lines += f'{{"split": "val", "of": "epoch", "step": {step}, {values}}}\n'
    (path / "metrics.jsonl").write_text(lines)
    page = shown(path)
    assert (page.open_curves, page.folded_curves) == (12, 18)
