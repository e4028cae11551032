"""Pictures of samples: what is an image becomes a small PNG from black to white, and nothing else does."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hookrun.tasks.loop.sample_pictures import LARGEST, MOST_SIDE, picture_of


def pixels(value: object) -> Tensor:
    """[H, W] or [H, W, 3], as an independent reader decodes the picture."""
    found = picture_of(value)
    assert found is not None
    return torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(found)))))


@pytest.mark.cases("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_the_smallest_value_is_black_and_the_largest_white_in_every_dtype(dtype: torch.dtype) -> None:
    sample = torch.tensor([[4, 2, 6], [2, 4, 4]]).to(dtype)
    kept = sample.clone()
    expected = [[128, 0, 255], [0, 128, 128]]
    assert pixels(sample).tolist() == expected and pixels(sample[None]).tolist() == expected
    assert torch.equal(sample, kept)


def test_colours_share_one_scale_and_keep_their_channels() -> None:
    sample = torch.zeros(3, 2, 5, requires_grad=True)
    with torch.no_grad():
        sample[0, 0, 1], sample[2, 1, 4] = 1.0, 2.0
    found = pixels(sample)
    assert found.shape == (2, 5, 3)
    assert found[0, 1].tolist() == [128, 0, 0] and found[1, 4].tolist() == [0, 0, 255]


def test_what_is_not_finite_counts_as_0_and_a_picture_of_one_value_is_black() -> None:
    sample = torch.tensor([[torch.nan, -1.0], [torch.inf, 1.0], [-torch.inf, 1.0]])
    assert pixels(sample).tolist() == [[128, 0], [128, 255], [128, 255]]
    assert pixels(torch.full((2, 2), 7.0)).tolist() == [[0, 0], [0, 0]]


@pytest.mark.cases(
    "size, smaller",
    [((64, 2), (64, 2)), ((65, 130), (22, 44)), ((2, 9_999), (1, 64)), ((129, 129), (43, 43))],
)
def test_a_large_picture_is_averaged_down_also_at_its_edge(
    size: tuple[int, int], smaller: tuple[int, int]
) -> None:
    sample = torch.zeros(size)
    sample[-1, -1] = 1.0
    found = pixels(sample)
    assert found.shape == smaller and max(smaller) <= MOST_SIDE
    assert found[-1, -1] == 255 and found.count_nonzero() == 1


def test_what_is_not_an_image_has_no_picture() -> None:
    others = [
        None, {"input_ids": torch.ones(4, 4)}, torch.ones(9), torch.ones(2, 4, 4), torch.ones(1, 3, 4, 4),
        torch.ones(1, 9), torch.ones(3, 9, 1), torch.ones(0, 4), torch.ones(4, 4, dtype=torch.complex64),
        torch.ones(1).expand(3, LARGEST, 1)[:, : LARGEST // 2].expand(3, LARGEST // 2, 2),
    ]  # fmt: skip
    assert [picture_of(each) for each in others] == [None] * len(others)
