"""Regular expressions run in RE2: linear time, always a full match, and errors for what RE2 does not support."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookrun.engine.spec.selector import Node, Tree, parse_selector


def tree(*names: str) -> Tree:
    return Tree({name: Node(name) for name in names})


OF_OTHERS = ("a(?=b)", "a(?!b)", "(?<=a)b", "(?<!a)b", r"(a)\1", "(?P<n>a)(?P=n)", "(a)?(?(1)b|c)")
"""Lookaround and backreferences."""


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        *(
            (each, r"RE2: .*lookaround and backreferences are not supported: .*`exclude`")
            for each in OF_OTHERS
        ),
        (r"fc\Z", r"RE2: .*leave \\Z out"),
        *(
            (each, "RE2")
            for each in ("a)(b", "a{1001}", r"(\pL{1,30}\pN?.?){20}", "(?x) a", "((a{99}){99}){99}")
        ),
    ],
)
def test_expressions_beyond_re2_are_refused_silently(pattern: str, said: str, capfd) -> None:
    with pytest.raises(ValueError, match=f"not a regular expression of {said}"):
        parse_selector(f"re:{pattern}")
    assert capfd.readouterr() == ("", "")


def test_matching_prints_nothing_where_memory_runs_out(capfd) -> None:
    names = tree(*("ab" * 300 + f"{n}" for n in range(50)))
    assert parse_selector("re:" + ".*a.{200}[ab].*" * 5).select(names) == []
    assert capfd.readouterr() == ("", "")


def test_a_dot_matches_every_character_of_a_name() -> None:
    names = ("a\nb", "a\x00b", "aéb", "a\ud800b", "a\U0001f600b")
    assert parse_selector("re:a.b").select(tree(*names)) == list(names)


def test_character_classes_are_ascii() -> None:
    names = tree("fc1", "größe", "größe\u0663")
    assert parse_selector(r"re:\w+").select(names) == ["fc1"]
    assert parse_selector(r"re:[\pL\pN]+").select(names) == list(names.nodes)


NAME = st.text(alphabet="ab1.é\n", max_size=6)
PIECE = st.sampled_from(
    ["a", "b", "1", r"\.", ".", "é", r"[ab]", r"[^a]", r"\d", "(?i:A)", r"a|b", "", "^", r"\b"]
)
PATTERN = st.recursive(
    PIECE,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        inner.map("(?:{})*".format),
        inner.map("({})?".format),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
    ),
    max_leaves=6,
)


@given(PATTERN, st.lists(NAME, max_size=8, unique=True))
def test_the_names_found_are_those_that_pythons_re_finds(pattern: str, names: list[str]) -> None:
    expression = re.compile(pattern, re.DOTALL | re.ASCII)
    expected = [name for name in names if expression.fullmatch(name)]
    assert parse_selector(f"re:{pattern}").select(tree(*names)) == expected
