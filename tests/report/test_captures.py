"""Pictures of captured tensors, and that they show the captured numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hookrun.engine.collector import collector_paused
from hookrun.report.captures import BINS, idle_units, view_capture
from hookrun.report.facts import RunData
from hookrun.report.sampling import MOST_ROWS, draw, rows_of_samples, stored_captures
from hookrun.store.captures.read import StoredCapture
from hookrun.store.captures.write import CaptureWriter
from hookrun.store.records import ModelRecord, PlanRecord

MODULE = {"path": "layer", "names": ["layer"], "class": "Tanh", "parameters": 0}
VECTORS = ["distribution", "mean of 10 rows", "rows"]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("batch", "titles"),
    [
        pytest.param(random(10, 3, 6, 6), ["distribution", "activation maps"], id="pictures"),
        pytest.param(random(10, 2, 3, 6, 6), ["distribution", "slices"], id="volumes"),
        pytest.param(random(10, 6, 6), ["distribution", "maps"], id="attention"),
        pytest.param(random(10, 7), VECTORS, id="vectors"),
        pytest.param(random(10, 300), VECTORS, id="long vectors"),
        pytest.param(random(10), ["distribution", "value"], id="numbers"),
        pytest.param(random(10, 7).bfloat16(), VECTORS, id="bfloat16"),
        pytest.param(random(10, 7).to(torch.float8_e4m3fn), VECTORS, id="float8"),
        pytest.param(random(10, 7) > 0, VECTORS, id="booleans"),
        pytest.param(torch.arange(70).reshape(10, 7), VECTORS, id="integers"),
        pytest.param(torch.view_as_complex(random(10, 7, 2)), VECTORS, id="complex"),
        pytest.param(torch.zeros(10, 7), VECTORS, id="zeros"),
    ],
)
def test_each_shape_has_its_kind_of_picture(tmp_path: Path, batch: torch.Tensor, titles: list[str]) -> None:
    found = drawn(tmp_path, batch)
    assert [figure.title for figure in found.figures] == titles
    assert found.problem == ""


def test_gradients_of_a_parameter_are_firings(tmp_path: Path) -> None:
    found = drawn(tmp_path, *random(6, 4, 5), by_sample=False, hook="grad")
    assert [figure.title for figure in found.figures] == ["distribution", "maps", "distribution over steps"]
    steps, norms = found.norms
    assert steps == [0, 1, 2, 3, 4, 5]
    assert norms == pytest.approx(random(6, 4, 5).flatten(1).norm(dim=1).tolist())


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (torch.full((4, 3), math.nan), "none of its values is finite"),
        (torch.empty(4, 0), "it has no elements"),
    ],
)
def test_a_capture_that_cannot_be_drawn_has_a_reason(tmp_path, batch: torch.Tensor, problem: str) -> None:
    found = drawn(tmp_path, batch)
    assert found.problem == problem
    assert found.figures == []


def test_a_histogram_counts_what_is_not_finite(tmp_path: Path) -> None:
    batch = random(40, 50)
    batch[0, :7], batch[1, :3], batch[2:20] = math.nan, math.inf, 0.0
    [figure, *_] = drawn(tmp_path, batch).figures
    drawn_values = batch[batch.isfinite() & (batch != 0)]
    said = [int(count.replace(",", "")) for count in re.findall(r"to [^\"]*?\\n([\d,]+)", figure.picture)]
    assert said == np.histogram(drawn_values.double().numpy(), bins=BINS)[0].tolist()
    assert "10 of 2,000 values are not finite" in figure.note
    assert "45% are exactly 0 and not drawn" in figure.note


def test_attention_is_recognised(tmp_path: Path) -> None:
    heads = drawn(tmp_path / "heads", random(10, 4, 6, 6).softmax(-1)).figures[1]
    assert heads.title == "attention maps"
    assert "heads 0–3" in heads.picture
    assert drawn(tmp_path / "one", random(10, 6, 6).softmax(-1)).figures[1].title == "attention maps"
    assert drawn(tmp_path / "none", random(10, 4, 6, 6)).figures[1].title == "activation maps"


def test_the_mean_counts_zeros_that_are_not_drawn(tmp_path: Path) -> None:
    batch = random(50, 20).relu()
    [figure, *_] = drawn(tmp_path, batch).figures
    assert f"mean {float(batch.mean()):.4g}" in figure.note


def test_the_figures_of_a_histogram_are_of_all_rows(tmp_path: Path) -> None:
    values = random(3000, 4)
    values[1234, 2], values[77, 1] = 1e6, math.nan
    figure = view_capture(captured(tmp_path, values, shard_bytes=20_000), RunData(tmp_path, {})).figures[0]
    finite = values[values.isfinite()].double().numpy()
    assert f"mean {finite.mean():.4g}, std {finite.std():.4g}, min " in figure.note
    assert "max 1,000,000" in figure.note or "max 1e+06" in figure.note
    assert "12,000 values" in figure.note
    assert "1 of 12,000 values are not finite" in figure.note


# ---- idle units


def test_dead_or_saturated_units_are_named() -> None:
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).tanh()
    rows[:, 1] = 0
    rows[:, 3] = 0.25
    rows[:, 5] = 1
    rows[:39, 2] = 1
    found = {units["what"]: units["which"] for units in idle_units(rows, "Tanh")}
    assert found == {"dead": [1], "saturated": [2, 5], "constant": [3, 5]}
    assert "saturated" not in {units["what"] for units in idle_units(rows, "Linear")}


def test_the_units_of_pictures_are_channels() -> None:
    rows = torch.randn(10, 4, 3, 3, generator=torch.Generator().manual_seed(0)).relu()
    rows[:, 2] = 0
    [units] = idle_units(rows, "ReLU")
    del units["meaning"]
    assert units == {"what": "dead", "kind": "channel", "which": [2], "total": 4}


def test_a_few_rows_are_not_enough() -> None:
    assert idle_units(torch.zeros(3, 5), "ReLU") == []


# ---- rows of captures of any size, read with limited memory


def test_a_large_capture_is_drawn_from_all_shards(tmp_path: Path) -> None:
    batches = [torch.full((20, 4), float(step)) for step in range(100)]
    sample = draw(captured(tmp_path, *batches, shard_bytes=4_000))
    assert len(list(tmp_path.glob("*.safetensors"))) > 20
    assert 200 < len(sample.values) <= MOST_ROWS
    assert sample.values[0, 0] == 0
    assert sample.values[-1, 0] == 99
    assert torch.equal(sample.values[:, 0].long(), sample.source.steps)
    ids = sample.source.sample_ids.tolist()
    assert ids == sorted(ids)


def test_the_first_samples_of_the_last_epoch_known_ones_first(tmp_path: Path) -> None:
    """Samples 0 to 3 in two epochs, two in each step, a shard for each step; a row holds epoch, step and its sample."""
    writer = CaptureWriter(tmp_path)
    for step in range(4):
        ids = [2 * (step % 2) + 1, 2 * (step % 2)]
        epoch = step // 2
        rows = torch.tensor([[epoch, step, sample] for sample in ids], dtype=torch.float32)
        writer.add("h", "m", rows, sample_ids=ids, epoch=epoch, step=step, call=0, split="val")
        writer.flush()
    writer.close()
    (capture,) = stored_captures(tmp_path)
    found = list(rows_of_samples(capture, 3, {("val", 2)}, 10))
    assert [rows.name for rows in found] == ["val sample 2", "val sample 0", "val sample 1"]
    assert [rows.values.tolist() for rows in found] == [[[1, 3, 2]], [[1, 2, 0]], [[1, 2, 1]]]
    assert (found[0].source.epochs.item(), found[0].source.steps.item(), found[0].by_token) == (1, 3, False)


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="the system does not list a process's memory"
)
def test_a_shard_is_closed_when_its_rows_were_read(tmp_path: Path) -> None:
    capture = captured(tmp_path, *random(40, 8, 300), shard_bytes=10_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 20
    most = 0
    seen = 0
    with collector_paused():
        for part in capture.by_shard():
            seen += len(part[:])
            maps = Path("/proc/self/maps").read_text().splitlines()
            most = max(most, len({line.split()[-1] for line in maps if str(tmp_path) in line}))
    assert seen == len(capture) == 320
    assert 1 <= most <= 2


def test_captures_of_firings_have_no_samples(tmp_path: Path) -> None:
    of_firings = captured(tmp_path, random(2, 3), by_sample=False)
    assert list(rows_of_samples(of_firings, 3, set(), 10)) == []


def captured(
    folder: Path, *batches: torch.Tensor, by_sample: bool = True, shard_bytes: int = 2**20
) -> StoredCapture:
    """The capture of batches, or of firings."""
    writer = CaptureWriter(folder, shard_bytes=shard_bytes)
    first = 0
    for step, batch in enumerate(batches):
        ids = range(first, first + len(batch)) if by_sample else None
        writer.add("h", "layer", batch, sample_ids=ids, epoch=0, step=step, call=0)
        first += len(batch)
    writer.close()
    [capture] = stored_captures(folder)
    return capture


def drawn(folder: Path, *batches: torch.Tensor, by_sample: bool = True, hook: str = "forward") -> Any:
    facts = RunData(
        folder,
        status={},
        plan=PlanRecord.model_validate({"hooks": [{"name": "h", "hook": hook}]}),
        model=ModelRecord.model_validate({"modules": [MODULE]}),
    )
    return view_capture(captured(folder, *batches, by_sample=by_sample), facts)
