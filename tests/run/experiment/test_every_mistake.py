"""All mistakes of one stage are reported together, in the order of the file; the next stage is not begun.

The stages: the command line; the file, which needs no torch; the model.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch import nn

import hookrun
from hookrun.errors import Refusal
from hookrun.run import tasks
from hookrun.run.experiment import names
from hookrun.run.experiment.metrics import losses, metrics

MODEL = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
CLAMP = {"select": "0", "hook": "grad", "action": "clamp", "max": 1}
FC = {"select": "fc", "hook": "grad", "action": "clamp", "max": 1}


def test_mistakes_in_hooks_come_before_missing_matches() -> None:
    hooks = {"a": CLAMP | {"mx": 2}, "b": CLAMP | {"max": "x"}, "c": CLAMP | {"select": "fc"}, "d": CLAMP}
    with pytest.raises(hookrun.SpecError) as of_spec:
        hookrun.compile({"hooks": hooks}, MODEL)
    assert places(of_spec.value) == ["hooks.a.mx", "hooks.b.max"]
    with pytest.raises(hookrun.CompileError) as of_hooks:
        hookrun.compile({"hooks": {"c": hooks["c"], "d": CLAMP, "e": CLAMP | {"select": "fd"}}}, MODEL)
    assert places(of_hooks.value) == ["hooks.c.select", "hooks.e.select"]


def test_all_sections_of_a_file_are_in_one_report() -> None:
    error = of_file(
        train={"epochs": -1, "loss": "cros"},
        data={"name": "digit", "transforms": {"resiez": {}}},
        task={"name": "train", "metrics": ["loss", "acuracy"]},
        hooks={"a": FC | {"mx": 1}, "b": FC | {"max": "x"}, "c": FC | {"select": "fd"}},
        compute={"precision": "fp33"},
        sead=3,
    )
    assert places(error) == [
        "task.metrics.1", "data.name", "data.transforms.resiez", "train.epochs", "train.loss", "hooks.a.mx",
        "hooks.b.max", "compute.precision", "sead",
    ]  # fmt: skip
    for name in ("'accuracy'", "'digits'", "'resize'", "'fp32'", "'seed'"):
        assert name in str(error)


def test_names_checked_before_torch_are_those_of_the_registries() -> None:
    assert set(names.LOSSES) == set(losses.LOSSES)
    assert set(names.METRICS) == set(metrics.METRICS)


def test_mistakes_of_the_model_stage_are_in_one_report() -> None:
    wrong = {"optimizer": {"name": "Adma"}}
    error = of_model(train=wrong, hooks={"c": FC | {"select": "fd"}, "d": FC | {"select": "fe"}})
    assert isinstance(error, hookrun.SpecError)
    assert places(error) == ["train.optimizer.name", "hooks.c.select", "hooks.d.select"]


def test_hooks_that_do_not_fit_alone_are_a_compile_error() -> None:
    error = of_model(hooks={"c": FC | {"select": "fd"}})
    assert isinstance(error, hookrun.CompileError)
    assert places(error) == ["hooks.c.select"]


def test_wrong_data_leaves_the_selectors_to_be_checked() -> None:
    data = {"name": "tensors", "args": {"file": "nowhere.npz"}}
    error = of_model(data=data, hooks={"c": FC | {"select": "fd"}})
    assert places(error) == ["data.args.file", "hooks.c.select"]
    assert error.notes == ("shapes were not checked, because the data is not valid",)


def test_a_wrong_model_leaves_the_hooks_unchecked() -> None:
    model = {"name": "cnn", "args": {"widht": 3}}
    error = of_model(model=model, hooks={"c": FC | {"select": "fd"}})
    assert places(error) == ["model.args.widht"]
    assert error.notes == ("the hooks were not checked, because the model is not valid",)
    assert str(error).startswith("1 configuration error\n")
    assert error.notes[0] in str(error)


def test_weights_of_a_missing_run_hide_no_mistakes() -> None:
    model = {"name": "cnn", "weights": {"run": "nowhere"}}
    error = of_model(model=model, hooks={"c": FC | {"select": "fd"}})
    assert places(error) == ["model.weights.run", "hooks.c.select"]


def test_a_missing_section_is_reported_once() -> None:
    whole = config(hooks={"a": FC}, train={"epochs": -1})
    del whole["model"]
    with pytest.raises(hookrun.SpecError) as refusal:
        tasks.parse_experiment(whole)
    assert places(refusal.value) == ["train.epochs", "model"]


def test_boolean_keys_are_reported_with_advice_to_quote_them() -> None:
    hook = FC | {True: 1, "when": {False: 2}}
    error = of_file(hooks={False: FC, "a": hook}, model={"name": "cnn", "args": {False: 1}})
    assert places(error) == ["model.args.False", "hooks.False", "hooks.a.True", "hooks.a.when.False"]
    for problem in error.errors:
        assert problem.hint.endswith("as true and false: quote the key")


@pytest.mark.parametrize(
    ("weights", "where", "says"),
    [
        ({"runs": "x"}, "model.weights.runs", "did you mean 'run'?"),
        ({"run": "x", "checkpoint": "bset"}, "model.weights.checkpoint", "did you mean 'best'?"),
        ({"run": 3}, "model.weights.run", "found 3"),
        (3, "model.weights", "found 3"),
    ],
)
def test_a_mistake_in_the_weights_of_a_run_is_reported_there(weights: Any, where: str, says: str) -> None:
    error = of_file(model={"name": "mlp", "weights": weights})
    (problem,) = [each for each in error.errors if "is missing" not in each.what]
    assert problem.where == where, error
    assert says in str(problem), error


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment=clip_fc", "hooks.clip_fc.maxx=3", "sede=1"],
        ["experiment=clip_fc", "+hooks.a={selct: fc, hook: forwad, action: captur}", "train.epochs=-1"],
    ],
    ids=["command line", "file"],
)
def test_mistakes_of_the_first_two_stages_are_told_without_torch(arguments: list[str]) -> None:
    script = "import sys; from hookrun.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False"], done.stderr


def places(error: Refusal) -> list[str]:
    return [problem.where for problem in error.errors]


def config(**sections: Any) -> dict[str, Any]:
    plain = {
        "task": {"name": "train"},
        "model": {"name": "cnn"},
        "data": {"name": "digits"},
        "train": {},
        "hooks": {},
    }
    return plain | sections


def of_file(**sections: Any) -> hookrun.SpecError:
    with pytest.raises(hookrun.SpecError) as refusal:
        tasks.parse_experiment(config(**sections))
    return refusal.value


def of_model(**sections: Any) -> Refusal:
    whole = config(**sections)
    with pytest.raises(Refusal) as refusal, tasks.in_order_of(whole):
        tasks.prepare(tasks.parse_experiment(whole))
    return refusal.value
