"""task=plan: the plan of the hooks in the experiment's own task."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.cli import main


def test_the_plan_shows_the_size_of_captures(hook, capsys) -> None:
    assert main(["task=plan", "train.epochs=2", hook(select="fc", hook="forward", action="capture")]) == 0
    assert "h: captures 40 B per sample, 144 kB per run of 3594 samples" in capsys.readouterr().out


@pytest.mark.parametrize("sweep", [(), ("-m",)], ids=["run", "sweep"])
def test_the_plan_is_that_of_the_experiment_s_task(sweep: tuple[str, ...], capsys) -> None:
    assert main([*sweep, "experiment=capture_features", "task=plan"]) == 0
    assert "2.96 MB per run of 359 samples" in capsys.readouterr().out  # of task=predict, not of training
    assert main([*sweep, "experiment=capture_features", "task=plan", "train.limit_batches=1"]) == 0
    assert "per run of 64 samples" in capsys.readouterr().out


def test_mistakes_in_the_task_s_own_keys_are_found_by_the_plan(run, capsys) -> None:
    hook = "+hooks.h={select: fc, hook: forward, action: %s}"
    source = run("task=predict", hook % "capture")
    value = f"{{run: '{source.path}', capture: h, module: fc, sample: same}}"
    entry = hook % f"replace, value: {value}"
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /task: predict\n"
    )
    assert main(["--config-dir", "conf", "experiment=mine", "task=plan", entry]) == 0
    Path("conf/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /task: train\n"
    )
    assert main(["--config-dir", "conf", "experiment=mine", "task=plan", entry]) == 2
