"""One hook: its keys, its identity, its schedule, and every mistake in it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.engine.hook_types import HOOK_TYPES, OF_EVERY_HOOK
from hookrun.engine.spec import parse_spec
from hookrun.engine.spec.hook import HookSpec, hook_keys, parse_hooks
from hookrun.engine.spec.when import Range, When, parse_expect
from hookrun.errors import SpecError

CLAMP = {"select": "fc", "hook": "grad", "action": "clamp", "max": 0.1}


def problems(hooks: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_spec({"hooks": hooks})
    return {problem.where: f"{problem.what} {problem.hint}" for problem in caught.value.errors}


def hook(**changes: Any) -> HookSpec:
    (found,), wrong = parse_hooks({"h": CLAMP | changes})
    assert not wrong
    return found


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"action": "clmap"}, "hooks.h.action", "did you mean 'clamp'"),
        ({"action": None}, "hooks.h.action", "is missing it is one of: add_bias"),
        ({"select": None}, "hooks.h.select", "is missing"),
        ({"selct": "fc"}, "hooks.h.selct", "did you mean 'select'?"),
        ({"select": 1.5}, "hooks.h.select", "quote it"),
        ({"min": 1}, "hooks.h", "min 1.0 is greater than max 0.1"),
        ({"max": "high"}, "hooks.h.max", "found 'high'"),
        ({"when": {"stp": 3}}, "hooks.h.when.stp", "unknown key"),
        ({"index": "a"}, "hooks.h.index", "expected a whole number"),
        ({"target": "["}, "hooks.h.target", "cannot be read from"),
        ({"expect": "many"}, "hooks.h.expect", "expected a count"),
        ({True: 1}, "hooks.h.True", "YAML reads on, off"),
        ({"parameters": True}, "hooks.h.parameters", "unknown key"),
        ({"max": {"file": "x.pt", "hook": "a"}}, "hooks.h.max.hook", "does not go with the keys beside it"),
    ],
)
def test_mistakes_in_a_hook(changes: dict[Any, Any], where: str, what: str) -> None:
    body = {key: value for key, value in (CLAMP | changes).items() if value is not None}
    found = problems({"h": body})
    assert set(found) == {where}
    assert what in found[where]


@pytest.mark.parametrize("hooks", [["a"], "fc", {"h": "clamp"}, {"h": ["clamp"]}, {3: CLAMP}, {"a b": CLAMP}])
def test_hooks_are_a_mapping_from_names_to_mappings(hooks: Any) -> None:
    assert "expected" in next(iter(problems(hooks).values()))


def test_checkpoints_identify_a_hook_by_its_parameters() -> None:
    same = (hook(), hook(priority=3), hook(when={"step": 3}), hook(index="0"))
    assert len({each.identity for each in same}) == 1
    other = (hook(), hook(max=0.2), hook(select="fd"), hook(min=0))
    assert len({each.identity for each in other}) == 4


def test_a_hook_knows_whether_it_draws() -> None:
    assert not hook().takes_part
    for part in ({"index": "0"}, {"tokens": -1}, {"heads": [0]}):
        assert hook(hook="forward", **part).takes_part
    assert not hook(hook="forward").draws_in_forward
    assert hook(hook="forward", when={"probability": 0.5}).draws_in_forward
    assert not hook(hook="grad", when={"probability": 0.5}).draws_in_forward


def test_runs_are_found_also_under_minus() -> None:
    run = {"run": "base", "capture": "c", "minus": {"run": "other", "capture": "c"}}
    (found,), wrong = parse_hooks(
        {"h": {"select": "fc", "hook": "forward", "action": "scale", "factor": run}}
    )
    assert not wrong
    assert [(where, value.run) for where, value in found.run_values()] == [
        ("hooks.h.factor", "base"),
        ("hooks.h.factor.minus", "other"),
    ]


def test_keys_of_the_meant_action_are_no_mistakes() -> None:
    assert set(problems({"a": CLAMP | {"action": "clmap", "mx": 1}})) == {"hooks.a.action", "hooks.a.mx"}
    saved = {"select": "fc", "hook": "saved_tensor", "action": "stats", "parameters": True}
    assert set(problems({"a": saved})) == {"hooks.a.hook"}
    assert "parameters" in hook_keys("saved_tensors")
    assert "parameters" not in hook_keys("forward")
    for name in HOOK_TYPES:
        assert hook_keys(name) | {"action"} >= OF_EVERY_HOOK


# ---- `when` and `expect`


@pytest.mark.parametrize(
    ("counts", "inside", "outside"),
    [
        (When(step={"start": 2, "end": 8, "every": 3}).step, (2, 5), (0, 1, 3, 8)),
        (When(step={"every": 10}).step, (0, 10, 20), (1, 9, 11)),
        (When(step={"end": 2}).step, (0, 1), (2, 3)),
        (When(step=[0, 5]).step, (0, 5), (1, 4)),
        (When(step=3).step, (3,), (0, 2, 4)),
        (parse_expect(3), (3,), (2, 4)),
        (parse_expect(">=1"), (1, 99), (0,)),
        (parse_expect("0..2"), (0, 2), (3,)),
        (parse_expect("<= 4"), (0, 4), (5,)),
        (parse_expect("2"), (2,), (1,)),
    ],
)
def test_steps_exclude_their_end(counts: Any, inside: Any, outside: Any) -> None:
    for number in inside:
        assert number in counts
    for number in outside:
        assert number not in counts


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"step": {"start": 5, "end": 5}}, "never fires"),
        ({"step": "10:20"}, "a range is written {start: 0, end: 100, every: 10}"),
        ({"step": [-1]}, "expected a count from 0 on"),
        ({"step": True}, "expected a number"),
        ({"step": {"evry": 3}}, "Extra inputs"),
        ({"probability": 1.5}, "less than or equal to 1"),
        ({"mode": "training"}, "'train', 'eval' or 'any'"),
    ],
)
def test_an_impossible_schedule_is_refused(raw: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        When.model_validate(raw)


def test_an_unrestricted_schedule_is_recognised() -> None:
    assert When().always
    assert When(seed=3).always
    for raw in ({"mode": "train"}, {"step": 0}, {"probability": 0.5}):
        assert not When(**raw).always


def test_a_schedule_is_shown_in_words() -> None:
    assert str(When()) == "always"
    shown = str(When(mode="eval", step=Range(start=1, end=9, every=2), call=0))
    assert shown == "eval, step 1:9 every 2, call 0"
    assert str(When(step={"every": 10}, probability=0.5)) == "step every 10, p=0.5"


@pytest.mark.parametrize("raw", ["3..1", "some", -1, 1.5, True, None, ">1"])
def test_other_expectations_are_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="found"):
        parse_expect(raw)
