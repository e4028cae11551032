"""Alternatives in braces: all texts that they expand to, in the written order."""

from __future__ import annotations

import pytest

from hookrun.spec.selector.base import MAX_DEPTH
from hookrun.spec.selector.braces import alternatives


@pytest.mark.cases(
    ("text", "found"),
    [
        ("{q,k,v}_proj", ["q_proj", "k_proj", "v_proj"]),
        ("a{b,{c,d}e}f", ["abf", "acef", "adef"]),
        ("{a,b}{c,d}", ["ac", "ad", "bc", "bd"]),
        ("{a,}b", ["ab", "b"]),
        ("{}", [""]),
        ("a,b", ["a,b"]),  # a comma outside of braces is text
    ],
)
def test_every_alternative_is_expanded(text: str, found: list[str]) -> None:
    assert alternatives(text) == found


def test_numbers_up_to_the_limits_are_accepted() -> None:
    assert len(alternatives("{0,1,2,3,4,5,6,7,8,9}" * 3)) == 1000
    with pytest.raises(ValueError, match="more than 1,000 alternatives"):
        alternatives("{0,1,2,3,4,5,6,7,8,9}" * 3 + "{a,b}")
    assert alternatives("{" * MAX_DEPTH + "}" * MAX_DEPTH) == [""]
    with pytest.raises(ValueError, match="at most 32 deep"):
        alternatives("{" * (MAX_DEPTH + 1) + "}" * (MAX_DEPTH + 1))


def test_an_unmatched_brace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a \{ without its \}"):
        alternatives("{q,k")
    with pytest.raises(ValueError, match=r"a \} without its \{"):
        alternatives("q}")
