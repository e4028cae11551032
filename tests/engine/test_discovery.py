"""A registry's classes are found by importing its modules, and their names without an import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from hookrun.engine.discovery import Registry, names_in, own_subclasses

BASE = "class Base:\n    pass\n"
TWO = "from found_package.base import Base\nclass Two(Base):\n    name = 'two'\nclass Inherits(Two):\n    pass\n"
OWN = 'from found_package.two import Two\nclass Own(Two):\n    name = "own"\nclass Other:\n    name = 3\n'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "found_package"
    folder.mkdir()
    for name, text in (("__init__", ""), ("base", BASE), ("two", TWO.replace("'", '"')), ("own", OWN)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("found_package")
    for name in [name for name in sys.modules if name.partition(".")[0] == "found_package"]:
        del sys.modules[name]


def test_each_class_with_its_own_name_is_found_once(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_in("found_package", "name") == ["own", "two"]
    assert "found_package.two" not in sys.modules, "the names are read off the text"
    base = importlib.import_module("found_package.base").Base
    registry = Registry(package, base, "name")
    assert registry["two"].__name__ == "Two"
    assert "found_package.own" not in sys.modules, "one module is imported"
    assert registry.get("base") is registry.get("three") is None
    assert {name: kind.__name__ for name, kind in registry.items()} == {"own": "Own", "two": "Two"}
    assert list(registry) == ["own", "two"]
    assert len(registry) == 2
    own = [kind.__name__ for kind in own_subclasses(package, base)]
    assert own == ["Base", "Own", "Two", "Inherits"], "where they are defined, not where they are imported"
    monkeypatch.setattr("pkgutil.iter_modules", None)
    assert registry["two"].__name__ == "Two", "looked up once"


def test_a_class_in_a_module_of_another_name_is_found_too(package: Any, tmp_path: Path) -> None:
    (tmp_path / "found_package" / "both.py").write_text(TWO.replace("two", "three").replace("Two", "Three"))
    registry = Registry(package, importlib.import_module("found_package.base").Base, "name")
    assert registry["three"].__name__ == "Three"
    assert list(registry) == ["own", "three", "two"]
    assert registry.get(None) is None  # type: ignore[call-overload]
