"""Which hooks a compiled graph or an exported program can contain, and why the others cannot."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import hookrun
from hookrun.plan.plan import uncompilable, unexportable

SCALE: dict[str, Any] = {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}


def told(check: Any, **changes: Any) -> dict[str, str]:
    plan = hookrun.compile({"h": SCALE | changes}, nn.Sequential(nn.Linear(2, 2)))
    return {problem.where: problem.what for problem in check(plan)}


@pytest.mark.parametrize(
    ("changes", "where", "why"),
    [
        ({"action": "print", "factor": None}, "hooks.h", "passes values to Python"),
        ({"action": "noise", "factor": None, "std": 1.0}, "hooks.h", "draws from a generator of its own"),
        ({"action": lambda value: value, "factor": None}, "hooks.h", "runs your own Python"),
        ({"factor": lambda value: value}, "hooks.h.factor", "calls a function of yours"),
        ({"when": {"call": 1}}, "hooks.h.when.call", "in a graph only once"),
        ({"when": {"probability": 0.5}}, "hooks.h.when.probability", "in a graph only once"),
    ],
)
def test_each_reason_is_reported_at_its_key(changes: dict[str, Any], where: str, why: str) -> None:
    given = {key: value for key, value in (SCALE | changes).items() if value is not None}
    plan = hookrun.compile({"h": given}, nn.Sequential(nn.Linear(2, 2)))
    assert [(each.where, why in each.what) for each in uncompilable(plan)] == [(where, True)]


def test_plain_edits_are_part_of_a_graph() -> None:
    assert told(uncompilable) == told(unexportable) == {}
    assert told(uncompilable, when={"step": 3}) == {}


def test_hooks_of_training_are_refused_in_an_exported_program() -> None:
    assert "an exported program has no step" in told(unexportable, when={"step": 3})["hooks.h.when.step"]
    gradient = told(unexportable, hook="output_grad")
    assert "belongs to training" in gradient["hooks.h"] and told(uncompilable, hook="output_grad") == {}
