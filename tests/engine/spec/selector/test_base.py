"""Any value gives a selector or a ValueError with the reason, in limited time and memory."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookrun.engine.spec.selector import Node, Selector, Tree, parse_selector


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    raw: Any = "fc"
    for _ in range(depth):
        raw = wrap(raw)
    return raw


def endless() -> list[Any]:
    raw: list[Any] = ["fc"]
    raw.append(raw)
    return raw


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("{a,b}" * 26, "more than 1,000 alternatives"),
        ("type:" + "{a,b}" * 26, "more than 1,000 alternatives"),
        ({"type": "{a,b}" * 26}, "type: found"),
        ("{" * 33 + "}" * 33, "braces are nested at most 32 deep"),
        ("{" * 5000 + "}" * 5000, "a text of 10,000 characters, expected at most 1,000"),
        ("a" * 1001, "a text of 1,001 characters"),
        ("re:" + "a" * 1000, "a text of 1,003 characters"),
        ({"type": "a" * 1001}, "type: found a text of 1,001 characters"),
        (nested(32, lambda raw: [raw]), "nested too deep: at most 32 levels"),
        (nested(5000, lambda raw: [raw]), "nested too deep"),
        (nested(5000, lambda raw: {"path": raw}), "nested too deep"),
        (nested(5000, lambda raw: {"exclude": [raw]}), "nested too deep"),
        (endless(), "nested too deep"),
        ("{a,**}.{a,*}.{a,**}.{a,*}.{a,**}.{a,*}.{a,**}.{a,*}" + ".**.a" * 160, "too large together"),
        (["a"] * 1000, "too large: at most 1,000 members"),
        ([["a"] * 500, ["b"] * 500], "too large"),
        (["{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}"] * 4, "too large"),
        ([f"*x{n}" for n in range(200)], "too large"),
        ([f"re:.*x{n}" for n in range(50)], "too large"),
        ({"type": ["Linear"] * 1000}, "too large"),
        pytest.param(10**5000, "a whole number of more than 18 digits", id="a large number"),
        ({"min_params": 10**5000}, "min_params: found a value of type int"),
        ({10**5000: 1}, "found the key a value of type int"),
        ({"leaf": [10**5000]}, "leaf: found"),
        (b"fc", "found b'fc', expected a path"),
        ({"fc"}, "found {'fc'}, expected a path"),
        ("\ud800", "not valid Unicode"),
        (float("nan"), "quote it"),
    ],
)
def test_too_long_too_deep_or_too_large_selectors_are_refused(raw: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_selector(raw)
    assert len(str(caught.value)) < 500


def test_selectors_just_within_the_limits_are_accepted() -> None:
    tree = Tree({"fc": Node("fc")})
    for raw in (
        "{" * 32 + "fc" + "}" * 32, nested(31, lambda raw: [raw]), ["fc"] * 999, "{" + "," * 989 + "fc}",
        "{fc,1,2,3,4,5,6,7,8,9}" + "{,1,2,3,4,5,6,7,8,9}" * 2, "re:" + "(?:" * 100 + "fc" + ")" * 100,
    ):  # fmt: skip
        assert parse_selector(raw).select(tree) == ["fc"]


ODD_NAMES = [
    "", "a", "a\nb", "\n", "a\x00b", "\x00", "x" * 300, "a/b", "a b", "é", "ß.é", "\U0001f600", "\ud800", "a*", "*",
    "{a,b}", "h[0]", "re:a", "type:a", "0", "0.1", "a.0", "a.\u0663", "-1", "a.b\n", "'", '"', "\\", "true", "~",
]  # fmt: skip
TREE = Tree(
    {name: Node(name, frozenset({"Odd", "m.Odd[int]"}), leaf=bool(name)) for name in ODD_NAMES},
    {"a": ("0", "\u0663"), "0": ("1",)},
    {"a b": "a"},
)
GOOD = (
    "layer4.0.conv1", "layer*.conv?", "**.attn", "{q,k,{v,w}}_proj", "h[0:4].mlp", "h[-1][::2].**",
    r"re:layer[1-4]\.\d+", "re:(?i)(a|b)*", "type:Conv2d", "type:{Linear,torch.nn.*}", "type:[CL]*",
)  # fmt: skip
TEXTS = st.one_of(
    st.builds(
        lambda text, at, length, written: text[:at] + written + text[at + length :],
        st.sampled_from(GOOD),
        st.integers(0, 20),
        st.integers(0, 3),
        st.text(alphabet="".join(GOOD) + "\n\x00é\U0001f600()[]{}*?\\,:|", max_size=4),
    ),
    st.text(max_size=12),
    st.text(alphabet="ab01.*?[]{}:,-() \\^$|+re:type\n\x00é", max_size=20),
    st.builds("re:{}".format, st.text(alphabet="ab.*+?()[]{}\\dwZz1-9,|^$:<>=!Pp ", max_size=16)),
    st.builds("type:{}".format, st.text(alphabet="ab.*?[]!-{},&|~ ", max_size=12)),
    st.sampled_from(ODD_NAMES),
)
SCALARS = st.one_of(
    TEXTS, st.none(), st.booleans(), st.integers(), st.integers(4999, 5000).map(lambda digits: 10**digits),
    st.floats(), st.binary(max_size=4), st.just(...),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from(["path", "type", "leaf", "exclude", "min_params"]), SCALARS)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


def read(raw: Any) -> Selector | None:
    try:
        return parse_selector(raw)
    except ValueError as error:
        assert str(error)
        return None


def use(selector: Selector) -> None:
    """All operations on a parsed selector."""
    found = selector.select(TREE)
    assert found == [name for name in TREE.nodes if name in set(found)]
    parameters = dataclasses.replace(TREE, modules=TREE)
    assert selector.paths(parameters) >= set(found)
    for _, place in selector.unmatched(parameters):
        assert place.startswith("member ")
    assert pickle.loads(pickle.dumps(selector)) == selector == copy.deepcopy(selector)
    assert parse_selector(selector) is selector
    assert isinstance(str(selector), str)


@given(JUNK)
def test_any_value_gives_a_selector_or_a_value_error(raw: Any) -> None:
    selector = read(raw)
    if selector is not None:
        use(selector)
