"""`target` and `index` are parsed, never evaluated."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookrun.engine.values.index import parse_index, parse_target, path_text


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("[0]", (0,)),
        ("logits", ("logits",)),
        ("[0].logits", (0, "logits")),
        ("hidden_states[-1]", ("hidden_states", -1)),
        ("['a key'][1]", ("a key", 1)),
        ('["a.b"].c', ("a.b", "c")),
        ("a.b.c", ("a", "b", "c")),
        (0, (0,)),
    ],
)
def test_targets(text: Any, keys: tuple[int | str, ...]) -> None:
    assert parse_target(text).keys == keys


@pytest.mark.parametrize(
    "text", [" ", ".a", "a b", "[x]", "a[", "[1:2]", "f()", "['a]", "[0]logits", "", 1.5, True, None, [0]]
)
def test_invalid_paths_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="found") as refused:
        parse_target(text)
    assert isinstance(text, str) or "in quotes" in str(refused.value), "YAML reads an unquoted [0] as a list"


KEYS = st.lists(
    st.one_of(st.integers(-5, 5), st.text(alphabet="ab _1.", min_size=1, max_size=4)), min_size=1, max_size=4
)


@given(KEYS)
def test_the_text_of_a_path_parses_back(keys: list[int | str]) -> None:
    assert parse_target(path_text(tuple(keys))).keys == tuple(keys)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("..., 0:8", (..., slice(0, 8))),
        (":, 3", (slice(None), 3)),
        ("-1", (-1,)),
        (-1, (-1,)),
        ("[0, ::2]", (0, slice(None, None, 2))),
        ("::1", (slice(None),)),
        ("1:", (slice(1, None),)),
        ("..., [1, 5, 6]", (..., (1, 5, 6))),
        ("[0, -1]", ((0, -1),)),
        (":,[2],0:4", (slice(None), (2,), slice(0, 4))),
        ("[..., [3, 1]]", (..., (3, 1))),
    ],
)
def test_indexes(text: Any, items: tuple[Any, ...]) -> None:
    assert parse_index(text).items == items


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected NumPy notation"),
        (1.5, "expected NumPy notation"),
        ("a", "expected a whole number, a slice like 0:8, or ..."),
        ("0,,1", "expected a whole number"),
        ("..., ...", "one ... at most"),
        ("::-1", "positive steps only"),
        ("::0", "positive steps only"),
        ("[1, 2], [0, 1]", "one list at most"),
        ("[1, 2, 1]", "it holds 1 twice"),
        ("..., [1:3]", "expected a list of whole numbers"),
        ("..., []", "expected a list of whole numbers"),
        ("..., [1, 2", "cannot be read"),
        ("[[1, 2]]]", "cannot be read"),
        ([1, 5], "expected NumPy notation in quotes, like '..., [1, 5, 6]'"),
        ("..., [" + "1" * 40 + "]", "expected a list of whole numbers"),
        ("0," * 9_000, "expected at most 16,000"),
        ("__import__('os')", "expected a whole number"),
        *((text, "expected a whole number") for text in ("1.5", "1e3", "None", "f()", "9" * 30)),
        ("0]", "cannot be read"),
        *((raw, "expected NumPy notation") for raw in (None, True)),
    ],
)
def test_invalid_indexes_are_refused(text: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_index(text)


ARRAY = np.arange(2 * 3 * 4).reshape(2, 3, 4)


def test_an_index_selects_what_numpy_selects() -> None:
    for text in ("..., 0:2", ":, 1", "-1", "[0, ::2]", "..., [0, 3]", "1, ..., -1", ":, 1:, ::3", "[0, 1]"):
        index = parse_index(text)
        inner = text[1:-1] if text.startswith("[0, :") else text
        assert np.array_equal(ARRAY[index.items], ARRAY[eval(f"np.s_[{inner}]")]), text
        assert np.array_equal(ARRAY[parse_index(str(index)).items], ARRAY[index.items]), text
