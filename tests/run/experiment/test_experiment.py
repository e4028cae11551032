"""A configuration is validated as a whole: all mistakes together, each with its key path and the nearest names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.engine import spec
from hookrun.engine.keys import MAX_DEPTH, MAX_NAME, MAX_TEXT
from hookrun.engine.spec import (
    MAX_INTEGER,
    in_file_order,
    parse_spec,
    refuse_beyond_limits,
    without_boolean_keys,
)
from hookrun.errors import Problem, SpecError
from hookrun.run.experiment.settings import MOST_NEEDS, MOST_OVERRIDES, MOST_TEXT, Need, Needs, runs_of
from hookrun.run.tasks import parse_experiment

CLAMP = {"select": "fc", "hook": "grad", "action": "clamp", "max": 0.1}
ROOT: dict[str, Any] = {"model": {"name": "cnn"}, "data": {"name": "digits"}, "hooks": {"h": CLAMP}}


def problems(**changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_experiment(ROOT | changes)
    return {problem.where: f"{problem.what} {problem.hint}" for problem in caught.value.errors}


def test_a_valid_experiment_has_hooks() -> None:
    experiment = parse_experiment(ROOT | {"seed": 3})
    assert experiment.settings.model.name == "cnn"
    assert [hook.name for hook in experiment.hooks.hooks] == ["h"]
    assert experiment.hooks.seed == 3


@pytest.mark.parametrize(
    ("section", "where", "said"),
    [
        ({"experiment": {"hooks": {}}}, "experiment", "# @package _global_"),
        ({"defaults": ["_self_"]}, "defaults", "load_spec(experiment=NAME)"),
        ({"trust": ["mypkg"]}, "trust", "HOOKRUN_TRUST"),
        ({"model": {"name": "cnn", "factory": "a:b"}}, "model", "factory"),
    ],
)
def test_keys_that_a_file_may_not_set_are_explained(section: Any, where: str, said: str) -> None:
    assert said in problems(**section)[where]


def test_hooks_may_be_given_alone_or_under_their_key() -> None:
    assert parse_spec({"h": CLAMP}) == parse_spec({"hooks": {"h": CLAMP}})
    assert parse_spec({}).hooks == ()
    assert parse_spec({"hooks": None}).hooks == ()
    with pytest.raises(SpecError) as caught:
        parse_spec({"h": CLAMP | {"mx": 1}})
    assert str(caught.value) == "1 configuration error\n  hooks.h.mx: unknown key\n      did you mean 'max'?"


def named(**sections: Any) -> dict[str, str]:
    return dict(runs_of(parse_experiment(ROOT | sections).settings))


def test_each_run_has_the_key_path_that_names_it() -> None:
    metrics = ["loss", {"name": "kl", "against": {"run": "base"}}]
    model = {"name": "cnn", "weights": {"run": "trained"}}
    assert named(model=model, task={"name": "predict", "metrics": metrics}) == {
        "model.weights.run": "trained",
        "task.metrics.1.against.run": "base",
    }
    assert named(model={"name": "cnn", "weights": "w.pt"}, task={"name": "predict", "metrics": "loss"}) == {}
    assert named(model={"name": "cnn"}, task={"name": "modules"}) == {}


NEEDS = TypeAdapter[dict[str, Need]](Needs)
GOOD = {"experiment": "folder/train"}


def test_a_need_is_shown_as_its_command() -> None:
    needs = NEEDS.validate_python({"base": GOOD | {"overrides": ["seed=1", "+hooks.x=y"]}})
    assert str(needs["base"]) == "experiment folder/train seed=1 +hooks.x=y"


@pytest.mark.parametrize(
    "raw",
    [
        {"previous": GOOD},
        {"1st": GOOD},
        {"a b": GOOD},
        {"a" * 101: GOOD},
        {"a": {"experiment": "../train"}},
        {"a": {"experiment": "train.yaml"}},
        {"a": {"experiment": "/train"}},
        {"a": {"experiment": ""}},
        {"a": GOOD | {"overrides": ["x" * (MOST_TEXT + 1)]}},
        {"a": GOOD | {"overrides": ["x"] * (MOST_OVERRIDES + 1)}},
        {"a": GOOD | {"override": []}},
        {f"n{number}": GOOD for number in range(MOST_NEEDS + 1)},
    ],
)
def test_a_wrong_name_is_refused(raw: Any) -> None:
    with pytest.raises(ValidationError):
        NEEDS.validate_python(raw)
    with pytest.raises(ValidationError, match="previous is the run before"):
        NEEDS.validate_python({"previous": GOOD})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def test_specs_just_within_the_limits_are_accepted() -> None:
    for value in (nested(MAX_DEPTH), "x" * MAX_TEXT, MAX_INTEGER - 1, 1 - MAX_INTEGER, {"n" * MAX_NAME: 1}):
        refuse_beyond_limits(value)


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        (nested(MAX_DEPTH + 1), ".".join("a" * 65), "nested more than 64 deep"),
        ({"a": ["x", "x" * (MAX_TEXT + 1)]}, "a.1", "a text of 65,537 characters"),
        ({"a": MAX_INTEGER}, "a", "more than 64 bits"),
        ({"a": {-MAX_INTEGER: 1}}, "a", "more than 64 bits"),
        ({"a": {"n" * (MAX_NAME + 1): 1}}, "a", "a name of 257 characters"),
        ({"a": (2**80, 2**90), "b": 2**99}, "a.0", "more than 64 bits"),
    ],
)
def test_the_first_place_beyond_a_limit_is_reported(value: Any, where: str, what: str) -> None:
    with pytest.raises(SpecError) as caught:
        refuse_beyond_limits(value)
    [problem] = caught.value.errors
    assert problem.where == where
    assert what in problem.what


def test_recursive_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "MAX_VALUES", 100)
    refuse_beyond_limits([1] * 99)
    with pytest.raises(SpecError, match="more than 100 values"):
        refuse_beyond_limits([1] * 100)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SpecError, match="nested more than 64 deep"):
        refuse_beyond_limits(endless)


def test_arguments_of_a_function_of_the_user_may_have_any_keys() -> None:
    config = {"model": {"args": {"options": {True: 1}}}, "data": {"args": {"by": {False: 2}}}}
    assert without_boolean_keys(config) == (config, [])


def test_each_mistake_is_reported_once() -> None:
    problems = [Problem(where, "") for where in ("b", "c", "a", "b")]
    assert [each.where for each in in_file_order(problems, {"b": {"y": 1}, "a": 3})] == ["b", "a", "c"]
