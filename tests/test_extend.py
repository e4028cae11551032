"""`hookrun.extend`: the door of extensions, and what is refused when an extension does not fit."""

from __future__ import annotations

import importlib
import inspect
import linecache
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hookrun
from hookrun import SpecError, extend
from hookrun.command import schema
from hookrun.engine.actions import actions
from hookrun.engine.discovery import extension_modules
from hookrun.engine.hook_types import HOOK_TYPES
from hookrun.engine.runtime.hooks.base import registered_hooks
from hookrun.engine.spec.selector import forms
from hookrun.report.sections import extension_sections

ROOT = Path(__file__).resolve().parents[1]

Extend = Callable[..., None]

ACTION = """
from hookrun.extend import Action

class Mine(Action):
    '''Do nothing.'''
    action_name = "{name}"

    def build(self, site):
        return lambda x: x
"""
POINT = """
from hookrun.extend import Action

class Mine(Action):
    '''The root of the squares.'''
    action_name = "absolute"

    @property
    def points(self):
        return ("squares",)

    def build(self, site):
        squares = site.point("squares")
        return lambda x: squares(x.square()).sqrt()
"""
HOOK_TYPE = """
from hookrun.extend import HookType

MINE = HookType("{name}", fires="never", sees="nothing", on="module", phase="forward", like="{like}")
"""
SELECTOR = """
from hookrun.extend import Selector

class Mine(Selector):
    prefix = "{prefix}"
    parse = find = None
"""
SECTION = """
from hookrun.extend import ReportSection

MINE = ReportSection("{id}", "Mine", dict, "{template}", "{place}")
"""


def test_the_door_has_at_most_30_names() -> None:
    names = [name for names in extend._HOMES.values() for name in names]
    assert sorted(names) == extend.__all__ == dir(extend)
    assert len(names) <= 30


@pytest.mark.parametrize("name", extend.__all__)
def test_each_name_of_the_door_is_documented(name: str) -> None:
    assert re.search(rf"\b{name}\b", extend.__doc__ or "")
    value = getattr(extend, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)


