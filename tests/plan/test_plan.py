"""The plan can be printed, compared, and installed only where it fits."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

import hookrun
from hookrun.plan.table import show

SCALE = {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}


def plan(**changes: Any) -> hookrun.Plan:
    return hookrun.compile({"h": SCALE | changes}, nn.Sequential(nn.Linear(2, 2)))


def test_the_hash_says_whether_two_plans_do_the_same() -> None:
    assert plan().hash == plan().hash
    assert plan() == plan() and hash(plan()) == hash(plan())
    changes = [
        {"factor": 3.0},
        {"when": {"step": 3}},
        {"priority": 1},
        {"index": "0"},
        {"hook": "forward_pre"},
    ]
    assert len({plan().hash, *(plan(**change).hash for change in changes)}) == 6
    assert hookrun.compile({"h": SCALE}, nn.ModuleList([nn.Linear(2, 2)])).hash != plan().hash


def test_the_hash_does_not_depend_on_the_example() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    checked = hookrun.compile({"h": SCALE}, model, example=((torch.ones(1, 2),), {}))
    assert checked.hash == plan().hash


def test_the_hash_is_the_same_in_another_process() -> None:
    model = "nn.Sequential(nn.Linear(2, 2))"
    code = f"from torch import nn; import hookrun; print(hookrun.compile({{'h': {SCALE!r}}}, {model}).hash)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == plan().hash


def test_the_hash_follows_the_content_of_files(tmp_path) -> None:
    hashes = []
    for value in (1.0, 2.0):
        save_file({"k": torch.full((2,), value)}, tmp_path / "x.safetensors")
        hashes.append(plan(factor={"file": str(tmp_path / "x.safetensors")}).hash)
    assert hashes[0] != hashes[1]


def test_plan_json_is_plain_data() -> None:
    (hook,) = json.loads(json.dumps(plan().to_dict()))["hooks"]
    assert (hook["name"], hook["params"], hook["targets"][0]["path"]) == ("h", {"factor": 2.0}, "0")


def test_it_prints_as_a_table() -> None:
    text = str(plan(when={"mode": "eval"}))
    for word in ("#", "hook", "modules", "class", "hook type", "action", "parameters", "when", "shape"):
        assert word in text.splitlines()[0]
    assert all(
        word in text
        for word in (
            "h ",
            "Linear",
            "forward",
            "scale",
            "factor=2",
            "eval",
            plan(when={"mode": "eval"}).hash[:12],
        )
    )


def test_many_modules_are_shown_as_some_and_a_number() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(10)))
    assert "and 7 more" in str(hookrun.compile({"h": SCALE | {"select": "*"}}, model))


def test_another_model_is_refused_at_installation() -> None:
    other = nn.Sequential(nn.ReLU())
    with pytest.raises(
        hookrun.CompileError, match="the plan is for a Linear at 0, this model has a ReLU there"
    ):
        plan().install(other).__enter__()
    assert not other[0]._forward_hooks


def test_the_same_structure_is_accepted() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad(), plan().install(model):
        hooked = model(torch.ones(1, 2))
    assert torch.equal(hooked, model(torch.ones(1, 2)) * 2)


def test_the_whole_plan_names_every_module() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    plan = hookrun.compile({"h": {"select": "*", "hook": "forward", "action": "print"}}, model)
    whole, some = io.StringIO(), io.StringIO()
    show(plan, Console(file=whole, no_color=True, width=200))
    show(plan, Console(file=some, no_color=True, width=200), limit=4)
    assert whole.getvalue().count("Linear") == 12 and "more" not in whole.getvalue()
    assert some.getvalue().count("Linear") == 3 and "and 9 more" in some.getvalue()
