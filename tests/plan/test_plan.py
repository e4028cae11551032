"""The plan can be printed, compared, installed only on a matching model, and says what a graph cannot contain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hookrun
from hookrun.plan.plan import uncompilable, unexportable

SCALE: dict[str, Any] = {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}


def plan(**changes: Any) -> hookrun.Plan:
    return hookrun.compile({"h": SCALE | changes}, nn.Sequential(nn.Linear(2, 2)))


def test_the_hash_is_equal_if_two_plans_do_the_same() -> None:
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
    """With another hash seed, so that sets of strings have another order."""
    hooks = {"b": SCALE, "a": {"select": {"type": ["Linear", "ReLU"]}, "hook": "forward", "action": "print"}}
    model = "nn.Sequential(nn.Linear(2, 2), nn.ReLU())"
    code = f"from torch import nn; import hookrun; print(hookrun.compile({hooks!r}, {model}).hash)"
    hashes = {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    environment = {**os.environ, **hashes}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    here = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert found.stdout.strip() == hookrun.compile(hooks, here).hash


def test_the_hash_follows_the_content_of_files(tmp_path) -> None:
    hashes = []
    for value in (1.0, 2.0):
        save_file({"k": torch.full((2,), value)}, tmp_path / "x.safetensors")
        hashes.append(plan(factor={"file": str(tmp_path / "x.safetensors")}).hash)
    assert hashes[0] != hashes[1]


def test_plan_json_is_plain_data() -> None:
    (hook,) = json.loads(json.dumps(plan().to_dict()))["hooks"]
    assert (hook["name"], hook["params"], hook["targets"][0]["path"]) == ("h", {"factor": 2.0}, "0")


def test_another_model_is_refused_at_installation() -> None:
    other = nn.Sequential(nn.ReLU())
    with pytest.raises(
        hookrun.CompileError, match="the plan is for a Linear at 0, this model has a ReLU there"
    ):
        plan().install(other).__enter__()
    assert not other[0]._forward_hooks


def test_plain_edits_are_part_of_a_graph_and_of_an_exported_program() -> None:
    assert uncompilable(plan()) == unexportable(plan()) == uncompilable(plan(when={"step": 3})) == []


def test_hooks_of_training_are_refused_in_an_exported_program() -> None:
    for changes, where, why in (
        ({"when": {"step": 3}}, "hooks.h.when.step", "an exported program has no step"),
        ({"hook": "output_grad"}, "hooks.h", "belongs to training"),
    ):
        (problem,) = unexportable(plan(**changes))
        assert problem.where == where and why in problem.what and not uncompilable(plan(**changes))