def test_importing_the_door_imports_nothing_else() -> None:
    program = (
        "import sys, hookrun.extend; "
        "print(*[name for name in sys.modules if name.startswith('hookrun.') or name in ('torch', 'pydantic')])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert set(shown.stdout.split()) == {"hookrun.errors", "hookrun.version", "hookrun.extend"}, shown.stderr


def test_no_name_of_the_door_imports_extensions() -> None:
    program = (
        "from hookrun.extend import *\n"
        "from hookrun.engine.discovery import extension_modules\n"
        "print(extension_modules.cache_info().misses)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert shown.stdout.strip() == "0", shown.stderr


@pytest.fixture
def extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Extend]:
    """Install a package `my_package` whose modules, name -> text, extend hookrun; its files are in tmp_path."""

    def install(**modules: str) -> None:
        info = tmp_path / "my_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
        points = [f"{name} = my_{name}" for name in modules]
        (info / "entry_points.txt").write_text("\n".join(["[hookrun.extensions]", *points]))
        for name, text in modules.items():
            (tmp_path / f"my_{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        _forget()

    yield install
    monkeypatch.undo()
    _forget()
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def _forget() -> None:
    for cached in (extension_modules, actions, forms, registered_hooks):
        cached.cache_clear()
    vars(HOOK_TYPES).pop("_all", None)


def refusal(look: Callable[[], object]) -> str:
    """Where and what is refused, by the one error that this raises."""
    with pytest.raises(SpecError) as caught:
        look()
    (problem,) = caught.value.errors
    assert problem.hint
    return f"{problem.where}: {problem.what}"


def test_an_action_is_found_by_its_name(extended: Extend) -> None:
    extended(own=ACTION.format(name="my_own"))
    assert actions()["my_own"].__module__ == "my_own"
    assert "my_own" in list(actions())
    assert actions()["scale"].__module__ == "hookrun.engine.actions.scale"


def test_an_action_may_add_what_hooks_select(extended: Extend) -> None:
    extended(own=POINT)
    square = {"select": "0", "hook": "forward", "action": "absolute"}
    seen = {"select": "hook:rms.squares", "hook": "forward", "action": "capture"}
    doubled = {"select": "hook:rms.squares", "hook": "forward", "action": "scale", "factor": 4.0}
    model = torch.nn.Sequential(torch.nn.Identity())
    x = torch.randn(2, 3)
    with hookrun.hooked(model, {"rms": square, "seen": seen, "doubled": doubled}) as hooks:
        y = model(x)
    assert torch.equal(hooks.captures["seen"]["0:rms.squares"][0], x.square())
    torch.testing.assert_close(y, x.abs() * 2)


@pytest.mark.parametrize("asked", ["scale", "noise"])
def test_an_action_with_a_taken_name_is_refused(extended: Extend, asked: str) -> None:
    extended(own=ACTION.format(name="scale"))
    assert "my_own.Mine: has the name 'scale'" in refusal(lambda: actions()[asked])
    assert "hookrun.engine.actions.scale.Scale" in refusal(lambda: list(actions()))


def test_two_extensions_with_one_name_are_refused(extended: Extend) -> None:
    extended(first=ACTION.format(name="mine"), second=ACTION.format(name="mine"))
    assert refusal(lambda: actions()["mine"]).endswith("which my_first.Mine has already")


def test_a_module_named_twice_is_one_extension(extended: Extend, tmp_path: Path) -> None:
    extended(own=ACTION.format(name="mine"))
    points = tmp_path / "my_package-1.0.dist-info" / "entry_points.txt"
    points.write_text("[hookrun.extensions]\na = my_own\nb = my_own\n")
    assert [module.__name__ for module in extension_modules()] == ["my_own"]


@pytest.mark.parametrize("text", ["raise RuntimeError('no licence')", "raise SystemExit('no licence')"])
def test_a_module_that_fails_is_named(extended: Extend, text: str) -> None:
    extended(own=text)
    told = refusal(extension_modules)
    assert told.startswith("my_package: ")
    assert "own = 'my_own'" in told
    assert told.endswith("no licence")


def test_a_hook_type_with_a_taken_name_is_refused(extended: Extend) -> None:
    extended(own=HOOK_TYPE.format(name="forward", like="forward"))
    assert "my_own: has the name 'forward'" in refusal(lambda: HOOK_TYPES["backward"])


def test_a_hook_type_like_an_unknown_one_is_refused(extended: Extend) -> None:
    extended(own=HOOK_TYPE.format(name="mine", like="forwards"))
    assert refusal(lambda: HOOK_TYPES["mine"]).startswith("hook type mine of my_own: like='forwards'")


def test_a_hook_type_without_a_class_is_refused(extended: Extend) -> None:
    extended(own=HOOK_TYPE.format(name="mine", like="forward"))
    assert refusal(registered_hooks) == "hook type mine: no class registers it"


@pytest.mark.parametrize("prefix", ["re:", "r", "re:x", ""])
def test_a_selector_that_reads_others_is_refused(extended: Extend, prefix: str) -> None:
    extended(own=SELECTOR.format(prefix=prefix))
    assert refusal(forms).startswith("my_own.Mine: has ")


@pytest.mark.parametrize(
    ("id", "template", "place", "word"),
    [
        ("hooks", "my_own:mine.html", "answer", "'hooks'"),
        ("mine", "my_own:none.html", "answer", "none.html"),
        ("mine", "no_such_package:none.html", "answer", "no_such_package"),
        ("mine", "run.html", "answer", "run.html"),
        ("mine", "my_own:mine.html", "top", "place='top'"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(
    extended: Extend, tmp_path: Path, id: str, template: str, place: str, word: str
) -> None:
    (tmp_path / "mine.html").write_text("")
    extended(own=SECTION.format(id=id, template=template, place=place))
    told = refusal(extension_sections)
    assert told.startswith(f"section {id} of my_own: ")
    assert word in told


def test_the_schema_tells_a_wrong_extension(
    extended: Extend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extended(own=ACTION.format(name="scale"))
    monkeypatch.setattr(sys, "argv", ["schema"])
    assert schema.main() == 2
    assert "my_own.Mine" in capsys.readouterr().err


def test_an_edited_action_of_an_extension_is_another_plan(extended: Extend, tmp_path: Path) -> None:
    from torch import nn

    def planned() -> Mapping[str, Any]:
        hooks = {"mine": {"select": "0", "hook": "forward", "action": "mine"}}
        return hookrun.compile(hooks, nn.Sequential(nn.Linear(2, 2))).to_dict()

    extended(action=ACTION.format(name="mine"))
    before = planned()
    assert before["hooks"][0]["code"]["action"]["function"] == "my_action:Mine"
    (tmp_path / "my_action.py").write_text(
        ACTION.format(name="mine").replace("lambda x: x", "lambda x: x + 1")
    )
    del sys.modules["my_action"]
    linecache.clearcache()
    importlib.invalidate_caches()
    _forget()
    after = planned()
    assert after["hooks"][0]["code"]["action"]["sha256"] != before["hooks"][0]["code"]["action"]["sha256"]
