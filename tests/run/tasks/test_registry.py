"""Tasks: a file each, which no other file asks for by name; their keys, splits, metrics, and the samples they reach."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hookrun.cli import main
from hookrun.errors import HookrunError, SpecError
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.goal import check_objective, goal_of, required_goal
from hookrun.run.experiment.model_task import samples_of_a_pass
from hookrun.run.experiment.task import Ready, Task
from hookrun.run.tasks import parse_experiment, show, task_of, tasks
from hookrun.run.tasks.under_hooks import TaskUnderHooks
from hookrun.store.objective import Goal

PACKAGE = Path(__file__).parents[3] / "hookrun"
OF_STUDIES = {"probe": "captures", "similarity": "captures"} | {
    name: name for name in ("attribute", "compare", "effects", "generate", "lens")
}
"""Task -> the folder of its study."""
ALSO_MEAN_OTHER_THINGS = {"train", "plan", "modules"}
"""A split, a mode of modules and a section; keys of JSON files."""


def test_each_task_is_in_the_module_of_its_name() -> None:
    for name, task in tasks().items():
        if name in OF_STUDIES:
            assert task.__module__ == f"hookrun.studies.{OF_STUDIES[name]}.task"
        else:
            assert task.__module__ == f"hookrun.run.tasks.{name}"


def test_each_task_is_complete() -> None:
    for name, task in tasks().items():
        assert issubclass(task, Task)
        assert task.__doc__
        assert not task.__abstractmethods__, name
        assert task.show is not Task.show or task.execute is not Task.execute
        assert not task.shows or task.show is not Task.show


def test_the_experiment_that_names_no_task_trains() -> None:
    assert task_of(experiment({})).name == "train"
    assert sum("is_default" in vars(task) for task in tasks().values()) == 1


@pytest.mark.parametrize("task", ["train", "modules"])
def test_a_key_that_the_task_does_not_use_is_noted(task: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    conf = tmp_path / "conf/experiment"
    conf.mkdir(parents=True)
    header = "# @package _global_\ndefaults: [{override /task: predict}]\n"
    (conf / "mine.yaml").write_text(header + "task: {split: train}\ntrain: {limit_batches: 1}\n")
    command = ["--config-dir", "conf", "experiment=mine", "compute=cpu", "compute.threads=1"]
    assert main([*command, f"task={task}"]) == 0
    assert f"NOTE: task.split is not used by task={task}\n" in capsys.readouterr().out
    assert main([*command, "task=plan"]) == 0
    assert "NOTE:" not in capsys.readouterr().out, "the experiment's own task uses it"


# ---- no other file asks for a task by name


def decisions(tree: ast.Module) -> Iterator[str]:
    """The places where a program decides by the name of a task, as source text."""
    names = set(tasks())
    typed = {f"task={name}" for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            about_tasks = "task" in ast.unparse(node).replace("task=", "")
            found = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)} & (
                names | typed
            )
            if found - (set() if about_tasks else ALSO_MEAN_OTHER_THINGS):
                yield ast.unparse(node)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            values = [each.value for each in node.elts if isinstance(each, ast.Constant)]
            if values and len(values) == len(node.elts) and names >= set(values):
                yield ast.unparse(node)
        elif isinstance(node, ast.Dict):
            keys = {each.value for each in node.keys if isinstance(each, ast.Constant)}
            if keys and names >= keys and len(keys) > 1:
                yield ast.unparse(node)
        elif isinstance(node, ast.Match) and "task" in ast.unparse(node.subject):
            cases = [each for case in node.cases for each in ast.walk(case.pattern)]
            if any(isinstance(each, ast.Constant) and each.value in names for each in cases):
                yield ast.unparse(node.subject)


def test_no_other_file_decides_by_the_name_of_a_task() -> None:
    of_tasks = {Path(str(inspect.getsourcefile(task))) for task in tasks().values()}
    for path in set(PACKAGE.rglob("*.py")) - of_tasks:
        assert list(decisions(ast.parse(path.read_text(encoding="utf-8")))) == [], path


TRAIN = {"name": "train"}
SIZES = {"train": 95, "val": 45}


def experiment(task: dict[str, Any], **sections: Any) -> Experiment:
    plain = {"model": {"name": "mlp"}, "data": {"name": "digits", "batch_size": 10}}
    return parse_experiment({**plain, "compute": {"device": "cpu"}, **sections, "task": task})


def reach(
    task: dict[str, Any], sizes: Mapping[str, int | None] = SIZES, **train: Any
) -> tuple[int | None, int | None]:
    made = experiment(task, train=train)
    of = task_of(made)
    assert isinstance(of, TaskUnderHooks)
    return of.samples_in_reach(made.settings, sizes), of.samples_in_all(made.settings, sizes)


def test_the_samples_that_hooks_can_see() -> None:
    assert reach({"name": "predict"}) == (45, 45)
    assert reach({"name": "predict", "split": "train"}, limit_batches=3) == (30, 30)
    assert reach({"name": "predict", "split": "all"}, limit_batches=5) == (None, 50 + 45)
    assert samples_of_a_pass(experiment(TRAIN).settings, None) is None


def test_only_shuffled_epochs_meet_all_samples() -> None:
    assert reach(TRAIN, epochs=2, limit_batches=3) == (95, 2 * (30 + 30))
    assert reach(TRAIN, epochs=2, limit_batches=3, shuffle=False) == (30, 2 * (30 + 30))
    assert reach(TRAIN, epochs=3) == (95, 3 * (95 + 45))
    assert reach(TRAIN, epochs=3, steps=4) == (95, None), "it may end earlier"
    assert reach(TRAIN, {"train": None, "val": 5}) == (None, None)


def measures(**task: object) -> dict[str, str | None]:
    made = experiment({"name": "evaluate", **task})
    return dict(task_of(made).measures(made.settings))


def test_only_metrics_of_its_split_can_be_optimized() -> None:
    assert measures() == {"val/loss": "minimize", "val/accuracy": "maximize"}
    found = measures(split="train", metrics=["perplexity"])
    assert found == {"train/perplexity": "minimize"}
    assert measures(metrics=["loss"]) == {"val/loss": "minimize"}


def test_a_training_has_numbers_of_the_validation() -> None:
    found = measures(name="train")
    assert found["val/loss"] == found["train/loss"] == "minimize"
    assert found["val/accuracy"] == "maximize"
    assert next(iter(found)).startswith("val/")
    found = measures(name="train", metrics=["rank"])
    assert found["val/rank"] == "minimize"
    assert "val/accuracy" not in found


def why(objective: Any = None, **task: Any) -> str:
    with pytest.raises(SpecError) as error:
        required_goal(experiment(TRAIN | task, objective=objective))
    return str(error.value)


def test_the_goal_is_the_validation_accuracy() -> None:
    usual = experiment(TRAIN)
    assert goal_of(usual) == required_goal(usual) == Goal("val/accuracy", "maximize", "best")
    asked = {"metric": "train/loss", "direction": "maximize", "of": "last"}
    assert goal_of(experiment(TRAIN, objective=asked)) == Goal("train/loss", "maximize", "last")


def test_without_a_goal_there_is_a_reason() -> None:
    assert "objective.metric: task=predict logs neither accuracy nor loss" in why(name="predict")
    misspelt = why("val/acuracy")
    assert "found 'val/acuracy', which this run does not log" in misspelt
    assert "did you mean 'val/accuracy'" in misspelt
    assert "task=train logs" in misspelt
    generate = why("val/kl_first", name="generate", without_hooks=True)
    assert "objective.direction: is not known for 'val/kl_first'" in generate
    assert "objective.metric: is not given" in why(name="generate", without_hooks=True)


def test_a_misspelt_metric_is_refused() -> None:
    check_objective(experiment(TRAIN, objective="probe/accuracy"), ["probe"])
    check_objective(experiment({"name": "predict"}, objective="val/mine"), [])  # logs nothing to compare
    for others, metric in (([], "probe/accuracy"), (["val"], "val/acuracy")):
        with pytest.raises(SpecError, match="which this run does not log"):
            check_objective(experiment(TRAIN, objective=metric), others)


def test_only_some_tasks_have_a_backward_pass() -> None:
    with pytest.raises(SpecError, match="task=train has a backward pass of its own"):
        experiment(TRAIN | {"backward": {"score": "top"}})


def test_a_task_of_one_kind_refuses_the_other() -> None:
    probe = Ready(experiment({"name": "probe"}))
    modules = Ready(experiment({"name": "modules"}))
    with pytest.raises(HookrunError, match="task=probe is run, not shown"):
        show(probe)
    with pytest.raises(HookrunError, match="task=modules is shown, not run"):
        modules.task.execute(modules, None)
