"""What a command ends with: its exit code, and what it says where it failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.cli.exit_codes import exit_code, most_serious, report
from hookrun.errors import CheckFailed, CompileError, HookError, Problem, SpecError


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
def test_refused_is_worse_than_failed_is_worse_than_a_check(codes: list[int], worst: int) -> None:
    assert most_serious(codes) == worst


def test_long_messages_never_fold(capsys) -> None:
    path = "/a/path/" + "/".join(["folder"] * 60)
    report(SpecError([Problem("data.root", f"there is no {path}")]))
    assert path in capsys.readouterr().err


def test_a_traceback_that_cannot_be_kept_is_shown(tmp_path: Path, capsys) -> None:
    report(RuntimeError("out of luck"), tmp_path / "nowhere")
    printed = capsys.readouterr().err
    assert "traceback: not saved" in printed
    assert printed.startswith("RuntimeError: out of luck")


def test_a_link_is_replaced_by_the_traceback_and_not_written_through(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / "error.txt").symlink_to(theirs)
    report(RuntimeError("out of luck"), tmp_path)
    assert theirs.read_text() == "theirs"
    assert (tmp_path / "error.txt").read_text().endswith("RuntimeError: out of luck\n")
