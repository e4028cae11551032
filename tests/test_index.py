"""An index selects what NumPy selects, and is never evaluated."""

from __future__ import annotations

import numpy as np
import pytest

from hookrun.values.index import MAX_LENGTH, parse_index

ARRAY = np.arange(2 * 3 * 4).reshape(2, 3, 4)


def test_it_selects_what_numpy_selects_and_keeps_its_text() -> None:
    for text in ("..., 0:2", ":, 1", "-1", "[0, ::2]", "..., [0, 3]", "1, ..., -1", ":, 1:, ::3", "[0, 1]"):
        index = parse_index(text)
        inner = text[1:-1] if text.startswith("[0, :") else text
        assert np.array_equal(ARRAY[index.items], ARRAY[eval(f"np.s_[{inner}]")]), text
        assert np.array_equal(ARRAY[parse_index(str(index)).items], ARRAY[index.items]), text


def test_anything_else_is_refused() -> None:
    wrong = (
        "",
        "a",
        "..., ...",
        "::-1",
        "[1, 5",
        "0]",
        "1.5",
        "1e3",
        "9" * 30,
        "None",
        "f()",
        "0," * MAX_LENGTH,
    )
    for raw in (*wrong, None, 1.5, True):
        with pytest.raises(ValueError):
            parse_index(raw)
            pytest.fail(repr(raw))
