"""What is written about model and hooks, and the lines that a run prints at its end."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hookrun
from hookrun.tasks.run.summaries import hook_facts, model_facts


def test_a_module_with_two_names_is_listed_once_with_both() -> None:
    shared = nn.Linear(2, 3)
    found = model_facts(nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)), weights="random")
    assert (found["class"], found["weights"]) == ("Sequential", "random")
    assert [(each["path"], each["names"], each["parameters"]) for each in found["modules"]] == [
        ("", [""], 9), ("0", ["0", "2.0"], 9), ("1", ["1"], 0), ("2", ["2"], 9),
    ]  # fmt: skip
    assert "weights" not in model_facts(shared)


@pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # that a hook never fired is its fact
def test_firings_are_counted_by_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with hookrun.hooked(
        model,
        {
            "edit": {"select": "0", "hook": "forward", "action": "scale", "factor": 2},
            "grad": {"select": "1", "hook": "output_grad", "action": "stats"},
        },
    ) as hooks:
        for _ in range(3):
            model(torch.ones(1, 2)).detach()
        sites = {(each["hook"], each["module"]): each for each in hook_facts(hooks)["sites"]}
    assert sites["edit", "0"]["fired"] == 3 and sites["grad", "1"]["fired"] == 0
    assert sites["edit", "0"]["silent"] is None


QUICK = ("train.epochs=1", "train.limit_batches=4", "train.log_every=2")


@pytest.mark.usefixtures("pages")
def test_metrics_and_the_run_directory(run, capsys) -> None:
    found = run(*QUICK)
    *_, train, val, kept, where, page = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"epoch 1/1  train loss \d\.\d+ +accuracy \d+\.\d %", train)
    assert val.startswith(" " * 11 + "val ") and f"{found.metrics[-1]['accuracy'] * 100:.1f} %" in val
    assert kept == "checkpoints: best.safetensors, last.safetensors"
    assert (where, page) == (f"run directory: {found.path}", f"report: {found.path}/report.html")


@pytest.mark.usefixtures("pages")
def test_metrics_of_an_evaluation(run, capsys) -> None:
    found = run(*QUICK, "task=evaluate")
    *_, val, where, page = capsys.readouterr().out.splitlines()
    assert val.startswith("val      loss ") and f"{found.metrics[-1]['accuracy'] * 100:.1f} %" in val
    assert (where, page) == (f"run directory: {found.path}", f"report: {found.path}/report.html")


def test_metrics_are_printed_once(run, capsys) -> None:
    run(*QUICK)
    printed = capsys.readouterr().out
    assert (printed.count("train loss"), printed.count("val   loss"), printed.count("loss")) == (1, 1, 2)


def test_how_often_each_hook_fired_where(run, hook, capsys) -> None:
    run(*QUICK, hook(select="'{fc,conv1}'", hook="forward", action="stats", when="{mode: train}"))
    assert "h (forward, stats) fired: conv1 x4, fc x4" in capsys.readouterr().out


def test_what_an_edit_changed_is_counted_on_the_logged_steps(run, hook, capsys) -> None:
    run(*QUICK, hook(select="fc", hook="forward", action="scale", factor=2, when="{mode: train}"))
    assert "changed 1,280 of 1,280 elements (100.0%) on the logged steps" in capsys.readouterr().out
    run(*QUICK, hook(select="fc.bias", hook="grad", action="clamp", min=-9, max=9))
    assert "changed 0 of 20 elements (0.0%)" in capsys.readouterr().out


def test_the_captured_tensors_and_bytes_are_printed(run, hook, capsys) -> None:
    run(*QUICK, "task=predict", hook(select="fc", hook="forward", action="capture"))
    assert "captured 4 tensors, 10.2 kB" in capsys.readouterr().out
    run(*QUICK, "task=predict", "train.limit_batches=1", hook(select="fc", hook="forward", action="capture"))
    assert "captured 1 tensor, 2.56 kB" in capsys.readouterr().out


def test_the_bytes_of_stats_are_printed(run, hook, capsys) -> None:
    run(*QUICK, "task=predict", hook(select="fc", hook="forward", action="stats", of="[bytes]"))
    assert "h (forward, stats) fired: fc x4\n    counted 10.2 kB\n" in capsys.readouterr().out
    run(*QUICK, "task=predict", hook(select="fc", hook="forward", action="stats"))
    assert "counted" not in capsys.readouterr().out


def test_of_many_modules_some_are_shown(run, hook, capsys) -> None:
    run(*QUICK, "model=resnet18", "train.limit_batches=1", "task=predict", "data.batch_size=2",
        "+data.transforms={rgb: {}}", hook(select="type:Conv2d", hook="forward", action="stats"))  # fmt: skip
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "fired:" in line]
    assert line.endswith("and 16 more")


def test_hooks_that_did_nothing_are_a_warning(run, hook, capsys) -> None:
    never = hook(select="'{fc,conv1}'", hook="forward", action="stats", when="{epoch: [9]}")
    run(*QUICK, never)
    assert "WARNING: h never fired on conv1, fc" in capsys.readouterr().out
