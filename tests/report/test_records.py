"""Records of hooks over steps, as curves and maps."""

from __future__ import annotations

import base64
import io
import math
import re

import numpy as np
from PIL import Image

from hookrun.report.records import over_steps


def test_the_map_of_a_deep_net_shows_every_layer_zeros_apart_and_names_the_outliers() -> None:
    points = {f"layers.{n}": ([0.0, 1.0], [10.0 ** (n - 205), 10.0 ** (n - 205)]) for n in range(206)}
    points["layers.3"] = ([0.0, 1.0], [0.0, 0.0])
    points["layers.4"] = ([0.0, 1.0], [1e-3, math.nan])
    points["layers.5"] = ([0.0, 1.0], [math.inf, 1e-3])
    [figure] = over_steps("gradient norm", points, "step", "norm", by_layer=True)
    encoded = re.search(r"base64,([\w+/=]+)", figure.picture)
    assert encoded
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded[1]))).convert("RGB")).astype(int)
    assert picture.shape[:2] == (206, 2)
    greys = len({tuple(pixel) for pixel in picture[6:, 0]})
    assert greys > 100, "a colour for each magnitude"
    assert len({tuple(picture[row, column]) for row, column in ((3, 0), (4, 1), (5, 0))}) == 3
    assert figure.scale and all(name in figure.scale for name in ("exactly 0", "NaN", "infinite"))
    said = "\n".join(figure.facts)
    assert "largest: layers.205 1 (step 0), layers.204 0.1 (step 0)" in said
    assert "exactly 0 throughout, 1 layer: layers.3" in said
    assert "NaN from step 1, 1 layer: layers.4" in said and "infinite from step 0, 1 layer: layers.5" in said
    many = {f"m{n}": ([0.0, 1.0], [1.0, float(n == 998)]) for n in range(999)}
    [figure] = over_steps("gradient norm", many, "step", "norm", by_layer=True)
    assert "a row is the largest of 3 layers" in figure.note and "--rows:333;" in figure.picture
    assert "m0 … m2" in figure.picture and "m990 … m992" in figure.picture, "names where there is room"
