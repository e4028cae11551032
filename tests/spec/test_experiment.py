"""A configuration is validated as a whole: all mistakes together, each with its key path and the nearest names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.errors import SpecError
from hookrun.spec import parse_spec
from hookrun.spec.experiment import MOST_NEEDS, MOST_OVERRIDES, MOST_TEXT, Need, Needs, runs_of
from hookrun.tasks import parse_experiment

CLAMP = {"select": "fc", "hook": "grad", "action": "clamp", "max": 0.1}
ROOT: dict[str, Any] = {"model": {"name": "cnn"}, "data": {"name": "digits"}, "hooks": {"h": CLAMP}}


def problems(**changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_experiment(ROOT | changes)
    return {problem.where: f"{problem.what} {problem.hint}" for problem in caught.value.errors}


def test_a_valid_one_has_settings_and_hooks() -> None:
    experiment = parse_experiment(ROOT | {"seed": 3})
    assert experiment.settings.model.name == "cnn"
    assert [hook.name for hook in experiment.hooks.hooks] == ["h"]
    assert experiment.hooks.seed == 3


def test_all_mistakes_are_reported_together() -> None:
    found = problems(
        trian={},
        seed=-1,
        train={"epoch": 3, "loss": 1},
        hooks={"a": CLAMP | {"mx": 1, "hook": "gard"}, "b": {}},
    )
    assert set(found) == {
        "trian", "seed", "train.epoch", "train.loss", "hooks.a.mx", "hooks.a.hook", "hooks.b.action",
        "hooks.b.select", "hooks.b.hook",
    }  # fmt: skip
    assert "did you mean 'train'?" in found["trian"]
    assert "did you mean 'epochs'?" in found["train.epoch"]
    assert "did you mean 'grad'?" in found["hooks.a.hook"]


def test_an_experiment_without_its_package_line_is_an_error_that_says_so() -> None:
    assert "# @package _global_" in problems(experiment={"hooks": {}})["experiment"]


def test_trust_never_comes_from_a_file() -> None:
    assert "HOOKRUN_TRUST" in problems(trust=["mypkg"])["trust"]


def test_hooks_may_be_given_alone_or_under_their_key() -> None:
    assert parse_spec({"h": CLAMP}) == parse_spec({"hooks": {"h": CLAMP}})
    assert parse_spec({}).hooks == ()
    assert parse_spec({"hooks": None}).hooks == ()


def test_a_factory_is_allowed_with_name_python_only() -> None:
    assert "factory" in problems(model={"name": "cnn", "factory": "a:b"})["model"]


def test_the_report_is_the_text_of_the_error() -> None:
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


def test_weights_by_path_and_metrics_by_name_are_not_runs() -> None:
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
def test_a_wrong_name_and_too_many_are_refused(raw: Any) -> None:
    with pytest.raises(ValidationError):
        NEEDS.validate_python(raw)


def test_the_reserved_name_is_explained() -> None:
    with pytest.raises(ValidationError, match="previous is the run before"):
        NEEDS.validate_python({"previous": GOOD})
