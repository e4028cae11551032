"""No number and no nesting hangs or kills the process: each is a SpecError that names its key."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun import load_spec
from hookrun.compose.compose import compose_dict
from hookrun.errors import SpecError
from hookrun.tasks import parse_experiment

HUGE = 10**5_000
HOOK: dict[str, Any] = {"select": "fc", "hook": "forward"}
CAPTURE = {**HOOK, "action": "capture"}
ADDED = {**HOOK, "hook": "apply", "action": "add_parameter", "name": "x"}


def deep(kind: type, levels: int = 5_000) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


HOOKS: dict[str, tuple[dict[Any, Any], str]] = {
    "a deep value": ({**HOOK, "action": "add_bias", "value": deep(list)}, "value"),
    "a deep difference": (
        {**HOOK, "action": "add_bias", "value": {"run": "a", "minus": deep(dict)}},
        "value",
    ),
    "a deep step": ({**CAPTURE, "when": {"step": deep(list)}}, "when.step"),
    "a deep schedule": ({**CAPTURE, "when": deep(dict)}, "when"),
    "a deep target": ({**CAPTURE, "target": deep(list)}, "target"),
    "a deep index": ({**CAPTURE, "index": deep(list)}, "index"),
    "a deep count": ({**CAPTURE, "expect": deep(list)}, "expect"),
    "a deep selector": ({**CAPTURE, "select": deep(list)}, "select"),
    "a deep selector of mappings": ({**CAPTURE, "select": deep(dict)}, "select"),
    "a deep name of an action": ({**HOOK, "action": deep(list)}, "action"),
    "a deep hook type": ({**CAPTURE, "hook": deep(dict)}, "hook"),
    "a huge target": ({**CAPTURE, "target": HUGE}, "target"),
    "a huge subscript": ({**CAPTURE, "target": f"[{'9' * 5_000}]"}, "target"),
    "a subscript beyond 64 bits": ({**CAPTURE, "target": "[9223372036854775808]"}, "target"),
    "a huge index": ({**CAPTURE, "index": HUGE}, "index"),
    "a huge index as a text": ({**CAPTURE, "index": "9" * 900}, "index"),
    "an index beyond 64 bits": ({**CAPTURE, "index": "0:9223372036854775808"}, "index"),
    "digits of another script": ({**CAPTURE, "index": "٣"}, "index"),
    "a huge count": ({**CAPTURE, "expect": HUGE}, "expect"),
    "a huge count as a text": ({**CAPTURE, "expect": ">=" + "9" * 5_000}, "expect"),
    "a count of another script": ({**CAPTURE, "expect": "९"}, "expect"),
    "a huge step": ({**CAPTURE, "when": {"step": HUGE}}, "when.step"),
    "a step beyond bounds": ({**CAPTURE, "when": {"step": 10**16}}, "when.step"),
    "a start beyond bounds": ({**CAPTURE, "when": {"step": {"start": 10**16}}}, "when.step"),
    "a huge seed": ({**CAPTURE, "when": {"seed": HUGE}}, "when.seed"),
    "a seed beyond 63 bits": ({**HOOK, "action": "noise", "seed": 2**63}, "seed"),
    "a huge priority": ({**CAPTURE, "priority": HUGE}, "priority"),
    "a priority beyond bounds": ({**CAPTURE, "priority": 10**15}, "priority"),
    "a huge factor": ({**HOOK, "action": "scale", "factor": HUGE}, "factor"),
    "a shape beyond 64 bits": ({**ADDED, "shape": [2**70]}, "shape"),
    "a shape of a terabyte": ({**ADDED, "shape": [2**38]}, "shape"),
    "a shape whose product is one": ({**ADDED, "shape": [2**20, 2**20]}, "shape"),
    "a shape of 1,000 sizes": ({**ADDED, "shape": [1] * 1_000}, "shape"),
    "a huge reservoir": ({**CAPTURE, "keep": {"reservoir": 10**15}}, "keep.reservoir"),
    "a huge name": ({**CAPTURE, "x" * 1_000: 1}, ""),
    "a huge number as a name": ({**CAPTURE, HUGE: 1}, ""),
    "a huge action": ({**HOOK, "action": "x" * 10**6}, "action"),
}
SETTINGS = {
    "compute.threads": [0, 1_000_000, HUGE],
    "compute.capture_buffer": [0, 2**40],
    "data.workers": [-1, 10_000, HUGE],
    "data.batch_size": [0, 10**9, HUGE],
    "train.epochs": [-1, 10**13, HUGE],
    "train.steps": [0, 10**13],
    "train.limit_batches": [10**13],
    "train.accumulate": [10**13],
    "train.log_every": [10**13],
    "seed": [-1, 2**63, HUGE],
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_refused_with_its_key(name: str) -> None:
    hook, key = HOOKS[name]
    with pytest.raises(SpecError) as refused:
        load_spec({"a": hook})
    assert refused.value.errors[0].where.startswith(f"hooks.a.{key}".rstrip("."))
    assert len(str(refused.value)) < 5_000


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_is_refused_with_its_key(key: str) -> None:
    section, _, name = key.rpartition(".")
    for value in SETTINGS[key]:
        config = compose_dict()
        (config[section] if section else config)[name] = value
        with pytest.raises(SpecError) as refused:
            parse_experiment(config)
        assert [problem.where for problem in refused.value.errors] == [key]


def test_a_spec_that_contains_itself_is_refused() -> None:
    hook: dict[str, Any] = {**CAPTURE}
    hook["when"] = hook
    with pytest.raises(SpecError, match="nested more than 64 deep"):
        load_spec({"a": hook})
