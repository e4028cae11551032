"""JSON that any reader accepts, with a text for NaN and infinity."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookrun.store.format import decode, encode

numbers = st.floats() | st.integers()
words = st.sampled_from(["NaN", "Infinity", "-Infinity", "\\NaN", "\\\\-Infinity", "nan"])
texts = st.text() | words
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is not JSON")


@given(values)
def test_every_value_is_read_back_equal(value: object) -> None:
    assert repr(decode(encode(value).encode())) == repr(value)  # by repr: NaN is not equal to itself


@given(values)
def test_every_line_is_strict_json_in_ascii(value: object) -> None:
    text = encode(value)
    assert text.isascii() and "\n" not in text
    json.loads(text, parse_constant=refuse)


def test_nan_and_infinity_are_written_as_text() -> None:
    assert encode({"loss": math.nan}) == '{"loss": "NaN"}'
    assert math.isnan(decode(b'{"loss": "NaN"}')["loss"])


def test_a_module_called_nan_stays_a_text() -> None:
    assert decode(encode({"module": "NaN", "mean": math.inf}).encode()) == {"module": "NaN", "mean": math.inf}


def test_numbers_of_torch_and_numpy_and_paths_are_accepted() -> None:
    found = {"loss": torch.tensor(0.5), "bad": torch.tensor(math.nan), "n": np.int64(3), "at": Path("a/b")}
    assert encode(found) == '{"loss": 0.5, "bad": "NaN", "n": 3, "at": "a/b"}'


@pytest.mark.parametrize("value", [{"x": object()}, {"x": torch.zeros(2)}, {(1, 2): 0}, {"x": {1, 2}}])
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"in JSON|as JSON"):
        encode(value)
