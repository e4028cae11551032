"""The colours of maps, as data: viridis for values of one sign, red and blue for values around zero."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

LEVELS = 255
"""Colours of a palette. A pixel is one byte, so one value is left for a pixel without a colour."""

_VIRIDIS = """
440154 46085c 471063 481769 481d6f 482475 472a7a 46307e 453781 433d84 414287 3f4889 3d4e8a 3a538b 38598c 355e8d
33638d 31688e 2e6d8e 2c718e 2a768e 297b8e 27808e 25848e 23898e 218e8d 20928c 1f978b 1e9c89 1fa188 21a585 24aa83
28ae80 2eb37c 35b779 3dbc74 46c06f 50c46a 5ac864 65cb5e 70cf57 7cd250 89d548 95d840 a2da37 b0dd2f bddf26 cae11f
d8e219 e5e419 f1e51d fde725
"""
"""Every fifth of viridis' 256 colours, by Nathaniel Smith and Stéfan van der Walt (CC0)."""

_RED_BLUE = "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f"
"""RdBu with 11 colours, reversed, by Cynthia Brewer (colorbrewer2.org, Apache-2.0)."""


@cache
def palette(*, diverging: bool) -> NDArray[np.uint8]:
    """`LEVELS` colours [LEVELS, 3] as red, green and blue from 0 to 255, from the smallest value to the largest.

    As matplotlib computes `viridis` and `RdBu_r`: a table of 256 colours, interpolated linearly between the given
    ones. `RdBu_r` is the same to the last bit, `viridis` within 1 of 255.
    """
    text = _RED_BLUE if diverging else _VIRIDIS
    anchors = np.array([list(bytes.fromhex(colour)) for colour in text.split()])
    places = np.linspace(0, 1, len(anchors))
    entries = np.minimum(np.linspace(0, 1, LEVELS) * 256, 255).astype(int) / 255
    channels = [np.interp(entries, places, channel) for channel in anchors.T]
    return np.stack(channels, axis=1).round().astype(np.uint8)
