"""Pictures of attention patterns: what is drawn, and the text beside it."""

from __future__ import annotations

import re

import numpy as np

from hookrun.report.draw.attention import MOST_CELLS, Query, head_picture, is_causal, strongest

CAUSAL = np.array([[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.1, 0.4]], dtype=np.float32)


def test_a_pattern_is_causal_if_no_query_attends_to_a_later_key() -> None:
    assert is_causal(CAUSAL)
    assert not is_causal(CAUSAL.T.copy()) and not is_causal(CAUSAL[:2]) and not is_causal(CAUSAL[:1, :1])


def test_the_largest_weight_ignores_the_first_query_which_has_one_key_only() -> None:
    queries = [Query(name, place) for place, name in enumerate("abc")]
    assert strongest(CAUSAL, queries, "abc") == "“b” at 1 to “b” at 1: 0.75"
    assert strongest(CAUSAL[:1], queries[:1], "abc") == "“a” at 0 to “a” at 0: 1"
    gaps = np.full((1, 3), np.nan, dtype=np.float32)
    gaps[0, 2] = 0.5
    assert strongest(gaps, queries[1:2], "abc").endswith("“c” at 2: 0.5")


def test_names_are_escaped_and_a_large_pattern_is_drawn_in_blocks() -> None:
    names = ["<b>", "\u202e", "x" * 40]
    figure, _ = head_picture("head 0", CAUSAL, rows=names, columns=names, says='says "it"')
    texts = re.findall(r"<text[^>]*>(.*?)</text>", figure.picture)
    assert texts == ["&lt;b&gt;", r"\u202e", "x" * 9 + "…"] * 2
    assert 'aria-label="head 0: says &#34;it&#34;"' in figure.picture and figure.note == ""
    large = np.zeros((2 * MOST_CELLS, 2 * MOST_CELLS), dtype=np.float32)
    figure, _ = head_picture("t", large, rows=["r"] * 128, columns=["c"] * 128, says="")
    assert figure.note == "each pixel is the largest of 2 × 2 tokens"
