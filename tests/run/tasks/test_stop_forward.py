"""A run whose hook stops the forward: it captures, and has no metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

import hookrun
from hookrun.cli import main

EARLY = ["hooks=stop_forward", "train.limit_batches=2", "compute.threads=1", "compute.device=cpu"]


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_a_stopped_run_says_that_it_has_no_metrics(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*EARLY, f"task={task}", "strict=true"]) == 0
    run = hookrun.open_run("outputs/latest")
    said = "stop stops the forward after relu1: there is no output, and there are no metrics of it"
    assert run.captures["early"]["relu1"].shape[0] == 128
    (line,) = run.metrics
    assert line["note"] == said
    assert "loss" not in line
    assert "objective" not in run.status
    assert said in (run.path / "report.html").read_text()
    assert capsys.readouterr().out.count(said) == 2, "in the plan and at the end"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["task=train"], "stops the forward, and task=train needs the model's output"),
        (["task=attribute"], "stops the forward, and task=attribute needs the model's output"),
        (["task=export"], "stops the forward, and task=export needs the model's output"),
        (["task=predict", "task.metrics=[accuracy]"], "task.metrics needs the model's output"),
        (["task=predict", "task.backward={score: label}"], "task.backward needs the model's output"),
        (["task=predict", "compute.compile=true"], "which a graph cannot contain"),
    ],
    ids=lambda keys: keys[-1] if isinstance(keys, list) else "",
)
def test_what_needs_an_output_refuses_it_beforehand(
    keys: list[str], why: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*EARLY, *keys]) == 2
    assert why in capsys.readouterr().err
    assert not Path("outputs").exists()
