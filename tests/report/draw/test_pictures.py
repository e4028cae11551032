"""Maps have a pixel for each element, or for the mean of several."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from hookrun.report.draw.pictures import mosaic


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
