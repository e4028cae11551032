"""The exit code of a command, and its error report."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from hookrun.errors import CheckFailed, CompileError, HookError, Problem, SpecError
from hookrun.sweeps.exit_codes import NEEDED, exit_code, most_serious, report


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError([Problem("a", "b")]), 2),
        (CompileError([Problem("a", "b")]), 2),
        (CheckFailed("inf"), 3),
        (HookError("failed"), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_exception_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("codes", "worst"), [([], 0), ([0, 0], 0), ([0, 3], 3), ([3, 1, 0], 1), ([1, 3, 2, 0], 2)], ids=str
)
def test_refused_outranks_failed_and_failed_outranks_a_check(codes: list[int], worst: int) -> None:
    assert most_serious(codes) == worst


def test_a_python_without_the_packages_is_told_where_they_are(capsys) -> None:
    report(ModuleNotFoundError("No module named 'hydra'", name="hydra.errors"))
    printed = capsys.readouterr().err
    assert f"{sys.executable} has no module 'hydra'" in printed
    assert "scripts/hookrun" in printed and "Traceback" not in printed
    report(ModuleNotFoundError("No module named 'mine'", name="mine"))
    assert "scripts/hookrun" not in capsys.readouterr().err


def test_the_modules_of_all_packages_that_hookrun_needs_are_known() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    asked = tomllib.loads(text)["project"]["dependencies"]
    dependencies = {re.split("[<>=]", each)[0] for each in asked}
    packages = packages_distributions()
    assert {name.lower() for module in NEEDED for name in packages[module]} == dependencies


def test_long_messages_are_not_wrapped(capsys) -> None:
    path = "/a/path/" + "/".join(["folder"] * 60)
    report(SpecError([Problem("data.root", f"there is no {path}")]))
    assert path in capsys.readouterr().err


def test_a_traceback_that_cannot_be_saved_is_shown(tmp_path: Path, capsys) -> None:
    report(RuntimeError("out of luck"), tmp_path / "nowhere")
    printed = capsys.readouterr().err
    assert "traceback: not saved" in printed
    assert printed.startswith("RuntimeError: out of luck")


def test_a_link_in_place_of_the_traceback_file_is_replaced(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / "error.txt").symlink_to(theirs)
    report(RuntimeError("out of luck"), tmp_path)
    assert theirs.read_text() == "theirs"
    assert (tmp_path / "error.txt").read_text().endswith("RuntimeError: out of luck\n")
