"""Names in a file can reach functions and classes defined in a trusted package, and nothing else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookrun import examples
from hookrun.engine.spec import parse_spec
from hookrun.engine.trust import of_environment, read_once
from hookrun.engine.trust.load import ACTIONS, LOSSES, METRICS, OPTIMIZERS, Kind, load, load_class
from hookrun.errors import Problem, SpecError, shortened

PACKAGE = "hookrun_test_own"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory that contains the package, and another package whose name begins like it."""
    for name in (PACKAGE, f"{PACKAGE}2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit(9)\n" if name.endswith("2") else "")
        (tmp_path / name / "hooks.py").write_text(SOURCE)
    (tmp_path / PACKAGE / "exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.setenv("HOOKRUN_TRUST", PACKAGE)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


def test_names_in_a_trusted_package_are_found(folder: Path) -> None:
    assert load(f"{PACKAGE}.hooks:soften", ACTIONS, "").target(4) == 2
    assert load(f"{PACKAGE}.hooks:Net", LOSSES, "").name == "Net"
    assert load_class(f"{PACKAGE}.hooks:Net", object, OPTIMIZERS, "").__name__ == "Net"


def test_hostile_names_are_never_imported(folder: Path) -> None:
    for text in (
        "os:system", "subprocess:run", "builtins:exec", "builtins:eval", "posix:system", "nt:system",
        "importlib:import_module", f"{PACKAGE}2.hooks:soften", f"x.{PACKAGE}:soften", "sys:exit", "_io:open",
    ):  # fmt: skip
        before = set(sys.modules)
        assert "is not trusted" in problem(text).what, text
        assert set(sys.modules) == before, text


def test_trust_in_the_standard_library_grants_nothing(folder: Path) -> None:
    for text in ("os:system", "builtins:exec", "subprocess:Popen"):
        with read_once(frozenset({text.partition(":")[0]})):
            assert "Python itself" in problem(text).what


def test_names_of_another_form_are_refused(folder: Path) -> None:
    hooks = f"{PACKAGE}.hooks"
    for text in (
        f"{hooks}:Net.method", f"{hooks}:soften.__globals__", f"{hooks}:", f":{hooks}", f".{hooks}:soften",
        f"{hooks}:soften:x", f"{hooks}/x:soften", f"{hooks}: soften", f"{hooks}:soften()", f"../{PACKAGE}:x",
        f"{hooks}..x:soften", "", " ", "a b", f"{hooks}\n:soften",
    ):  # fmt: skip
        assert "is not of the form package.module:function" in problem(text).what, text


def test_reserved_names_are_refused(folder: Path) -> None:
    for name in ("__import__", "__class__", "__builtins__", "__getattribute__", "__loader__"):
        assert "Python reserves" in problem(f"{PACKAGE}.hooks:{name}").what
    for name, said in (
        ("system", "comes from 'posix', and only"),
        ("subprocess", "is module, neither a function nor a class"),
        ("WIDTH", "is int, neither a function nor a class"),
        ("softn", "did you mean 'soften'?"),
    ):
        assert said in problem(f"{PACKAGE}.hooks:{name}").what


def test_a_module_may_not_exit_the_process_on_import(folder: Path) -> None:
    assert "SystemExit: 3" in problem(f"{PACKAGE}.exits:x").what


def test_the_error_has_the_line_that_would_allow_it(folder: Path) -> None:
    for kind, group in ((ACTIONS, "actions"), (LOSSES, "losses"), (METRICS, "metrics")):
        hint = problem("mine.hooks:soften", kind).hint
        for way in ("HOOKRUN_TRUST=mine", "+trust=[mine]", f"hookrun.{group}"):
            assert way in hint
    assert "entry point" not in problem("mine.hooks:soften", OPTIMIZERS).hint


def test_of_hookrun_s_modules_only_the_examples_need_no_trust(folder, monkeypatch) -> None:
    monkeypatch.delenv("HOOKRUN_TRUST")
    assert load("hookrun.examples:soften", ACTIONS, "").target is examples.soften
    for text in (
        "hookrun.store.files:write_json", "hookrun.engine.trust.load:load", "hookrun.api:build", "hookrun:compile",
        "hookrun.examples.inner:soften", "hookrun.examples2:soften", "hookrun_examples:soften",
    ):  # fmt: skip
        assert "is not trusted" in problem(text).what, text
    monkeypatch.setattr(examples, "shortened", shortened, raising=False)
    for name, origin in (("Tensor", "torch"), ("shortened", "hookrun.errors")):
        found = problem(f"hookrun.examples:{name}")
        assert f"comes from '{origin}', and only 'hookrun.examples' is trusted" in found.what
    assert "did you mean 'soften'?" in problem("hookrun.examples:softn").what


def test_the_examples_are_the_package_s_own_anywhere(folder: Path) -> None:
    (folder / "hookrun").mkdir()
    (folder / "hookrun/__init__.py").write_text("")
    (folder / "hookrun/examples.py").write_text("def soften(x):\n    return 'another'\n")
    assert load("hookrun.examples:soften", ACTIONS, "").target is examples.soften


def test_an_installed_entry_point_grants_trust_in_its_group(folder, monkeypatch) -> None:
    site = folder / "site"
    install(site, f"[hookrun.actions]\nmine = {PACKAGE}.hooks:soften\n")
    (folder / PACKAGE).rename(site / PACKAGE)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delenv("HOOKRUN_TRUST")
    assert load("mine", ACTIONS, "").text == f"{PACKAGE}.hooks:soften"
    assert load(f"{PACKAGE}.hooks:Net", ACTIONS, "").name == "Net"
    assert load(f"{PACKAGE}.hooks:Net", OPTIMIZERS, "").name == "Net"
    assert "not trusted" in problem(f"{PACKAGE}.hooks:soften", LOSSES).what
    assert "no installed package has an entry point 'mine'" in problem("mine", LOSSES).what
    install(site, "[hookrun.actions]\nmine = other.hooks:x\n", name="other")
    assert "several installed packages give the name 'mine'" in problem("mine").what
    with pytest.raises(SpecError, match="a function of an installed package: action: python, function: mine"):
        parse_spec({"h": {"select": "fc", "hook": "forward", "action": "mine"}})


@pytest.mark.parametrize("entry", ["", "absolute"])
def test_metadata_in_the_current_directory_is_ignored(folder, monkeypatch, entry: str) -> None:
    install(folder, f"[hookrun.actions]\nmine = {PACKAGE}.hooks:soften\n")
    monkeypatch.syspath_prepend(entry and str(folder))
    monkeypatch.delenv("HOOKRUN_TRUST")
    assert "no installed package" in problem("mine").what
    assert "not trusted" in problem(f"{PACKAGE}.hooks:soften").what
    assert PACKAGE not in sys.modules


def test_an_installed_package_wins_over_the_current_folder(folder, monkeypatch) -> None:
    install(folder / "site", f"[hookrun.actions]\nmine = {PACKAGE}.hooks:soften\n")
    install(folder / "site", f"[console_scripts]\nmine = {PACKAGE}2.hooks:soften\n", name="script")
    monkeypatch.syspath_prepend(folder / "site")
    monkeypatch.delenv("HOOKRUN_TRUST")
    assert f"no package '{PACKAGE}'" in problem(f"{PACKAGE}.hooks:soften").what
    assert PACKAGE not in sys.modules
    assert "not trusted" in problem(f"{PACKAGE}2.hooks:soften").what, "scripts are not in hookrun's groups"


def test_the_hash_follows_the_source_of_the_module(folder: Path) -> None:
    found = []
    for text in (SOURCE, SOURCE.replace("x / 2", "x / 3")):
        (folder / PACKAGE / "hooks.py").write_text(text)
        sys.modules.pop(f"{PACKAGE}.hooks", None)
        found.append(load(f"{PACKAGE}.hooks:soften", ACTIONS, "").code)
    assert found[0].sha256 != found[1].sha256
    assert found[0].hashed == f"the source of the module {PACKAGE}.hooks"


def test_a_later_change_of_the_variable_grants_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKRUN_TRUST", " mine, ,theirs ")
    assert of_environment() == {"mine", "theirs"}
    with read_once():
        monkeypatch.setenv("HOOKRUN_TRUST", "os")
        assert of_environment() == {"mine", "theirs"}
        with read_once(frozenset({"given"})):
            assert of_environment() == {"given"}
            with read_once():
                assert of_environment() == {"os"}, "a command inside another one reads the variable itself"
        assert of_environment() == {"mine", "theirs"}
    assert of_environment() == {"os"}
    with pytest.raises(RuntimeError), read_once(frozenset()):
        raise RuntimeError
    assert of_environment() == {"os"}, "also after an error"


def test_trust_of_a_command_ends_with_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOKRUN_TRUST", raising=False)
    seen = list[frozenset[str]]()
    with read_once(frozenset({"mine"})):
        thread = threading.Thread(target=lambda: seen.append(of_environment()))
        thread.start()
        thread.join()
    assert seen == [frozenset()]


SOURCE = """
from os import getcwd, system
import subprocess

def soften(x):
    return x / 2

def _private(x):
    return x

class Net:
    def method(self, x):
        return x

WIDTH = 3
"""


def problem(text: str, kind: Kind = ACTIONS) -> Problem:
    with pytest.raises(SpecError) as caught:
        load(text, kind, "hooks.h.function")
    [found] = caught.value.errors
    assert found.where == "hooks.h.function"
    return found


def install(site: Path, entry_points: str, name: str = PACKAGE) -> None:
    """Create the metadata of an installed package."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
