"""Paths and globs: exact names, wildcards, braces, Python indexes over numbered children, and their worst-case cost."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookrun.engine.spec.selector import Node, Tree, parse_selector

NAMES = (
    "", "conv1", "layer1", "layer1.0", "layer1.0.conv1", "layer1.1", "layer1.1.conv1", "layer2", "layer2.0",
    "layer2.0.conv1", "h", "h.0", "h.0.mlp", "h.1", "h.1.mlp", "h.10", "h.10.mlp", "h.2", "h.2.mlp",
    "attn", "attn.q_proj", "attn.k_proj", "attn.out", "fc", "3", "a*",
)  # fmt: skip
TREE = Tree(
    {name: Node(name) for name in NAMES}, {"h": ("0", "1", "10", "2"), "layer1": ("0", "1"), "layer2": ("0",)}
)


def selected(raw: Any) -> list[str]:
    return parse_selector(raw).select(TREE)


@pytest.mark.parametrize(
    ("raw", "paths"),
    [
        ("layer1.0.conv1", ["layer1.0.conv1"]),
        ("", [""]),
        ("layer*", ["layer1", "layer2"]),
        ("layer?.0", ["layer1.0", "layer2.0"]),
        ("*", ["conv1", "layer1", "layer2", "h", "attn", "fc", "3", "a*"]),
        ("a*", ["a*"]),  # an exact name comes before its meaning as a glob
        ("**", list(NAMES)),
        ("**.conv1", ["conv1", "layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1"]),
        ("layer1.**", ["layer1", "layer1.0", "layer1.0.conv1", "layer1.1", "layer1.1.conv1"]),
        ("layer1.**.conv1", ["layer1.0.conv1", "layer1.1.conv1"]),
        ("**.**.fc", ["fc"]),
        ("attn.{q,k}_proj", ["attn.q_proj", "attn.k_proj"]),
        ("{layer1.0,attn.{out,q_proj}}", ["layer1.0", "attn.q_proj", "attn.out"]),
        ("attn.{q_,}k_proj", ["attn.k_proj"]),
        ("h,fc", []),  # a comma outside of braces is text
        ("h[0]", ["h.0"]),
        ("h[-1]", ["h.2"]),  # the last child in the container's own order, whatever its name
        ("h[0:2].mlp", ["h.0.mlp", "h.1.mlp"]),
        ("h[::2]", ["h.0", "h.10"]),
        ("h[:].mlp", ["h.0.mlp", "h.1.mlp", "h.10.mlp", "h.2.mlp"]),
        ("h[99]", []),
        (3, ["3"]),
        ("**.h[1]", ["h.1"]),
        (r"re:layer[12]\.\d+", ["layer1.0", "layer1.1", "layer2.0"]),
        ("re:layer", []),  # always a full match
    ],
)
def test_a_path_finds_the_modules(raw: Any, paths: list[str]) -> None:
    assert selected(raw) == paths


@pytest.mark.parametrize(
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
        ("{q,k", "a { without its }"),
        ("q}", "a } without its {"),
    ],
)
def test_what_is_not_a_path_is_refused_with_the_reason(raw: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_selector(raw)


@given(st.integers(-4, 4), st.one_of(st.none(), st.integers(-4, 4)), st.integers(0, 5))
def test_slices_are_those_of_python(start: int, end: int | None, children: int) -> None:
    numbers = [str(number) for number in range(children)]
    tree = Tree({"h": Node("h")} | {f"h.{n}": Node(f"h.{n}") for n in numbers}, {"h": numbers})
    index = f"{start}:{'' if end is None else end}"
    assert parse_selector(f"h[{index}]").select(tree) == [f"h.{n}" for n in numbers[start:end]]
    one = numbers[start : start + 1 or None]
    assert parse_selector(f"h[{start}]").select(tree) == [f"h.{n}" for n in one]


def fits(segments: list[str], names: list[str], container: str, tree: Tree) -> bool:
    """Whether names below a container match segments: a slow and simple implementation."""
    if not segments:
        return not names
    first, *rest = segments
    if first == "**":
        return any(
            fits(rest, names[skip:], ".".join([*filter(None, [container]), *names[:skip]]), tree)
            for skip in range(len(names) + 1)
        )
    if not names:
        return False
    below = f"{container}.{names[0]}" if container else names[0]
    return name_fits(first, names[0], tree.numbered.get(container, ())) and fits(rest, names[1:], below, tree)


def name_fits(segment: str, name: str, numbered: tuple[str, ...]) -> bool:
    if segment.startswith("["):
        parts = [int(part) if part else None for part in segment[1:-1].split(":")]
        if len(parts) > 1:
            return name in numbered[slice(*parts)]
        return -len(numbered) <= parts[0] < len(numbered) and name == numbered[parts[0]]
    return re.fullmatch(segment.replace("*", ".*").replace("?", "."), name) is not None


INDEXES = ("[0]", "[-1]", "[1:]", "[::2]", "[-2:]")


def random_glob(chance: random.Random) -> list[str]:
    """Segments of a glob; an index is a segment of its own, written `[1]`."""
    kinds = [*("**", "**", "*", "a", "b", "a", "?", "a*", "*b", "?b", "a*?"), *INDEXES, "0", "1"]
    return [chance.choice(kinds) for _ in range(chance.randint(1, 6))]


def written(segments: list[str]) -> str:
    """The glob as a user writes it: `a`, `[0]` -> `a[0]`. An index after ** is between dots."""
    text = ""
    for number, segment in enumerate(segments):
        attached = segment.startswith("[") and number and segments[number - 1] != "**"
        text += segment if attached or not number else f".{segment}"
    return text


def random_tree(chance: random.Random) -> Tree:
    """Few names at many depths, so that a path has several parses."""
    paths = {""}
    for _ in range(chance.randint(1, 25)):
        parent = chance.choice(sorted(paths))
        name = chance.choice(("a", "b", "ab", "0", "1", "2"))
        paths.add(f"{parent}.{name}" if parent else name)
    order = sorted(paths)
    chance.shuffle(order)
    numbered: dict[str, tuple[str, ...]] = {}
    for path in order:
        container, _, last = path.rpartition(".")
        if last.isdecimal():
            numbered[container] = (*numbered.get(container, ()), last)
    return Tree({path: Node(path) for path in order}, numbered)


def test_random_globs_match_as_an_independent_matcher() -> None:
    chance = random.Random(0)
    matched = 0
    for _ in range(2000):
        tree = random_tree(chance)
        segments = random_glob(chance)
        expected = [path for path in tree.nodes if fits(segments, path.split(".") if path else [], "", tree)]
        assert parse_selector(written(segments)).select(tree) == expected, written(segments)
        matched += bool(expected)
    assert matched > 400, "the globs are too strange to test anything"


def test_alternatives_match_what_each_of_them_matches() -> None:
    chance = random.Random(1)
    for _ in range(500):
        tree = random_tree(chance)
        globs = [written(random_glob(chance)) for _ in range(3)]
        each = [set(parse_selector(glob).select(tree)) for glob in globs]
        assert set(parse_selector("{" + ",".join(globs) + "}").select(tree)) == set().union(*each)


BLOCKS = [f"blocks.{n}.{child}" for n in range(400) for child in ("attn", "mlp", "norm", "proj")]
LARGE = Tree({name: Node(name) for name in BLOCKS}, {"blocks": [str(n) for n in range(400)]})
LONG = Tree({name: Node(name) for name in (f"{'ab' * 150}{n}.x" for n in range(1500))})
DEEP = Tree({name: Node(name) for name in (".".join(["a"] * 60 + [f"{n}"]) for n in range(1500))})


@pytest.mark.parametrize(
    ("raw", "tree"),
    [
        ("**.*.**.*.**.*.**.*.**.*.nosuch", LARGE),
        ("**.*.**.*.**.*.**.*.**.*.nosuch", DEEP),
        (".".join(["**.a"] * 200), DEEP),
        ("*a" * 400 + "c", LONG),
        ("*a?" * 300 + "c", LONG),
        ("{a*,b*}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}", LONG),
        ("{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}.*", LONG),
        ("blocks[{" + ",".join(f"{n}:" for n in range(150)) + "}].*", LARGE),
        ([f"**.x{n}" for n in range(190)], LARGE),
        ([f"re:.*x{n}" for n in range(49)], LARGE),
        (r"re:(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)c", LONG),
        (r"re:(a|b|ab)*c", LONG),
        (r"re:.*[ab].{400}[ab].{400}.*", LONG),
    ],
)
def test_no_selector_takes_long(raw: str | list[str], tree: Tree) -> None:
    """A backtracking matcher takes hours for most of these; the bound is far above what a slow machine needs."""
    start = time.process_time()
    parse_selector(raw).select(tree)
    assert time.process_time() - start < 10
