"""The plan as a table."""

from __future__ import annotations

import io
from typing import Any

import torch
from hooking import one_hook
from rich.console import Console
from small_nets import Net
from torch import nn

import hookrun
from hookrun.plan.table import argument, notes, show, shown_name, size

SCALE = {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}


def plan(**changes: Any) -> hookrun.Plan:
    return hookrun.compile({"h": SCALE | changes}, nn.Sequential(nn.Linear(2, 2)))


def test_it_prints_as_a_table() -> None:
    shown = plan(when={"mode": "eval"})
    header, *rows = str(shown).splitlines()
    names = ("#", "hook", "modules", "class", "hook type", "action", "parameters", "when", "shape")
    values = ("h ", "Linear", "forward", "scale", "factor=2", "eval", shown.hash[:12])
    assert all(name in header for name in names)
    assert all(value in "\n".join(rows) for value in values)


def test_parameters_are_shown_short() -> None:
    assert (
        "factor=2 " in str(plan())
        and argument(0.10) == "0.1"
        and argument(torch.ones(2, 3)) == "tensor[2, 3]"
    )
    assert argument(tuple(range(40))).startswith("[0, 1, 2") and len(argument(tuple(range(40)))) == 32
    assert len(argument({"a": tuple(range(40)), "b": "x" * 40})) == 60


def test_of_many_modules_some_are_shown_and_the_rest_counted() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(10)))
    assert "and 7 more" in str(hookrun.compile({"h": SCALE | {"select": "*"}}, model))


def test_the_whole_plan_names_every_module() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    plan = hookrun.compile(one_hook("*", "forward", "print"), model)
    whole, some = io.StringIO(), io.StringIO()
    show(plan, Console(file=whole, no_color=True, width=200))
    show(plan, Console(file=some, no_color=True, width=200), limit=4)
    assert whole.getvalue().splitlines()[0].split()[:3] == ["#", "hook", "modules"]
    assert whole.getvalue().count("Linear") == 12 and "more" not in whole.getvalue()
    assert some.getvalue().count("Linear") == 3 and "and 9 more" in some.getvalue()


def test_in_a_narrow_terminal_each_hook_has_a_few_lines() -> None:
    narrow = io.StringIO()
    show(plan(), Console(file=narrow, force_terminal=True, color_system=None, highlight=False, width=30))
    assert narrow.getvalue().splitlines()[:2] == ["0  h: forward scale factor=2 always", "   0  Linear  -"]


def test_sizes_unreached_modules_and_the_hash_are_shown_below_the_table() -> None:
    model = Net(lambda m, x: m.fc(x), fc=nn.Linear(2, 3), later=nn.Identity())
    found = hookrun.compile(one_hook("*"), model, example=((torch.ones(4, 2),), {}))
    said = notes(found)
    assert said[0].startswith("h: captures ") and said[0].endswith(" per sample")
    assert said[1:] == ["h: the example did not reach later", f"plan {found.hash[:12]}"]
    assert notes(hookrun.compile({}, model))[:1] == ["no hooks"]


def test_a_match_is_shown_with_its_other_names_and_the_root_as_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("again", model[0])
    found = hookrun.compile({"h": SCALE | {"select": ["", "0"]}}, model).hooks[0].matches
    assert [shown_name(match) for match in found] == ["(root)", "0 (also again)"]


def test_bytes_are_readable() -> None:
    assert [size(count) for count in (0, 999, 1500, 123_456, 2.5e9, 7e13)] == [
        "0 B", "999 B", "1.5 kB", "123 kB", "2.5 GB", "70 TB",
    ]  # fmt: skip
