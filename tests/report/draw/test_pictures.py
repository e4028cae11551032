"""Maps have a pixel for each element, or for the mean of several."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hookrun.report.draw.pictures import mosaic, palette


def test_maps_have_a_pixel_for_each_element_and_one_scale(tmp_path: Path) -> None:
    tiles = np.zeros((2, 3, 4, 5), dtype=np.float32)
    tiles[1, 2, 3, 4] = 1
    figure = mosaic("maps", tiles, rows=["a", "b"], columns="")
    encoded = re.search(r"base64,([\w+/=]+)", figure.picture)
    assert encoded
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded[1]))))
    assert picture.shape == (2 * 5 - 1, 3 * 6 - 1)
    assert picture[-1, -1] == picture[picture != 255].max() == 254
    assert (picture[:4, :5] == 0).all() and (picture[4] == 255).all(), "a gap between tiles"


def test_large_maps_are_averaged() -> None:
    tile = torch.randn(1, 1, 130, 57).numpy()
    figure = mosaic("maps", tile, rows=["a"], columns="")
    encoded = re.search(r"base64,([\w+/=]+)", figure.picture)
    assert encoded
    assert Image.open(io.BytesIO(base64.b64decode(encoded[1]))).size == (29, 44)


@pytest.mark.parametrize(
    ("diverging", "colours"),
    [
        (False, [(68, 1, 84), (59, 81, 139), (33, 145, 140), (115, 208, 86), (253, 231, 37)]),
        (True, [(5, 48, 97), (104, 171, 208), (247, 246, 246), (218, 104, 83), (103, 0, 31)]),
    ],
)
def test_colours_are_those_of_matplotlib(diverging: bool, colours: list[tuple[int, int, int]]) -> None:
    """Its colours at 0, 63, 127, 200 and 254 of 254."""
    found = palette(diverging=diverging)[[0, 63, 127, 200, 254]].astype(int)
    assert np.abs(found - np.array(colours)).max() <= 1
