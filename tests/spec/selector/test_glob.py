"""Globs with indexes compared with a matcher that tries every parse of every path, and their worst-case cost."""

from __future__ import annotations

import random
import re
import time

import pytest

from hookrun.spec.selector import Node, Tree, parse_selector


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


def random_glob(chance: random.Random) -> list[str]:
    """Segments of a glob; an index is a segment of its own, written `[1]`."""
    kinds = ("**", "**", "*", "a", "b", "a", "?", "a*", "[0]", "[-1]", "[1:]", "[::2]", "[-2:]", "0", "1")
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


def test_indexes_may_be_satisfied_by_any_parse_of_a_path() -> None:
    paths = ("layers", "layers.0", "layers.0.layers", "layers.0.layers.1", "layers.0.layers.1.fc")
    tree = Tree({path: Node(path) for path in paths}, {"layers": ("0",), "layers.0.layers": ("1",)})
    assert parse_selector("**.layers[0].**").select(tree) == list(paths[1:])


def test_two_thousand_random_globs_match_as_an_independent_matcher() -> None:
    chance = random.Random(0)
    matched = 0
    for _ in range(2000):
        tree, segments = random_tree(chance), random_glob(chance)
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


NAMES = [f"blocks.{n}.{child}" for n in range(400) for child in ("attn", "mlp", "norm", "proj")]
LARGE = Tree({name: Node(name) for name in NAMES}, {"blocks": [str(n) for n in range(400)]})
LONG = Tree({name: Node(name) for name in (f"{'ab' * 150}{n}.x" for n in range(1500))})
DEEP = Tree({name: Node(name) for name in (".".join(["a"] * 60 + [f"{n}"]) for n in range(1500))})


@pytest.mark.cases(
    ("raw", "tree"),
    [
        ("**.*.**.*.**.*.**.*.**.*.nosuch", LARGE),
        ("**.*.**.*.**.*.**.*.**.*.nosuch", DEEP),
        (".".join(["**.a"] * 200), DEEP),
        ("*a" * 400 + "c", LONG),
        ("*a?" * 300 + "c", LONG),
        ("{a*,b*}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}", LONG),
        ("{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}.*", LONG),
        ("{a,**}.{a,*}.{a,**}.{a,*}.{a,**}.{a,*}.{a,**}.{a,*}.{a,**}" + ".a" * 400, DEEP),
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
