"""The size of the object of `--json`: what is long is cut, with a count, and the rest is as it was."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hookrun import compile
from hookrun.command.json_cut import MOST_BYTES, written
from hookrun.engine.plan.table import data

MANY = 5_000


def cut(said: dict[str, Any]) -> Any:
    return json.loads(written(said, full=False))


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    """The plan of a hook on each of 5,000 modules."""
    model = nn.Sequential(*(nn.Identity() for _ in range(MANY)))
    spec = {"seen": {"select": "type:Identity", "hook": "forward", "action": "stats"}}
    return data(compile(spec, model))


def test_a_plan_of_thousands_of_modules_is_small(plan: dict[str, Any]) -> None:
    assert len(written({"plan": plan}, full=False)) < MOST_BYTES == 20_000
    (hook,) = cut({"plan": plan})["plan"]["hooks"]
    assert hook["matches"] == [str(number) for number in range(20)]
    assert hook["more"] == 4980


def test_the_full_form_has_every_match(plan: dict[str, Any]) -> None:
    (hook,) = json.loads(written({"plan": plan}, full=True))["plan"]["hooks"]
    assert hook["matches"] == [str(number) for number in range(MANY)]
    assert "more" not in hook


@pytest.mark.parametrize("of_each", [1, 250])
def test_a_plan_of_many_hooks_is_small_as_well(of_each: int) -> None:
    matches = [f"encoder.layers.{number}.self_attn.q_proj" for number in range(of_each)]
    hook = {"name": "h", "matches": matches, "shape": ["[2, 197, 768]"] * of_each}
    said = {"plan": {"hooks": [hook] * (MANY // of_each)}}
    assert len(written(said, full=False)) < MOST_BYTES
    found = cut(said)["plan"]
    assert len(found["hooks"]) + found.get("more", 0) == MANY // of_each


def test_names_of_any_length_are_small_as_well() -> None:
    names = [f"{number}{'x' * 10_000}" for number in range(50)]
    said = {"fired": {"h": dict.fromkeys(names, 1)}, "plan": {"hooks": [{"name": "h", "matches": names}]}}
    assert len(written(said, full=False)) < MOST_BYTES


def test_a_module_may_be_called_more() -> None:
    fired = {"hook": {"more": 3, **{f"m{number}": 1 for number in range(99)}}}
    found = cut({"fired": fired})
    assert found["fired"]["hook"]["more"] == 3
    assert len(found["fired"]["hook"]) + found["more"] == 100


def test_numbers_that_json_lacks_are_words() -> None:
    said = {"metrics": {"loss": math.nan, "accuracy": math.inf}}
    assert written(said, full=True) == '{"metrics": {"loss": "NaN", "accuracy": "Infinity"}}'


def test_texts_of_strangers_cannot_act_on_a_terminal() -> None:
    line = written({"notes": ["\x1b[31m<script>\u202e\ud800\n"]}, full=False)
    assert line.isprintable()
    assert line.isascii()


def test_a_text_that_was_asked_for_stays_whole() -> None:
    text = "x" * (2 * MOST_BYTES)
    assert cut({"text": text, "notes": ["short"]}) == {"text": text, "notes": ["short"]}


@given(st.integers(0, 300), st.integers(1, 300))
def test_what_is_left_out_is_counted(count: int, width: int) -> None:
    said = {"jobs": [{"job": str(number), "reason": "x" * width} for number in range(count)]}
    found = cut(said)
    assert found["jobs"] == said["jobs"][: len(found["jobs"])]
    assert len(found["jobs"]) + found.get("more", 0) == count
