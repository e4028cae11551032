"""A selector form is one class in one file, with its parser, JSON schema, rows of the reference table and hints."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from reference import selectors

from hookrun import schema
from hookrun.spec import selector
from hookrun.spec.selector import Names, Node, Tree, forms, parse_selector, select_schema

DEPTH_FORM = '''
"""A selector by depth: ``depth:2`` matches the paths of two names."""

from dataclasses import dataclass

from hookrun.errors import nearest
from hookrun.spec.selector.base import Selector


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
TREE = Tree({name: Node(name) for name in ("a", "a.b", "c", "c.d", "c.d.e")})


@pytest.fixture
def depth_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of the forms with one more file."""
    (tmp_path / "depth.py").write_text(DEPTH_FORM, encoding="utf-8")
    monkeypatch.setattr(selector, "__path__", [*selector.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    forms.cache_clear()
    yield
    forms.cache_clear()
    sys.modules.pop("hookrun.spec.selector.depth", None)
    vars(selector).pop("depth", None)


@pytest.mark.usefixtures("depth_form")
def test_a_new_form_is_one_file() -> None:
    assert parse_selector("depth:2").select(TREE) == ["a.b", "c.d"]
    assert parse_selector([{"path": "depth:2", "exclude": "a.*"}, "a"]).select(TREE) == ["a", "c.d"]
    assert "| `depth:2` | paths of two names |" in selectors()
    assert "depth:NUMBER" in select_schema()["description"]
    hook = {"select": {"depth": 2}, "hook": "forward", "action": "capture"}
    assert Draft202012Validator(schema.experiment_schema()).is_valid({"hooks": {"h": hook}})
    assert parse_selector("depth:4").nearest(Names(list(TREE.nodes))) == "there are: 1, 2, 3"


def test_without_that_file_the_same_text_is_a_path() -> None:
    assert parse_selector("depth:2").select(TREE) == []


def test_every_form_has_table_rows_and_a_schema_that_accepts_its_examples() -> None:
    assert [form.__name__ for form in forms()] == [
        "PathSelector",
        "RegexSelector",
        "ClassSelector",
        "UnionSelector",
        "MappingSelector",
    ]
    for form in forms():
        assert form.rows
        Draft202012Validator.check_schema(dict(form.schema))


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
