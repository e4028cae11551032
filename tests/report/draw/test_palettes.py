"""The colours of maps."""

from __future__ import annotations

import numpy as np
import pytest

from hookrun.report.draw.palettes import palette


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
