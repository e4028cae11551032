"""`python -m hookrun.runs`: the runs of a folder, one line each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import change, made_run

from hookrun.runs import main


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs in the working directory's `outputs`."""
    lines = [{"split": "val", "of": "epoch", "loss": 0.5, "accuracy": 0.875}]
    typed = ("experiment=clip_fc", "hooks.clip_fc.max=0.001")
    old = made_run(tmp_path / "outputs/old", *typed, metrics=lines, tags=["a", "b"], note="a first try")
    new = made_run(tmp_path / "outputs/new", "seed=1", status="failed")
    change(old, started="2026-05-01T00:00:00+00:00")
    change(new, started="2026-05-02T00:00:00+00:00", reason="RuntimeError: boom")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert main(list(arguments)) == code
    printed = capsys.readouterr()
    return (printed.out or printed.err).splitlines()


def test_each_run_is_a_line_the_newest_last(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = said(capsys, "outputs")
    assert re.split("  +", old) == [
        "old", "done", "val/accuracy 0.875",
        "clip_fc · cnn · grad clamp fc.weight, fc.bias · hooks.clip_fc.max=0.001", "[a, b]", "a first try",
    ]  # fmt: skip
    assert new.endswith("train · cnn · grad clamp fc.weight, fc.bias · seed=1  RuntimeError: boom")
    assert said(capsys) == [old, new], "the default folder"


def test_conditions_choose_among_the_runs(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = said(capsys, "outputs")
    assert said(capsys, "outputs", "status=failed", "seed=1") == [new]
    assert said(capsys, "tags=b") == [old]
    assert said(capsys, "hooks.clip_fc.max=0.001") == [old]
    assert said(capsys, "status=stopped") == [f"no runs in {outputs}"]


def test_typing_mistakes_are_refused(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "\n".join(said(capsys, "outputs", "experimnt=clip_fc", "status=fialed", code=2))
    assert "did you mean 'experiment'?" in wrong
    assert "did you mean 'failed'?" in wrong
    assert "did you mean 'outputs'?" in said(capsys, "outpts", code=2)[0]
    assert "KEY=VALUE" in "\n".join(said(capsys, "outputs", "done", code=2))


def test_a_folder_with_an_equals_sign_is_a_folder(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(outputs.parent / "seed=3/run")
    assert len(said(capsys, "seed=3")) == 1


def test_hostile_names_cannot_move_the_cursor(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(outputs / "x\x1b[2J\ny", "k=\x1b[31m", note="\x1b]0;title\x07")
    lines = said(capsys, "outputs")
    assert len(lines) == 3
    assert all(map(str.isprintable, lines))


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_gets_lines_of_its_width(outputs: Path, columns: int) -> None:
    made_run(outputs / "wide", note="表" * 100)
    ours, theirs = os.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-m", "hookrun.runs"], env=env, stdout=theirs, check=True)
    os.close(theirs)
    lines = os.read(ours, 100_000).decode().splitlines()
    os.close(ours)
    assert len(lines) == 3
    assert all(len(line) <= columns for line in lines)
    assert all(line.endswith("…") for line in lines)


def test_no_torch_is_imported_to_list_runs(outputs: Path) -> None:
    program = "import sys; from hookrun.runs import main; main([]); sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", program], env=env, check=False).returncode == 0
