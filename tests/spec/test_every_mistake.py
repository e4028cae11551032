"""All independent mistakes are reported together, in the order of the file."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import hookrun
from hookrun import tasks

MODEL = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
CLAMP = {"select": "0", "hook": "grad", "action": "clamp", "max": 1}


def refused(hooks: dict[str, Any]) -> hookrun.SpecError:
    with pytest.raises(hookrun.SpecError) as refusal:
        hookrun.compile({"hooks": hooks}, MODEL)
    return refusal.value


def places(error: hookrun.SpecError) -> list[str]:
    return [problem.where for problem in error.errors]


def test_a_wrong_key_a_wrong_value_and_a_selector_without_match() -> None:
    error = refused(
        {"a": CLAMP | {"mx": 2}, "b": CLAMP | {"max": "x"}, "c": CLAMP | {"select": "fc"}, "d": CLAMP}
    )
    assert places(error) == ["hooks.a.mx", "hooks.b.max", "hooks.c.select"]
    assert not error.notes


def test_the_selector_of_a_hook_that_is_wrong_elsewhere() -> None:
    wrong = {"select": "fc", "hook": "forward"}
    error = refused(
        {
            "a": CLAMP | {"mx": 2, "select": "fc"},
            "b": wrong | {"action": "clmap"},
            "c": wrong | {"enabled": False},
        }
    )
    assert places(error) == [
        "hooks.a.select",
        "hooks.a.mx",
        "hooks.b.select",
        "hooks.b.action",
        "hooks.c.action",
    ]


def test_a_hook_that_needs_a_parameter_of_a_wrong_one_is_not_reported() -> None:
    adds = {"select": "0", "hook": "apply", "action": "add_parameter", "name": "head", "shap": [3, 4]}
    needs = {"select": "0", "hook": "forward", "action": "linear", "weight": "head"}
    other = {"select": "fc", "hook": "forward", "action": "print"}
    error = refused({"adds": adds, "needs": needs, "other": other})
    assert places(error) == ["hooks.adds.shap", "hooks.adds.shape", "hooks.other.select"]
    assert error.notes == ("not checked: needs, which may need parameters that a hook with mistakes adds",)


def config(**sections: Any) -> dict[str, Any]:
    plain = {
        "task": {"name": "train"},
        "model": {"name": "cnn"},
        "data": {"name": "digits"},
        "train": {},
        "hooks": {},
    }
    return plain | sections


FC = {"select": "fc", "hook": "grad", "action": "clamp", "max": 1}


def test_all_sections_of_an_experiment_in_one_report() -> None:
    hooks = {"a": FC | {"mx": 1}, "b": FC | {"max": "x"}, "c": FC | {"select": "fd"}}
    train = {"epochs": -1, "optimizer": {"name": "Adma"}, "loss": "cros"}
    error = tasks.refusal(config(train=train, hooks=hooks, compute={"precision": "fp33"}, sead=3))
    assert places(error) == [
        "train.epochs",
        "train.optimizer.name",
        "train.loss",
        "hooks.a.mx",
        "hooks.b.max",
        "hooks.c.select",
        "compute.precision",
        "sead",
    ]


def test_wrong_data_leaves_the_selectors_to_be_checked_and_a_wrong_model_does_not() -> None:
    data = {"name": "tensors", "args": {"file": "nowhere.npz"}}
    hooks = {"a": FC | {"mx": 1}, "c": FC | {"select": "fd"}}
    error = tasks.refusal(config(data=data, hooks=hooks))
    assert places(error) == ["data.args.file", "hooks.a.mx", "hooks.c.select"]
    assert error.notes == ("shapes were not checked, because the data is not valid",)
    error = tasks.refusal(config(model={"name": "cnn", "args": {"widht": 3}}, data=data, hooks=hooks))
    assert places(error) == ["model.args.widht", "data.args.file", "hooks.a.mx"]
    assert error.notes == ("the hooks were not checked, because the model is not valid",)
    assert str(error).startswith("3 configuration errors\n") and error.notes[0] in str(error)


def test_a_missing_section_is_reported_once() -> None:
    whole = config(hooks={"a": FC}, train={"optimizer": {"name": "Adma"}})
    del whole["model"]
    assert places(tasks.refusal(whole)) == ["train.optimizer.name", "model"]


def test_mistakes_of_both_kinds_are_a_spec_error_and_misfits_alone_are_not() -> None:
    wrong = config(train={"optimizer": {"name": "Adma"}}, hooks={"c": FC | {"select": "fd"}})
    with pytest.raises(hookrun.SpecError) as refusal:
        tasks.prepare(tasks.parse_experiment(wrong))
    assert places(refusal.value) == ["train.optimizer.name", "hooks.c.select"]
    with pytest.raises(hookrun.CompileError):
        tasks.prepare(tasks.parse_experiment(config(hooks={"c": FC | {"select": "fd"}})))


def test_boolean_keys_are_reported_with_advice_to_quote_them() -> None:
    hook = FC | {True: 1, "when": {False: 2}}
    error = tasks.refusal(config(hooks={False: FC, "a": hook}, model={"name": "cnn", "args": {False: 1}}))
    assert places(error) == ["model.args.False", "hooks.False", "hooks.a.True", "hooks.a.when.False"]
    assert all(problem.hint.endswith("as true and false: quote the key") for problem in error.errors)


def test_an_error_without_a_problem_cannot_be_created() -> None:
    for kind in (hookrun.SpecError, hookrun.CompileError):
        with pytest.raises(ValueError, match="at least one problem"):
            kind([])


def test_a_mistake_in_the_weights_of_a_run_is_reported_there_only() -> None:
    for weights, where, says in (
        ({"runs": "x"}, "model.weights.runs", "did you mean 'run'?"),
        ({"run": "x", "checkpoint": "bset"}, "model.weights.checkpoint", "did you mean 'best'?"),
        ({"run": 3}, "model.weights.run", "found 3"),
        (3, "model.weights", "found 3"),
    ):
        error = tasks.refusal(config(model={"name": "mlp", "weights": weights}))
        (problem,) = [each for each in error.errors if "is missing" not in each.what]
        assert problem.where == where and says in str(problem), error
