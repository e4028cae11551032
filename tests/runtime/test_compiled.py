"""What a hook does inside a compiled graph is what it does outside, counted in a tensor and switched by one.

`semantics/test_compilers_and_wrappers.py` compiles; here the same functions run as they are.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from draws import normal
from torch import Tensor, nn

import hookrun
from hookrun.runtime import Installation
from hookrun.runtime.compiled import InGraph, in_graph_of

INPUT = normal(2, 4)
CLIPPED = {"hook": "forward", "action": "clip_norm", "max_norm": 0.1}
SCALED = {"hook": "forward", "action": "scale", "factor": 3}
pytestmark = pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # of hooks that did not fire


class Net(nn.Module):
    """A tuple with a mapping, integers and None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Any:
        return self.pair(x)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + 1, {"more": x * 2, "number": torch.arange(3), "none": None}


def hooked(**keys: Any) -> Installation:
    return hookrun.hooked(Net(), {"h": {"select": "pair", **keys}})


def traced(hooks: Installation, *, targeted: bool = True) -> InGraph:
    (site,) = hooks.sites
    return in_graph_of(site, targeted=targeted)


@pytest.mark.parametrize(
    "keys",
    [
        SCALED,
        {**SCALED, "target": "[1].more"},
        {**SCALED, "index": "..., 0:2"},
        CLIPPED,
        {**CLIPPED, "target": "[0]"},
        {**SCALED, "when": {"step": 0}},
        {"hook": "forward", "action": "clamp", "max": 0.1},
    ],
)
def test_a_value_is_changed_as_outside_a_graph_and_its_containers_stay(keys: dict[str, Any]) -> None:
    bare = Pair()(INPUT)
    with hooked(**keys) as hooks, torch.no_grad():
        (first, others), inside = hooks.clock.model(INPUT), traced(hooks)
        found = inside.fire(bare)
    assert type(found) is tuple and type(found[1]) is dict and list(found[1]) == list(others)
    torch.testing.assert_close(found[0], first)
    torch.testing.assert_close(found[1]["more"], others["more"])
    assert found[1]["number"] is bare[1]["number"] and found[1]["none"] is None
    assert hooks.sites[0].firings == 2 and torch.equal(bare[0], INPUT + 1)


def test_a_schedule_is_a_tensor_that_is_written_at_each_step() -> None:
    with hooked(**SCALED, when={"step": [1], "epoch": {"start": 1}}) as hooks:
        inside, value = traced(hooks), (INPUT, {})
        switch = hooks.clock.in_graphs[-1][0]
        for epoch, step, factor in ((0, 1, 1), (1, 0, 1), (1, 1, 3), (1, 2, 1)):
            hooks.clock.epoch, hooks.clock.step = epoch, step
            assert torch.equal(inside.fire(value)[0], INPUT * factor), (epoch, step)
        assert hooks.clock.in_graphs[-1][0] is switch and hooks.sites[0].firings == 1


def test_a_mode_that_does_not_fit_changes_and_counts_nothing() -> None:
    with hooked(**SCALED, when={"mode": "eval"}) as hooks:
        inside = traced(hooks)
        assert inside.fire(INPUT) is INPUT and hooks.sites[0].firings == 0
        hooks.clock.model.eval()
        assert torch.equal(inside.fire(INPUT), INPUT * 3) and hooks.sites[0].firings == 1


def test_the_gradient_of_a_watched_tensor_is_changed() -> None:
    with hooked(hook="output_grad", action="scale", factor=3) as hooks:
        inside, x = traced(hooks, targeted=False), INPUT.clone().requires_grad_()
        y = x * 1
        inside.watch(y)
        assert hooks.sites[0].firings == 0, "a gradient that is never computed is not counted"
        y.sum().backward()
    assert x.grad is not None and (x.grad == 3).all() and hooks.sites[0].firings == 1


def test_counts_can_be_set_and_are_put_back_after_a_block_that_fails() -> None:
    with hooked(**SCALED) as hooks:
        (site,), inside = hooks.sites, traced(hooks)
        inside.fire(INPUT)
        with pytest.raises(ZeroDivisionError), hooks.uncounted():
            inside.fire(INPUT)
            raise ZeroDivisionError
        assert (site.firings, site.fired) == (1, 0)
        site.load_state_dict({**site.state_dict(), "fired": 5, "in_graphs": 7})
        inside.fire(INPUT)
        assert (site.firings, site.fired) == (13, 5)
        site.fired_in_graphs = None
        site.load_state_dict({**site.state_dict(), "in_graphs": 7})
        assert site.firings == 12, "it cannot be in a graph now"


def test_the_functions_of_a_graph_do_not_keep_a_site_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        for keys in (SCALED, {**SCALED, "when": {"step": 0}}):
            with hooked(**keys) as hooks:
                inside = traced(hooks)
                inside.fire(INPUT)
                alive = weakref.ref(inside)
                del inside
                assert alive() is None
    finally:
        gc.enable()
