"""What users rely on: the list of public names, and runs that an earlier version has written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from public_names import RUNS, files_of, public

import hookrun
from hookrun.cli import main
from hookrun.report.__main__ import main as report
from hookrun.verify import main as verify

LISTED = Path(__file__).parent / "public.txt"
CONF = Path(__file__).parent / "conf"


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A copy of a run of an earlier version, in the working directory."""

    def copied(name: str) -> Path:
        shutil.copytree(RUNS / name, tmp_path / name)
        return tmp_path / name

    monkeypatch.chdir(tmp_path)
    return copied


def test_public_names_are_the_listed_ones() -> None:
    assert public() == LISTED.read_text(encoding="utf-8"), (
        "run scripts/public_names.py; CHANGELOG.md names what goes"
    )


def test_a_new_run_has_the_listed_files(earlier: Callable[[str], Path], tmp_path: Path) -> None:
    overrides = ["experiment=earlier", "train.epochs=2", "hydra.run.dir=now"]
    assert main(["--config-dir", str(CONF), *overrides]) == 0
    assert files_of(tmp_path / "now") == files_of(earlier("finished"))


def test_an_earlier_finished_run_is_read(earlier: Callable[[str], Path]) -> None:
    run = hookrun.open_run(earlier("finished"))
    assert run.status["status"] == "done"
    captured = run.captures["features"]["layers"]
    assert captured[0:8].shape == (8, 8)
    assert torch.isfinite(captured[:]).all()
    assert [line["epoch"] for line in run.metrics if line.get("split") == "val"] == [0, 1]


def test_an_earlier_finished_run_can_be_verified(earlier: Callable[[str], Path]) -> None:
    path = earlier("finished")
    assert verify([str(path)]) == 0
    (path / "report.html").unlink()
    assert report([str(path)]) == 0
    assert "features" in (path / "report.html").read_text(encoding="utf-8")


def test_an_earlier_interrupted_run_is_resumed_or_refused(earlier, capsys) -> None:
    path = earlier("interrupted")
    code = main([f"resume={path}"])
    if code == 0:
        assert hookrun.open_run(path).status["status"] == "done"
    else:
        assert code == 2
        assert "version" in capsys.readouterr().err
