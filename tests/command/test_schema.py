"""Editors accept what hookrun accepts, and mark what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import hookrun
from hookrun.command import schema
from hookrun.engine.keys import ROOT_KEYS
from hookrun.run.experiment.settings import Settings

CONF = Path(__file__).parents[2] / "conf"
VALIDATOR = Draft202012Validator(schema.experiment_schema())
CLAMP = {"select": "fc", "hook": "grad", "action": "clamp", "max": 0.1}


def valid(**hook: Any) -> bool:
    return VALIDATOR.is_valid({"hooks": {"h": hook}})


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(schema.experiment_schema())


@pytest.mark.parametrize("group", ["experiment", "hooks", "task"])
def test_every_file_of_a_shipped_group_is_valid(group: str) -> None:
    files = sorted(CONF.glob(f"{group}/**/*.yaml"))
    assert files
    for file in files:
        content = yaml.safe_load(file.read_text()) or {}
        assert not list(VALIDATOR.iter_errors(content if group == "experiment" else {group: content})), file
        if group == "hooks":
            assert not list(VALIDATOR.iter_errors(content)), f"{file} as a file of its own"


def test_a_selector_may_have_each_of_its_forms() -> None:
    for select in ("fc", 3, ["conv1", {"type": "Linear"}], {"path": "**", "leaf": True, "min_params": 1}):
        assert valid(**CLAMP | {"select": select})
    assert not valid(**CLAMP | {"select": 1.5})


@pytest.mark.parametrize(
    "keys",
    [
        {"action": "print", "when": {"step": 4, "epoch": [0, 1], "call": 0, "rank": 0}},
        {"action": "print", "when": {"step": {"start": 1, "end": 9, "every": 2}}, "expect": "0..2"},
        {"action": "stats", "of": "mean"},
        {"action": "capture", "reduce": {"mean": 2}},
        {"action": "fill", "value": 0, "hook": "apply", "parameters": "bias"},
    ],
    ids=str,
)
def test_one_number_or_name_may_stand_for_a_list(keys: dict[str, Any]) -> None:
    hook = {"select": "fc", "hook": "forward", **keys}
    assert hookrun.load_spec({"h": hook})
    assert valid(**hook)


@pytest.mark.parametrize(
    "keys",
    [
        {"when": {"step": -1}},
        {"when": {"step": {"evry": 2}}},
        {"expect": "x"},
        {"expect": ">=1..2"},
        {"of": "men"},
    ],
    ids=str,
)
def test_typos_in_short_forms_are_errors(keys: dict[str, Any]) -> None:
    assert not valid(select="fc", hook="forward", action="stats", **keys)


def test_typos_are_errors() -> None:
    assert valid(**CLAMP)
    assert not valid(**CLAMP, mx=1)
    assert not valid(**CLAMP | {"action": "clmap"})
    assert not valid(**CLAMP | {"hook": "gard"})
    assert not valid(**CLAMP | {"hook": "apply"}), "apply does not carry clamp"
    assert not valid(hook="grad", action="clamp", max=1), "select is missing"
    assert not VALIDATOR.is_valid({"trian": {"epochs": 3}})
    assert not VALIDATOR.is_valid({"train": {"epoch": 3}})


def test_the_keys_of_a_task_are_allowed_with_its_name() -> None:
    def valid_task(**keys: Any) -> bool:
        return VALIDATOR.is_valid({"task": keys})

    assert valid_task(name="predict", split="train")
    assert valid_task(split="train"), "the task is chosen elsewhere"
    assert valid_task(name="modules", select=["fc", {"type": "Linear"}])
    assert not valid_task(name="predit")
    assert not valid_task(name="predict", split="test")
    assert not valid_task(name="predict", splt="train")
    assert valid_task(name="modules", split="train"), "a key of another task is noted, not refused"


def test_only_saved_tensors_allows_the_key_parameters() -> None:
    saved = {"select": "fc", "hook": "saved_tensors", "action": "cast", "dtype": "bfloat16"}
    assert valid(**saved, parameters=True)
    assert not valid(select="fc", hook="apply", action="freeze", parameters=True)


def test_an_interpolation_may_replace_any_value() -> None:
    hook = {"select": "${vars.s}", "hook": "${h}", "action": "clamp", "max": "${m}", "when": {"step": "${w}"}}
    assert valid(**hook)
    assert valid(action="${a}", factor=3)
    for section in (
        {"train": {"epochs": "${n}", "optimizer": {"name": "${o}"}}},
        {"train": "${t}"},
        {"tags": ["${x}"]},
    ):
        assert VALIDATOR.is_valid(section)
    assert not VALIDATOR.is_valid({"train": {"epochs": "three"}})


def test_a_mistake_is_reported_for_the_named_action() -> None:
    def said(content: Any) -> list[tuple[str, str]]:
        return [(error.json_path, error.message) for error in VALIDATOR.iter_errors(content)]

    extra = "Additional properties are not allowed ('mx' was unexpected)"
    assert said({"hooks": {"h": CLAMP | {"mx": 1}}}) == [("$.hooks.h", extra)]
    assert said({"h": CLAMP | {"mx": 1}}) == [("$.h", extra)], "in a set of hooks"
    assert said({"train": {"epochs": "x"}}) == [("$.train.epochs", "'x' is not of type 'integer'")]
    assert said({"hooks": {"h": "x"}}) == [("$.hooks.h", "'x' is not of type 'object'")]


def test_a_hook_without_an_action_changes_one_of_another_file() -> None:
    assert VALIDATOR.is_valid({"defaults": ["clip_fc"], "hooks": {"clip_fc": {"max": 0.1}}})
    assert not VALIDATOR.is_valid({"hooks": {"clip_fc": {"mx": 0.1}}})


def test_the_command_writes_a_file_or_to_stdout(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["schema", str(tmp_path / "s.json")])
    assert schema.main() == 0
    monkeypatch.setattr(sys, "argv", ["schema"])
    assert schema.main() == 0
    assert json.loads((tmp_path / "s.json").read_text()) == json.loads(capsys.readouterr().out)


def test_sections_are_exactly_the_keys_of_the_root() -> None:
    assert (*Settings.model_fields, "hooks") == ROOT_KEYS
