"""Paths and globs: exact names, wildcards, Python indexes over numbered children."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookrun.spec.selector import Node, Tree, parse_selector

NAMES = (
    "", "conv1", "layer1", "layer1.0", "layer1.0.conv1", "layer1.1", "layer1.1.conv1", "layer2", "layer2.0",
    "layer2.0.conv1", "h", "h.0", "h.0.mlp", "h.1", "h.1.mlp", "h.10", "h.10.mlp", "h.2", "h.2.mlp",
    "attn", "attn.q_proj", "attn.k_proj", "attn.out", "fc",
)  # fmt: skip
TREE = Tree(
    {name: Node(name) for name in NAMES},
    {"h": ("0", "1", "10", "2"), "layer1": ("0", "1"), "layer2": ("0",)},
)


def selected(raw: Any) -> list[str]:
    return parse_selector(raw).select(TREE)


@pytest.mark.cases(
    ("raw", "paths"),
    [
        ("layer1.0.conv1", ["layer1.0.conv1"]),
        ("", [""]),
        ("layer*", ["layer1", "layer2"]),
        ("layer?.0", ["layer1.0", "layer2.0"]),
        ("*", ["conv1", "layer1", "layer2", "h", "attn", "fc"]),
        ("**", list(NAMES)),
        ("**.conv1", ["conv1", "layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1"]),
        ("layer1.**", ["layer1", "layer1.0", "layer1.0.conv1", "layer1.1", "layer1.1.conv1"]),
        ("layer1.**.conv1", ["layer1.0.conv1", "layer1.1.conv1"]),
        ("**.**.fc", ["fc"]),
        ("attn.{q,k}_proj", ["attn.q_proj", "attn.k_proj"]),
        ("{layer1.0,attn.{out,q_proj}}", ["layer1.0", "attn.q_proj", "attn.out"]),
        ("h[0]", ["h.0"]),
        ("h[-1]", ["h.2"]),  # the last child in the container's own order, whatever its name
        ("h[0:2].mlp", ["h.0.mlp", "h.1.mlp"]),
        ("h[::2]", ["h.0", "h.10"]),
        ("h[:].mlp", ["h.0.mlp", "h.1.mlp", "h.10.mlp", "h.2.mlp"]),
        ("h[99]", []),
        ("**.h[1]", ["h.1"]),
        (r"re:layer[12]\.\d+", ["layer1.0", "layer1.1", "layer2.0"]),
        ("re:layer", []),  # always a full match
    ],
)
def test_a_path_finds_the_modules(raw: Any, paths: list[str]) -> None:
    assert selected(raw) == paths


def test_an_exact_name_comes_before_its_meaning_as_a_glob() -> None:
    tree = Tree({name: Node(name) for name in ("a*", "ab")})
    assert parse_selector("a*").select(tree) == ["a*"]


def test_an_unquoted_integer_is_a_path() -> None:
    assert parse_selector(3).select(Tree({"3": Node("3")})) == ["3"]


@pytest.mark.cases(
    ("raw", "reason"),
    [
        (1.1, "quote it"),
        (True, "quote a name that is a YAML word"),
        (None, "expected a path"),
        ("re:layer[", "not a regular expression"),
        ("h[a]", "an index is a whole number or a slice"),
        ("h[", "an index is written"),
        ("h[::0]", "the step of a slice is not 0"),
        ("a..b", "a name between two dots is empty"),
        ("a**", "** stands alone between dots"),
    ],
)
def test_what_is_not_a_path_is_refused_with_the_reason(raw: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_selector(raw)


SEGMENT = st.text(alphabet="ab*?", min_size=1, max_size=3).filter(lambda text: "**" not in text)
GLOB = st.lists(st.one_of(SEGMENT, st.just("**")), min_size=1, max_size=4)
PATH = st.lists(st.text(alphabet="ab", min_size=1, max_size=2), max_size=4)


def fits(glob: list[str], path: list[str]) -> bool:
    """The meaning of a glob: a slow and simple implementation."""
    if not glob:
        return not path
    if glob[0] == "**":
        return any(fits(glob[1:], path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and name_fits(glob[0], path[0]) and fits(glob[1:], path[1:])


def name_fits(glob: str, name: str) -> bool:
    if not glob:
        return not name
    if glob[0] == "*":
        return name_fits(glob[1:], name) or (bool(name) and name_fits(glob, name[1:]))
    return bool(name) and glob[0] in ("?", name[0]) and name_fits(glob[1:], name[1:])


@given(GLOB, st.lists(PATH, max_size=8))
def test_globs_match_as_a_simple_implementation(glob: list[str], paths: list[list[str]]) -> None:
    names = list(dict.fromkeys(".".join(path) for path in paths))
    found = parse_selector(".".join(glob)).select(Tree({name: Node(name) for name in names}))
    assert found == [name for name in names if fits(glob, name.split(".") if name else [])]


@given(st.integers(-4, 4), st.one_of(st.none(), st.integers(-4, 4)), st.integers(0, 5))
def test_indexes_and_slices_are_those_of_python(start: int, end: int | None, children: int) -> None:
    numbers = [str(number) for number in range(children)]
    tree = Tree({"h": Node("h")} | {f"h.{n}": Node(f"h.{n}") for n in numbers}, {"h": numbers})
    index = f"{start}:{'' if end is None else end}"
    assert parse_selector(f"h[{index}]").select(tree) == [f"h.{n}" for n in numbers[start:end]]
    one = numbers[start : start + 1 or None]
    assert parse_selector(f"h[{start}]").select(tree) == [f"h.{n}" for n in one]
