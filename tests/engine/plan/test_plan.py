"""The plan is a table that can be compared, fits one model, and says what a graph cannot contain."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hooking import one_hook
from rich.console import Console
from small_nets import Net
from torch import nn

import hookrun
from hookrun.engine.plan.plan import uncompilable, unexportable
from hookrun.engine.plan.table import argument, notes, show, shown_name, size

SCALE: dict[str, Any] = {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}


def plan(**changes: Any) -> hookrun.Plan:
    return hookrun.compile({"h": SCALE | changes}, nn.Sequential(nn.Linear(2, 2)))


def test_the_hash_is_equal_if_two_plans_do_the_same() -> None:
    assert plan().hash == plan().hash
    assert plan() == plan()
    assert hash(plan()) == hash(plan())
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


def test_plan_json_is_plain_data() -> None:
    (hook,) = json.loads(json.dumps(plan().to_dict()))["hooks"]
    assert hook["name"] == "h"
    assert hook["params"] == {"factor": 2.0}
    assert hook["targets"][0]["path"] == "0"


def test_another_model_is_refused_at_installation() -> None:
    other = nn.Sequential(nn.ReLU())
    with pytest.raises(
        hookrun.CompileError, match="the plan is for a Linear at 0, this model has a ReLU there"
    ):
        plan().install(other).__enter__()
    assert not other[0]._forward_hooks


def test_plain_edits_are_part_of_a_graph() -> None:
    assert uncompilable(plan()) == unexportable(plan()) == uncompilable(plan(when={"step": 3})) == []


def test_hooks_of_training_are_refused_in_an_exported_program() -> None:
    for changes, where, why in (
        ({"when": {"step": 3}}, "hooks.h.when.step", "an exported program has no step"),
        ({"hook": "output_grad"}, "hooks.h", "belongs to training"),
    ):
        (problem,) = unexportable(plan(**changes))
        assert problem.where == where
        assert why in problem.what
        assert not uncompilable(plan(**changes))


# ---- the table


def test_it_prints_as_a_table() -> None:
    shown = plan(when={"mode": "eval"})
    header, *rows = str(shown).splitlines()
    names = ("#", "hook", "modules", "class", "hook type", "action", "parameters", "when", "shape")
    values = ("h ", "Linear", "forward", "scale", "factor=2", "eval", shown.hash[:12])
    for name in names:
        assert name in header
    for value in values:
        assert value in "\n".join(rows)


def test_parameters_are_shown_short() -> None:
    assert "factor=2 " in str(plan())
    assert argument(0.10) == "0.1"
    assert argument(torch.ones(2, 3)) == "tensor[2, 3]"
    assert argument(tuple(range(40))).startswith("[0, 1, 2")
    assert len(argument(tuple(range(40)))) == 32
    assert len(argument({"a": tuple(range(40)), "b": "x" * 40})) == 60


def test_of_many_modules_some_are_shown() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(10)))
    assert "and 7 more" in str(hookrun.compile({"h": SCALE | {"select": "*"}}, model))


def test_the_whole_plan_names_every_module() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    plan = hookrun.compile(one_hook("*", "forward", "print"), model)
    whole = io.StringIO()
    some = io.StringIO()
    show(plan, Console(file=whole, no_color=True, width=200))
    show(plan, Console(file=some, no_color=True, width=200), limit=4)
    assert whole.getvalue().splitlines()[0].split()[:3] == ["#", "hook", "modules"]
    assert whole.getvalue().count("Linear") == 12
    assert "more" not in whole.getvalue()
    assert some.getvalue().count("Linear") == 3
    assert "and 9 more" in some.getvalue()


def test_in_a_narrow_terminal_each_hook_has_a_few_lines() -> None:
    narrow = io.StringIO()
    show(plan(), Console(file=narrow, force_terminal=True, color_system=None, highlight=False, width=30))
    assert narrow.getvalue().splitlines()[:2] == ["0  h: forward scale factor=2 always", "   0  Linear  -"]


def test_notes_stand_below_the_table() -> None:
    model = Net(lambda m, x: m.fc(x), fc=nn.Linear(2, 3), later=nn.Identity())
    found = hookrun.compile(one_hook("*"), model, example=((torch.ones(4, 2),), {}))
    said = notes(found)
    assert said[0].startswith("h: captures ")
    assert said[0].endswith(" per sample")
    assert said[1:] == ["h: the example did not reach later", f"plan {found.hash[:12]}"]
    assert notes(hookrun.compile({}, model))[:1] == ["no hooks"]


def test_a_match_is_shown_with_its_other_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("again", model[0])
    found = hookrun.compile({"h": SCALE | {"select": ["", "0"]}}, model).hooks[0].matches
    assert [shown_name(match) for match in found] == ["(root)", "0 (also again)"]
    (tied,) = hookrun.compile(one_hook("**.weight", "grad"), model).hooks[0].matches
    assert shown_name(tied) == "0.weight (also again.weight)"
    assert tied.shape == "[2, 2]"


def test_bytes_are_readable() -> None:
    assert [size(count) for count in (0, 999, 1500, 123_456, 2.5e9, 7e13)] == [
        "0 B", "999 B", "1.5 kB", "123 kB", "2.5 GB", "70 TB",
    ]  # fmt: skip
