"""One sample of a capture through all captured layers: in the order in which they ran, bounded, of any shape."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

import hookrun
from hookrun.report import sample_layers
from hookrun.report.facts import RunData, read_facts
from hookrun.report.sampling import stored_captures
from hookrun.store.captures.write import CaptureWriter


@pytest.fixture(scope="module")
def images(shared: Callable[..., Path]) -> Path:
    """Two convolutions, named in another order than they run in, and the scores."""
    hook = "{select: [fc, conv2, conv1], hook: forward, action: capture}"
    return shared("task=predict", "model=cnn", "train.limit_batches=1", seen=hook)


def samples(page: Path) -> list[tuple[str, str]]:
    """(caption, content) of each sample on the page."""
    source = (page / "report.html").read_text()
    found = re.findall(
        r'<div class="samples">(.*?)\n</div>\n(?:<p|<h|<section|</section|<details)', source, re.S
    )
    parts = [part for block in found for part in block.split("<details><summary>val sample")[1:]]
    return [
        (html.unescape(part.partition("</summary>")[0]), part.partition("</summary>")[2]) for part in parts
    ]


def titles(content: str) -> list[str]:
    return re.findall(r"<figcaption><span>(.*?)</span>", content)


def test_layers_are_in_the_order_in_which_they_ran(images: Path) -> None:
    chosen = samples(images)
    assert len(chosen) == sample_layers.MOST_SAMPLES
    assert [titles(content) for _, content in chosen] == [["conv1", "conv2", "fc"]] * len(chosen)


def test_a_sample_has_its_picture_and_its_class(images: Path) -> None:
    run = hookrun.open_run(images)
    lines = {line["sample"]: line for line in run.table("samples", "arrow").to_pylist()}
    for caption, content in samples(images):
        number, _, called = caption.strip().partition(" · ")
        assert called == lines[int(number)]["class"]
        assert f'alt="val sample {number} · {called}"' in content


def test_the_numbers_are_those_of_the_sample(images: Path) -> None:
    scores = hookrun.open_run(images).captures["seen"]["fc"]
    for caption, content in samples(images):
        row = scores[int(scores.where(sample=int(caption.split()[0]))[0])]
        written = re.findall(r'<span class="on-\w+">(.*?)</span>', content)
        assert written == [f"{value:.4g}" for value in row.tolist()]


def test_a_line_of_a_token_has_its_position_and_text(shared: Callable[..., Path]) -> None:
    data = ("data=repeated_tokens", "data.args.padding=left", "data.args.half=[2,5]", "data.args.val_size=6")
    stream = "{select: 'blocks.*.resid_post', hook: forward, action: capture, tokens: all}"
    path = shared("model=decoder", "model.args.width=32", *data, "task=predict", stream=stream)
    captures = hookrun.open_run(path).captures["stream"]
    caption, content = samples(path)[0]
    assert titles(content) == list(captures)
    rows = captures["blocks.0.resid_post"]
    names = [
        f"{rows.positions[row]} {rows.text[row]}"
        for row in rows.where(sample=int(caption.split()[0])).tolist()
    ]
    assert re.findall(r'<span style="grid-row:\d+" title="(.*?)">', content)[: len(names)] == names


def test_with_many_layers_there_are_fewer_samples(images: Path, monkeypatch) -> None:
    facts = read_facts(images)
    monkeypatch.setattr(sample_layers, "MOST_PICTURES", 9)
    chooser = sample_layers.sample_layers(facts.captured, facts)
    assert [len(sample.figures) for sample in chooser.samples] == [3, 3, 3]


def test_a_layer_without_samples_is_told(tmp_path: Path) -> None:
    chooser = of_layers(tmp_path, torch.randn(4, 3), {"<b>": torch.randn(4, 3)})
    assert [len(sample.figures) for sample in chooser.samples] == [1] * 4
    (note,) = chooser.notes
    assert note.startswith("rows that do not belong to one sample")
    assert note.endswith(": <b>")


@pytest.mark.parametrize("shape", [(), (1,), (300,), (70, 5), (0,), (1, 40, 40), (2, 3, 4, 5)])
def test_rows_of_every_shape_are_drawn(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.randn(4, *shape)
    values[0] = math.nan
    chooser = of_layers(tmp_path, values)
    assert [sample.name for sample in chooser.samples] == [f"val sample {n}" for n in range(4)]
    assert {len(sample.figures) for sample in chooser.samples} == {int(values.numel() > 0)}
    assert chooser.notes == []


def of_layers(
    folder: Path, by_sample: Tensor, of_firings: Mapping[str, Tensor] = MappingProxyType({})
) -> Any:
    """The samples of a layer with a row for each sample, and of others with one for each firing."""
    writer = CaptureWriter(folder)
    where = {"epoch": 0, "step": 0, "call": 0, "split": "val"}
    writer.add("h", "layer", by_sample, sample_ids=range(len(by_sample)), **where)
    for module, value in of_firings.items():
        writer.add("h", module, value, sample_ids=None, **where)
    writer.close()
    captures = stored_captures(folder)
    return sample_layers.sample_layers(captures, RunData(folder, status={}, captured=captures))
