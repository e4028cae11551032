"""A user's own factory runs only if the user trusts its package; nothing of it is imported before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from hookrun.errors import Problem, SpecError
from hookrun.models import build
from hookrun.models.settings import Model

PACKAGE = "hookrun_test_pkg"
TRUSTED = frozenset({PACKAGE})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory that contains the package and is not on `sys.path`, as with the console script."""
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text(SOURCE, encoding="utf-8")
    (package / "broken.py").write_text("def build(:\n", encoding="utf-8")
    (package / "needy.py").write_text("import hookrun_test_not_there\n", encoding="utf-8")
    (package / "failing.py").write_text("\n\nraise KeyError('wanted')\n", encoding="utf-8")
    (tmp_path / "hookrun_test_sibling.py").write_text("SIZE = 4\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.delenv("HOOKRUN_TRUST", raising=False)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("hookrun_test_")]:
        del sys.modules[name]


# --- trust


@pytest.mark.parametrize("trust", [frozenset(), frozenset({f"{PACKAGE}.models"})], ids=sorted)
def test_an_untrusted_package_is_never_imported(folder: Path, trust: frozenset[str]) -> None:
    found = problem("models:build", trust)
    assert not imported()
    assert found.where == "model.factory"
    assert f"'{PACKAGE}' is not trusted" in found.what
    for way in (f"+trust=[{PACKAGE}]", f"HOOKRUN_TRUST={PACKAGE}", "hookrun.models"):
        assert way in found.hint


# --- where it is looked for


def test_only_the_factory_sees_the_current_directory(folder: Path) -> None:
    before = list(sys.path)
    assert isinstance(model("models:build_later"), nn.Linear)
    assert sys.path == before


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("model:build", "did you mean 'models'?"),
        ("models:getcwd", "comes from 'posix', and only"),
        ("models:not_ours", "is module, neither a function nor a class"),
        ("broken:build", "SyntaxError"),
        ("needy:build", "ModuleNotFoundError: No module named 'hookrun_test_not_there'"),
        ("failing:build", "KeyError: 'wanted'"),
        ("models:build_list", "returned list, not a torch.nn.Module"),
    ],
)
def test_an_error_says_what_is_wrong_with_a_factory(folder: Path, factory: str, said: str) -> None:
    found = problem(factory)
    assert found.where == "model.factory"
    assert said in found.what
    assert factory != "failing:build" or f"{folder / PACKAGE / 'failing.py'}:3" in found.what


def test_a_missing_package_is_an_error_that_names_the_folder(folder: Path) -> None:
    config = Model(name="python", factory="hookrun_test_gone.models:build")
    with pytest.raises(SpecError, match=f"no package 'hookrun_test_gone', neither installed nor in {folder}"):
        build(config, sample_shape=None, num_classes=None, trust=frozenset({"hookrun_test_gone"}))


# --- its arguments


def test_arguments_are_passed_by_name(folder: Path) -> None:
    built = model("models:build", width=5, depth=3)
    assert [tuple(p.shape) for p in built.parameters() if p.dim() == 2] == [(5, 5)] * 3
    assert type(model("models:Net")).__name__ == "Net", "a class is a factory too"


def test_unknown_arguments_are_refused(folder: Path) -> None:
    found = problem("models:build", widht=5)
    assert (found.where, "did you mean 'width'?" in found.what) == ("model.args.widht", True)
    assert problem("models:needs").where == "model.args.width"


def test_an_error_in_the_factory_is_shown_with_its_line(folder: Path) -> None:
    found = problem("models:build_any", in_features=2, out_features="3")
    line = 1 + SOURCE.splitlines().index("    return nn.Linear(**kwargs)")
    assert found.where == "model.args"
    assert f"(at {folder / PACKAGE / 'models.py'}:{line})" in found.what
    assert "TypeError" in found.what


SOURCE = """
from os import getcwd
from torch import nn
import torch.nn as not_ours

WIDTH = 3

def build(width=2, depth=1):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

def build_any(**kwargs):
    return nn.Linear(**kwargs)

def build_list():
    return []

def build_later():
    from hookrun_test_sibling import SIZE
    return nn.Linear(SIZE, SIZE)

def needs(width):
    return nn.Linear(width, width)

class Net(nn.Module):
    pass
"""


def model(factory: str, trust: frozenset[str] = TRUSTED, **args: object) -> nn.Module:
    config = Model(name="python", factory=f"{PACKAGE}.{factory}", args=args)
    return build(config, sample_shape=(1, 8, 8), num_classes=10, trust=trust)


def problem(factory: str, trust: frozenset[str] = TRUSTED, **args: object) -> Problem:
    with pytest.raises(SpecError) as caught:
        model(factory, trust, **args)
    [found] = caught.value.errors
    return found


def imported() -> bool:
    return any(name.startswith(PACKAGE) for name in sys.modules)
