"""Rules that tripped: on the first line of the page, in its table of checks, and as marks of curves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from made_curves import made_run, planned, record, shown

STEPS = 40


def trip(hook: str, module: str, step: int, **values: Any) -> dict[str, Any]:
    kept = {"ok": False, "policy": "warn", "class": "ReLU", "message": f"{hook} tripped, step {step}"}
    return record(hook, module, step, "check", **{**kept, **values})


DEAD = {"of": "zeros", "rule": "max", "bound": 0.99, "steps": 5}
HOOKS = [
    planned("seen", ["relu1", "relu2"]),
    planned("dead", ["relu1", "relu2"], action="check"),
    planned("other", ["relu1"], hook="output_grad", action="check"),
]


def zeros() -> list[dict[str, Any]]:
    return [
        record("seen", name, step, zeros=step / 40) for step in range(STEPS) for name in ("relu1", "relu2")
    ]


def rings(source: str) -> list[tuple[float, float, str]]:
    found = re.findall(r'<circle class="trip" cx="([\d.]+)" cy="([\d.]+)" r="5"><title>(.*?)</title>', source)
    return [(float(x), float(y), text) for x, y, text in found]


def test_a_rule_marks_the_curve_of_its_statistic(tmp_path: Path) -> None:
    tripped = [
        trip("dead", "relu2", 30, number=1.0, **DEAD),
        trip("dead", "relu2", 35, number=1.0, **DEAD | {"of": "mean"}),
        trip("other", "relu2", 10, number=1.0, **DEAD),
    ]
    page = shown(made_run(tmp_path / "run", [*zeros(), *tripped], HOOKS)).source
    [(x, y, text)] = rings(page)
    [line] = re.findall(r'<path class="line c1" d="([^"]+)"', page)
    points = re.findall(r"([\d.]+) ([\d.]+)", line)
    assert (x, y) == tuple(map(float, points[30])), (
        "at step 30, not where another statistic or hook type tripped"
    )
    assert text == "dead: max 0.99"
    assert "ring: a rule tripped" in page


def test_a_spike_marks_the_curve_of_the_loss(tmp_path: Path) -> None:
    spike = trip("spike", "", 7, of="loss", rule="max_ratio", bound=10, number=50.0, steps=5)
    losses = [50.0 if step == 7 else 1.0 for step in range(12)]
    page = shown(made_run(tmp_path / "run", [spike], [], losses)).source
    [(x, y, text)] = rings(page)
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", re.findall(r'<path class="line c0" d="([^"]+)"', page)[0])
    assert (x, y) == tuple(map(float, points[7]))
    assert y == min(float(height) for _, height in points)
    assert text == "spike: max_ratio 10"


def test_the_first_line_says_how_many_rules_tripped(tmp_path: Path) -> None:
    tripped = [
        trip("dead", "relu1", 30, number=1.0, **DEAD),
        trip("dead", "relu2", 30, number=1.0, **DEAD),
        trip("small", "relu1", 30, number=1.0, **DEAD),
        trip("spike", "fc.weight", 31, policy="stop", of="norm", rule="max_ratio", bound=10, number=99.0),
    ]
    page = shown(made_run(tmp_path / "run", tripped)).source
    said = "3 rules tripped: dead, small, spike"
    assert f"{said} · hookrun</title>" in page
    assert f"{said}</h1>" in page
    assert "rules tripped" not in shown(made_run(tmp_path / "other", zeros())).source
    assert "1 rule tripped: dead" in shown(made_run(tmp_path / "one", tripped[:1])).source


def test_the_table_tells_steps_and_units(tmp_path: Path) -> None:
    units = {"number": [1.0] * 3, "units": [4, 5, 63], **DEAD}
    tripped = [
        trip("dead", "relu1", 30, **units),
        trip("dead", "relu1", 38, **units | {"units": [1, 4, 5, 63]}),
    ]
    page = shown(made_run(tmp_path / "run", tripped)).source
    row = re.findall(r"<tr><td>dead</td>.*?</tr>", page, re.S)[0]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
    assert cells[1:7] == ["relu1", "dead tripped, step 30", "30", "38", "2", "1, 4, 5, 63"]


def test_a_stranger_s_rules_are_only_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    strange = [
        trip(bad, bad, 3, of=bad, rule=bad, bound=[1], number="x", steps=bad, units=bad, policy={"a": bad}),
        trip(
            "dead", "relu1", 10**9, of="zeros", rule="max", bound=bad, units=[bad, -1, True, 2], number=None
        ),
        trip("dead", "relu1", 3, of=["zeros"], rule={"max": 1}, bound=None, units={"a": 1}, number=[]),
    ]
    page = shown(made_run(tmp_path / "run", [*zeros(), *strange], HOOKS))
    assert page.tags.count("script") == 1
    assert "2 rules tripped" in page.source
