"""samples.jsonl: the file, class, prediction and loss of each sample, and small pictures of some."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hookrun.cli import main
from hookrun.report import write_report
from hookrun.run.passes.batches import Batches
from hookrun.run.passes.sample_names import LARGEST, MOST_SIDE, picture_of

SEEN = "+hooks.seen={select: fc, hook: forward, action: capture}"
HOSTILE = "<b>a\n\x1b[31mred\x07.png"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of images of different sizes, one with a name that contains control characters or markup."""
    root = tmp_path / "images"
    for split, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for n in range(count):
                Image.new("RGB", (20 + 4 * n, 12), (90 * label, 0, 80 * n)).save(
                    root / split / name / f"{n}.png"
                )
    Image.new("RGB", (12, 30)).save(root / "val" / "dog" / HOSTILE)
    return root


def test_rows_have_their_file(executed: Any, folder: Path) -> None:
    found = executed(
        "model=mlp", "task=predict", "data=image_folder", f"data.root={folder}", "task.split=all",
        "data.transforms.resize.size=8", SEEN,
    )  # fmt: skip
    capture = found.captures["seen"]["fc"]
    assert capture.splits == ["train"] * 6 + ["val"] * 5
    assert capture.sample_ids.tolist() == [*range(6), *range(5)]
    assert capture.files[:3] == ["train/cat/0.png", "train/cat/1.png", "train/cat/2.png"]
    assert f"val/dog/{HOSTILE}" in capture.files
    assert capture.names == capture.files
    assert capture.class_names == ["cat"] * 3 + ["dog"] * 3 + ["cat"] * 2 + ["dog"] * 3
    assert found.predictions.files == capture.files
    lines = found.samples.lines
    predicted = ["cat" if best == 0 else "dog" for best in found.predictions[:].argmax(1).tolist()]
    assert [line["predicted_class"] for line in lines] == predicted
    assert found.labels_of(capture).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    page = write_report(found.path).read_text()
    assert "train/cat/0.png" in page
    assert "<b>a" not in page
    assert "\x1b" not in page
    assert "\x07" not in page
    assert "&lt;b&gt;a\\n\\x1b[31mred\\x07.png" in page
    assert set(found.predictions.splits) == {"train", "val"}
    found = executed("task=probe", f"task.run={found.path}")
    assert found.metrics[0]["samples"] == 11


SPLIT = ("model=mlp", "task=predict", "task.metrics=[accuracy]", SEEN)


def test_a_pass_over_every_split_equals_passes_over_each(shared: Any, ready: Any) -> None:
    whole = shared(*SPLIT, "task.split=all")
    prepared = ready(*SPLIT)
    capture = whole.captures["seen"]["fc"]
    batches = [batch for split in ("train", "val") for batch in Batches(prepared, split).epoch(0)]
    with torch.no_grad():
        outputs = torch.cat([prepared.model.eval()(batch.inputs) for batch in batches])
    labels = torch.cat([batch.target for batch in batches])
    assert torch.equal(capture[:], outputs)
    assert torch.equal(whole.labels_of(capture), labels)
    assert capture.names[0] == "train 0"
    assert capture.names[-1] == "val 358"
    assert capture.class_names[0] == str(int(labels[0]))
    [line] = whole.metrics
    assert line["split"] == "all"
    assert len(labels) == 1797
    assert line["accuracy"] == pytest.approx((outputs.argmax(1) == labels).double().mean().item())


def test_images_keep_their_proportions(ready: Any, folder: Path) -> None:
    Image.linear_gradient("L").resize((300, 600)).save(folder / "val/cat/0.png")
    prepared = ready("model=mlp", "task=predict", "data=image_folder", f"data.root={folder}")
    image = next(Batches(prepared, "val").epoch(0)).inputs[0]
    assert image.shape == (3, 224, 224)
    assert float(image.min()) > 0.2
    assert float(image.max()) < 0.8, "the middle of it"


def test_the_tree_of_modules_needs_no_data(capsys: Any) -> None:
    assert main(["task=modules", "model=resnet18", "data=image_folder"]) == 0
    printed = capsys.readouterr().out
    assert "layer1" in printed
    assert re.search("shapes unknown: .*data.root", printed)
    plan = ("task=plan", "model=resnet18", "data=image_folder")
    before = torch.get_rng_state()
    assert main([*plan, "+hooks.a={select: layer1, hook: forward, action: capture}"]) == 2
    said = capsys.readouterr()
    assert "shapes unchecked: data.root" in said.out
    assert "layer1" in said.out
    assert "data.root" in said.err
    assert torch.equal(torch.get_rng_state(), before)
    assert main([*plan, "train.optimizer.name=unknown"]) == 2
    said = capsys.readouterr()
    assert "data.root" in said.err
    assert "train.optimizer" in said.err
    assert "unchecked" not in said.out
    assert main(["task=modules", "model=mlp", "data=image_folder"]) == 2
    assert "data.root" in capsys.readouterr().err


def pixels(value: object) -> Tensor:
    """[H, W] or [H, W, 3], as an independent reader decodes the picture."""
    found = picture_of(value)
    assert found is not None
    return torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(found)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_the_smallest_value_is_black_in_every_dtype(dtype: torch.dtype) -> None:
    sample = torch.tensor([[4, 2, 6], [2, 4, 4]]).to(dtype)
    kept = sample.clone()
    expected = [[128, 0, 255], [0, 128, 128]]
    assert pixels(sample).tolist() == expected
    assert pixels(sample[None]).tolist() == expected
    assert torch.equal(sample, kept)


def test_colours_share_one_scale() -> None:
    sample = torch.zeros(3, 2, 5, requires_grad=True)
    with torch.no_grad():
        sample[0, 0, 1] = 1.0
        sample[2, 1, 4] = 2.0
    found = pixels(sample)
    assert found.shape == (2, 5, 3)
    assert found[0, 1].tolist() == [128, 0, 0]
    assert found[1, 4].tolist() == [0, 0, 255]


def test_what_is_not_finite_counts_as_0() -> None:
    sample = torch.tensor([[torch.nan, -1.0], [torch.inf, 1.0], [-torch.inf, 1.0]])
    assert pixels(sample).tolist() == [[128, 0], [128, 255], [128, 255]]
    assert pixels(torch.full((2, 2), 7.0)).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    "size, smaller",
    [((64, 2), (64, 2)), ((65, 130), (22, 44)), ((2, 9_999), (1, 64)), ((129, 129), (43, 43))],
)
def test_a_large_picture_is_averaged_also_at_its_edge(
    size: tuple[int, int], smaller: tuple[int, int]
) -> None:
    sample = torch.zeros(size)
    sample[-1, -1] = 1.0
    found = pixels(sample)
    assert found.shape == smaller
    assert max(smaller) <= MOST_SIDE
    assert found[-1, -1] == 255
    assert found.count_nonzero() == 1


def test_what_is_not_an_image_has_no_picture() -> None:
    others = [
        None, {"input_ids": torch.ones(4, 4)}, torch.ones(9), torch.ones(2, 4, 4), torch.ones(1, 3, 4, 4),
        torch.ones(1, 9), torch.ones(3, 9, 1), torch.ones(0, 4), torch.ones(4, 4, dtype=torch.complex64),
        torch.ones(1).expand(3, LARGEST, 1)[:, : LARGEST // 2].expand(3, LARGEST // 2, 2),
    ]  # fmt: skip
    assert [picture_of(each) for each in others] == [None] * len(others)
