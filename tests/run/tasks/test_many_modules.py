"""Work that grows with the number of modules: counted in executed lines of hookrun, for n and for 2n modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.cli import main

MODEL = """
from torch import nn

def build(blocks):
    body = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(64, 10))
"""
BLOCKS = 40


@pytest.mark.parametrize("select", ["null", "'type:ReLU'"])
def test_the_tree_of_modules_is_linear_in_them(trusted, select) -> None:
    trusted(deep=MODEL)

    def show(blocks: int) -> None:
        model = ["model=python", "model.factory=deep:build", f"+model.args={{blocks: {blocks}}}"]
        assert main(["task=modules", f"task.select={select}", "task.depth=1", *model]) == 0

    show(1)
    assert growth(show) < 1.1


@pytest.mark.parametrize("action", ["stats", "capture"])
def test_a_plan_is_linear_in_the_modules(action) -> None:
    def plan(blocks: int) -> None:
        _, plan = compiled(blocks, action)
        assert len(plan.to_dict()["hooks"][0]["targets"]) == 3 * blocks + 1
        assert "seen" in str(plan)

    plan(1)
    assert growth(plan) < 1.1


def test_entering_a_block_is_linear_in_the_modules() -> None:
    def enter(blocks: int) -> None:
        with plans[blocks].install(models[blocks]) as hooks:
            assert len(hooks.sites) == 3 * blocks + 1

    models = dict[int, nn.Module]()
    plans = dict[int, hookrun.Plan]()
    for blocks in (1, BLOCKS, 2 * BLOCKS, 4 * BLOCKS):
        models[blocks], plans[blocks] = compiled(blocks, "capture")
    enter(1)
    assert growth(enter) < 1.1


def lines_of(work: Callable[[], Any]) -> int:
    """How many lines of hookrun `work` executes, each turn of a loop counted."""
    count = 0
    before = sys.gettrace()

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return step

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        return step if "/hookrun/" in frame.f_code.co_filename else None

    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def growth(work: Callable[[int], Any]) -> float:
    """How many times as many lines it takes for each further module among 4n as among 2n; 1 if it is linear."""
    few = lines_of(partial(work, BLOCKS))
    more = lines_of(partial(work, 2 * BLOCKS))
    most = lines_of(partial(work, 4 * BLOCKS))
    return (most - more) / (more - few) / 2


def chain(blocks: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks)))


def compiled(blocks: int, action: str) -> tuple[nn.Module, hookrun.Plan]:
    model = chain(blocks)
    hooks = {"seen": {"select": "**", "hook": "forward", "action": action}}
    return model, hookrun.compile(hooks, model, example=((torch.ones(2, 4),), {}))
