"""What a run prints: plain lines into a file, a bar on a terminal, its last lines; what is written about its model."""

from __future__ import annotations

import io
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.run.passes.endings import hook_lines, model_facts
from hookrun.run.passes.progress import Screen, numbers


def test_a_module_with_two_names_is_listed_once_with_both() -> None:
    shared = nn.Linear(2, 3)
    found = model_facts(nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)), weights="random")
    assert found["class"] == "Sequential"
    assert found["weights"] == "random"
    assert [(each["path"], each["names"], each["parameters"]) for each in found["modules"]] == [
        ("", [""], 9), ("0", ["0", "2.0"], 9), ("1", ["1"], 0), ("2", ["2"], 9),
    ]  # fmt: skip
    assert "weights" not in model_facts(shared)


QUICK = ("train.epochs=1", "train.limit_batches=4", "train.log_every=2")


@pytest.mark.usefixtures("pages")
def test_a_training_ends_with_its_metrics(run, capsys) -> None:
    found = run(*QUICK)
    printed = capsys.readouterr().out
    *_, train, val, kept, where, page = printed.splitlines()
    assert re.fullmatch(r"epoch 1/1  train loss \d\.\d+ +accuracy \d+\.\d %", train)
    assert val.startswith(" " * 11 + "val ")
    assert f"{found.metrics[-1]['accuracy'] * 100:.1f} %" in val
    assert printed.count("loss ") == 2, "once each"
    assert kept == "checkpoints: best.safetensors, last.safetensors"
    assert where == f"run directory: {found.path}"
    assert page == f"report: {found.path}/report.html"


LINES = {
    "scaled": ("{select: fc, action: scale, factor: 2", "changed 640 of 640 elements (100.0%) on the logged steps"),
    "clamped": ("{select: fc, action: clamp, min: -1e9, max: 1e9", "changed 0 of 640 elements (0.0%)"),
    "kept": ("{select: fc, action: capture", "captured 1 tensor, 2.56 kB\n"),
    "counted": ("{select: fc, action: stats, of: [bytes]", "counted 2.56 kB\n"),
    "seen": ("{select: '{fc,conv1}', action: stats", ""),
}  # fmt: skip


def test_an_evaluation_ends_with_a_line_for_each_hook(executed, capsys) -> None:
    """How often it fired, and what it changed or kept."""
    hooks = [f"+hooks.{name}={body}, hook: forward}}" for name, (body, _) in LINES.items()]
    found = executed("task=evaluate", "train.limit_batches=1", *hooks)
    printed = capsys.readouterr().out
    val = next(line for line in printed.splitlines() if line.startswith("val      loss "))
    assert f"{found.metrics[-1]['accuracy'] * 100:.1f} %" in val
    assert printed.endswith(f"run directory: {found.path}\n")
    for name, (_, said) in LINES.items():
        assert not said or re.search(
            rf"{name} \(forward, \w+\) fired: fc x1\n +{re.escape(said)}", printed
        ), name
    assert "seen (forward, stats) fired: conv1 x1, fc x1\nrun directory" in printed


def test_a_hook_that_matches_nothing_says_so_at_the_end(executed, capsys) -> None:
    hook = "+hooks.gone={select: '**.absent', expect: '0..2', hook: forward, action: stats}"
    executed("task=evaluate", "train.limit_batches=1", hook)
    expected = (
        "gone (forward, stats) did not fire: it matches nothing in this model, as `expect: 0..2` allows\n"
    )
    assert expected in capsys.readouterr().out


def test_of_many_modules_some_are_shown() -> None:
    model = nn.Sequential(*(nn.ReLU() for _ in range(20)))
    spec = {"h": {"select": "type:ReLU", "hook": "forward", "action": "stats"}}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(2))
        context: Any = SimpleNamespace(hooks=hooks, sink=SimpleNamespace(bytes=Counter()))
        (line,) = hook_lines(context)
    assert line == "h (forward, stats) fired: 0 x1, 1 x1, 2 x1, 3 x1 and 16 more"


def test_numbers_are_shown_with_their_units() -> None:
    found = numbers({"loss": 0.123456, "accuracy": 0.9654, "tokens": 12345, "lr": 1e-5})
    assert found == "loss 0.1235  accuracy 96.5 %  tokens 12,345  lr 1e-05"


def test_a_quiet_screen_writes_no_lines(capsys) -> None:
    texts = ["[bold]hooks[/bold] :smile: " + "x" * 300, "ein Häkchen ✓"]
    for quiet in (False, True):
        screen = Screen(quiet=quiet)
        for text in texts:
            screen.say(text)
        screen.note(["one", "two"])
        said = capsys.readouterr().out
        assert said == ("" if quiet else "\n".join([*texts, "NOTE: one", "NOTE: two"]) + "\n")


class ClosedPipe(io.StringIO):
    tried = 0

    def write(self, _: str) -> int:
        self.tried += 1
        raise BrokenPipeError


def test_a_closed_pipe_does_not_end_the_run() -> None:
    screen = Screen()
    pipe = ClosedPipe()
    screen.console.file = pipe
    screen.say("a line")
    tried = pipe.tried
    assert tried
    assert screen.console.quiet
    screen.say("another")
    assert pipe.tried == tried


def test_a_bar_on_a_terminal_yields_each_batch(monkeypatch) -> None:
    monkeypatch.setattr("hookrun.run.passes.progress._BETWEEN", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    for terminal in (True, False):
        monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
        screen = Screen()
        file = io.StringIO()
        shown = {"loss": 0.5}
        screen.console.file = file
        assert list(screen.track("cd", 4, "epoch 1/1", shown, start=2)) == ["c", "d"]
        drawn = file.getvalue()
        assert ("epoch 1/1" in drawn and "4/4" in drawn and "loss 0.5" in drawn) == terminal
        assert bool(drawn) == terminal


def test_invalid_sizes_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("0", None), ("", None), ("-3", None), ("wide", None), ("97", 97)):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("LINES", columns)
        assert Screen().width == width, columns
        assert Screen().height is None, "no terminal"
