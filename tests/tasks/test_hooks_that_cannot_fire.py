"""Hooks that cannot fire under a task are reported before the run, and refused under `strict`; so are several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hookrun
from hookrun.cli import main

SMALL = ["model=mlp", "compute.device=cpu", "compute.threads=1", "train.limit_batches=1", "train.epochs=1"]
GRADIENT = "+hooks.g={select: fc, hook: output_grad, action: capture}"


def test_a_gradient_hook_in_a_task_without_a_backward_pass(tmp_path: Path, capsys: Any) -> None:
    assert main([*SMALL, "task=predict", GRADIENT]) == 0
    out = capsys.readouterr().out
    assert "NOTE: g: output_grad needs a backward pass, which task=predict does not run" in out
    assert "g: captures" not in out, "no bytes are promised"
    assert out.index("NOTE: g") < out.index("never fired"), "before the run"
    assert main([*SMALL, "task=predict", GRADIENT, "strict=true"]) == 2
    assert "hooks.g.hook: output_grad needs a backward pass" in capsys.readouterr().err
    assert len(list((tmp_path / "outputs").glob("2*"))) == 1, "a refused run leaves no directory"


@pytest.mark.parametrize("sweep", [[], ["-m", "seed=0,1"]], ids=["run", "sweep"])
def test_ranks_are_refused_where_each_would_do_a_whole_run(
    sweep: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*sweep, *SMALL]) == 2
    assert "found 2 processes (WORLD_SIZE), and a run uses one" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()
    for task in ("plan", "modules"):
        assert main([*SMALL, f"task={task}"]) == 0
    with hookrun.hooked(torch.nn.Linear(2, 2), {"h": {"select": "", "hook": "forward", "action": "print"}}):
        pass


def test_task_plan_shows_the_whole_plan(capsys: Any) -> None:
    hook = "+hooks.all={select: '**', hook: forward, action: print}"
    assert main(["model=resnet18", "data=fake_images", "task=plan", hook]) == 0
    out = capsys.readouterr().out
    assert "layer4.1.bn2" in out and "more" not in out


def test_a_checkpoint_is_not_overwritten_by_the_apply_hooks_it_contains(executed: Any) -> None:
    ones = "+hooks.ones={select: fc, hook: apply, action: fill, value: 1}"
    run = executed(*SMALL, ones, "train.optimizer.lr=0.1")
    weights = run.path / "checkpoints" / "last.safetensors"
    trained = load_file(weights)["fc.weight"]
    assert not torch.equal(trained, torch.ones_like(trained))
    seen = "+hooks.seen={select: fc, hook: forward, action: linear, bias: null}"
    predict = ("task=predict", seen, f"model.weights={weights}", "train.limit_batches=2")
    first = executed(*SMALL[:3], *predict, ones).predictions[:]
    second = executed(*SMALL[:3], *predict, ones.replace("value: 1", "value: 2")).predictions[:]
    assert not torch.allclose(first, first[:, :1].expand_as(first)), "trained weights: classes differ"
    assert torch.allclose(second, second[:, :1].expand_as(first)), "another hook fills: classes are equal"
