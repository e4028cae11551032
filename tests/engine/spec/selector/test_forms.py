"""The forms of selectors beside paths: classes, lists and mappings. A form is one class in one file."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from reference import selectors

from hookrun.engine.spec import selector
from hookrun.engine.spec.selector import Names, Node, Tree, forms, parse_selector, select_schema

CONV = frozenset({"Conv2d", "torch.nn.modules.conv.Conv2d", "Module"})
LINEAR = frozenset({"Linear", "torch.nn.modules.linear.Linear", "Module"})
TREE = Tree(
    {
        "": Node("", frozenset({"Net"}), leaf=False, parameters=60),
        "conv": Node("conv", CONV, parameters=10),
        "h": Node("h", frozenset({"Block"}), leaf=False, parameters=40),
        "h.conv": Node("h.conv", CONV, parameters=30),
        "h.fc": Node("h.fc", LINEAR, parameters=10),
        "fc": Node("fc", LINEAR, parameters=10),
        "same": Node("same", LINEAR, parameters=10),
    },
    first={"same": "fc"},
)
PARAMETERS = Tree({name: Node(name) for name in ("w", "h.w", "h.fc.w", "h.fc.bias", "fc.w")}, modules=TREE)


@pytest.mark.parametrize(
    ("raw", "paths"),
    [
        ("type:Conv2d", ["conv", "h.conv"]),
        ("type:Module", ["conv", "h.conv", "h.fc", "fc", "same"]),  # a base
        ("type:torch.nn.modules.linear.*", ["h.fc", "fc", "same"]),
        ("type:{Block,Conv?d}", ["conv", "h", "h.conv"]),
        ("type:[B]lock", ["h"]),
        ("type:Lin", []),
        ("type:linear", []),
        ({"path": "h.**", "type": "Conv2d"}, ["h.conv"]),
        ({"type": ["Linear", "Conv2d"], "exclude": "h.**"}, ["conv", "fc", "same"]),
        ({"type": "type:Linear"}, ["h.fc", "fc", "same"]),
        ({"path": "*", "exclude": ["conv", "h"]}, ["fc", "same"]),
        ({"path": "*", "leaf": False}, ["h"]),
        ({"path": "*", "leaf": True}, ["conv", "fc", "same"]),
        ({"min_params": 40}, ["", "h"]),
        ({"path": "*", "exclude": "same"}, ["conv", "h"]),  # the same object as fc
        (["fc", "conv", "fc", "c*"], ["conv", "fc"]),  # once each, in the order of the model
        ([{"path": "fc"}, ["h"]], ["h", "fc"]),
    ],
)
def test_each_form_finds_its_modules_in_the_model_s_order(raw: Any, paths: list[str]) -> None:
    assert parse_selector(raw).select(TREE) == paths


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ("h", ["h.w", "h.fc.w", "h.fc.bias"]),
        ("h.w", ["h.w"]),
        ("**.bias", ["h.fc.bias"]),
        ("*", list(PARAMETERS.nodes)),
        ("", list(PARAMETERS.nodes)),
        ({"path": "**", "exclude": "h"}, ["w", "fc.w"]),
        ({"path": "**", "exclude": "**.bias"}, ["w", "h.w", "h.fc.w", "fc.w"]),
        (["fc", "**.bias"], ["fc.w", "h.fc.bias"]),
    ],
)
def test_a_module_selects_the_parameters_below_it(raw: Any, names: list[str]) -> None:
    assert parse_selector(raw).paths(PARAMETERS) == set(names)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("type:", "without a class name"),
        ("type: ", "without a class name"),
        ("type:{Linear,}", "without a class name"),
        ([], "the list is empty"),
        ({}, "the mapping is empty"),
        ({"typ": "Conv2d"}, "did you mean 'type'?"),
        ({"leaf": "yes"}, "leaf: found 'yes', expected true or false"),
        ({"min_params": -1}, "expected a whole number"),
        ({"min_params": True}, "expected a whole number"),
        ({"exclude": 1.5}, "exclude: found the number 1.5"),
        ({"type": []}, "expected a class name or a list of them"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(raw: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_selector(raw)


def test_the_text_of_a_mapping_reads_as_yaml() -> None:
    assert str(parse_selector({"path": ["a", "b"], "leaf": True})) == "{path: [a, b], leaf: true}"


def unmatched(raw: Any, tree: Tree = TREE) -> list[tuple[str, str]]:
    return [(str(member), place) for member, place in parse_selector(raw).unmatched(tree)]


def test_members_that_match_nothing_are_named_by_their_place() -> None:
    expected = [("x", "member 2 of member 2 of the list"), ("y", "member 3 of the list")]
    assert unmatched(["fc", ["conv", "x"], "y"]) == expected
    assert unmatched({"path": ["h.*", "x"], "exclude": ["y"]}) == [("x", "member 2 of `path`")]
    assert unmatched(["h", "fc.w", "conv"], PARAMETERS) == [("conv", "member 3 of the list")]


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        ("fcc", "did you mean 'fc'?"),
        ("**.weigth", "did you mean 'h.0.weight'?"),
        ("convolution", "there are: fc, h"),
        ("**.0.nosuch*", "there are: fc, h"),
        ("type:Linea", "did you mean 'Linear'?"),
        ("type:{Conv3d,Linear}", "did you mean 'Conv2d'?"),
        ("re:f", "there are: fc, h"),
        ({"path": "fcc", "leaf": True}, "did you mean 'fc'?"),
        ({"type": "Linea"}, "did you mean 'Linear'?"),
        ({"leaf": True}, "there are: fc, h"),
        (["fcc"], "did you mean 'fc'?"),
    ],
)
def test_each_form_suggests_near_matches(raw: object, hint: str) -> None:
    names = Names(("", "fc", "h", "h.0"), ("fc.bias", "h.0.weight"), ("Linear", "Conv2d", "Module"))
    assert parse_selector(raw).nearest(names) == hint


def test_a_model_without_submodules_suggests_its_parameters() -> None:
    assert parse_selector("nosuch").nearest(Names(("",), ("w",))) == "there are: w"


DEPTH_FORM = '''
"""A selector by depth: ``depth:2`` matches the paths of two names."""

from dataclasses import dataclass

from hookrun.errors import nearest
from hookrun.engine.spec.selector.base import Selector


@dataclass(frozen=True)
class DepthSelector(Selector):
    """Paths of so many names."""

    text: str
    depth: int

    rows = {"depth:2": "paths of two names"}
    prefix = "depth:"
    schema = {"type": "object", "required": ["depth"], "description": "depth:NUMBER"}

    @classmethod
    def parse(cls, raw, parser):
        return cls(raw, int(raw.removeprefix("depth:")))

    def find(self, tree):
        return [path for path in tree.nodes if len(path.split(".")) == self.depth]

    def nearest(self, names):
        return nearest(str(self.depth), {str(len(path.split("."))) for path in names.paths})
'''


@pytest.fixture
def depth_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of the forms with one more file."""
    (tmp_path / "depth.py").write_text(DEPTH_FORM, encoding="utf-8")
    monkeypatch.setattr(selector, "__path__", [*selector.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    forms.cache_clear()
    yield
    forms.cache_clear()
    sys.modules.pop("hookrun.engine.spec.selector.depth", None)
    vars(selector).pop("depth", None)


@pytest.mark.usefixtures("depth_form")
def test_a_new_form_is_one_file() -> None:
    tree = Tree({name: Node(name) for name in ("a", "a.b", "c", "c.d", "c.d.e")})
    assert parse_selector("depth:2").select(tree) == ["a.b", "c.d"]
    assert parse_selector([{"path": "depth:2", "exclude": "a.*"}, "a"]).select(tree) == ["a", "c.d"]
    assert "| `depth:2` | paths of two names |" in selectors()
    assert "depth:NUMBER" in select_schema()["description"]
    assert Draft202012Validator(select_schema()).is_valid({"depth": 2})
    assert parse_selector("depth:4").nearest(Names(list(tree.nodes))) == "there are: 1, 2, 3"


def test_the_schema_of_every_form_accepts_its_examples() -> None:
    names = [form.__name__.removesuffix("Selector") for form in forms()]
    assert names == ["Path", "Regex", "Class", "Point", "Union", "Mapping"]
    for form in forms():
        assert form.rows
        Draft202012Validator.check_schema(dict(form.schema))
