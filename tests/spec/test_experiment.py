"""A configuration is validated as a whole: every mistake at once, each with its key path and the nearest names."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.errors import SpecError
from hookrun.spec import parse_spec
from hookrun.tasks import parse_experiment

CLAMP = {"select": "fc", "hook": "grad", "action": "clamp", "max": 0.1}
ROOT: dict[str, Any] = {"model": {"name": "cnn"}, "data": {"name": "digits"}, "hooks": {"h": CLAMP}}


def problems(**changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_experiment(ROOT | changes)
    return {problem.where: f"{problem.what} {problem.hint}" for problem in caught.value.errors}


def hook_problems(**changes: Any) -> dict[str, str]:
    return problems(
        hooks={"h": {key: value for key, value in (CLAMP | changes).items() if value is not None}}
    )


def test_a_good_one_has_settings_and_hooks() -> None:
    experiment = parse_experiment(ROOT | {"seed": 3})
    assert experiment.settings.model.name == "cnn"
    assert [hook.name for hook in experiment.hooks.hooks] == ["h"]
    assert experiment.hooks.seed == 3


def test_every_mistake_is_told_at_once() -> None:
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


def test_an_experiment_that_forgot_its_package_says_so() -> None:
    assert "# @package _global_" in problems(experiment={"hooks": {}})["experiment"]


def test_trust_never_comes_from_a_file() -> None:
    assert "HOOKRUN_TRUST" in problems(trust=["mypkg"])["trust"]


@pytest.mark.cases(
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
        ({"target": "["}, "hooks.h.target", "stops making sense"),
        ({"expect": "many"}, "hooks.h.expect", "expected a count"),
        ({True: 1}, "hooks.h.True", "YAML reads on, off"),
        ({"parameters": True}, "hooks.h.parameters", "unknown key"),
    ],
)
def test_mistakes_in_a_hook(changes: dict[Any, Any], where: str, what: str) -> None:
    found = (
        hook_problems(**changes)
        if all(isinstance(key, str) for key in changes)
        else problems(hooks={"h": CLAMP | changes})
    )
    assert set(found) == {where}
    assert what in found[where]


@pytest.mark.cases("hooks", [["a"], "fc", {"h": "clamp"}, {"h": ["clamp"]}, {3: CLAMP}, {"a b": CLAMP}])
def test_hooks_are_a_mapping_from_names_to_mappings(hooks: Any) -> None:
    assert "expected" in next(iter(problems(hooks=hooks).values()))


def test_hooks_may_be_given_bare_or_under_their_key() -> None:
    assert parse_spec({"h": CLAMP}) == parse_spec({"hooks": {"h": CLAMP}})
    assert parse_spec({}).hooks == ()
    assert parse_spec({"hooks": None}).hooks == ()


def test_a_factory_goes_with_python_only() -> None:
    assert "factory" in problems(model={"name": "cnn", "factory": "a:b"})["model"]


def test_the_report_is_the_text_of_the_error() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({"h": CLAMP | {"mx": 1}})
    assert str(caught.value) == "1 configuration error\n  hooks.h.mx: unknown key\n      did you mean 'max'?"
