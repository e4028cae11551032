"""A task is one file: its module declares everything about it, and no other file asks for its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookrun.cli import main
from hookrun.tasks import parse_experiment, task_of, tasks
from hookrun.tasks.base import Task

PACKAGE = Path(__file__).parents[2] / "hookrun"
ALSO_MEAN_OTHER_THINGS = {"train", "plan", "modules"}
"""A split, a mode of modules and a section; keys of JSON files."""


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The package's files."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def experiment(**task: object):
    return parse_experiment({"model": {"name": "cnn"}, "data": {"name": "digits"}, "task": task})


def test_each_task_is_in_the_module_of_its_name() -> None:
    assert {name: task.__module__ for name, task in tasks().items()} == {
        name: f"hookrun.tasks.{name}" for name in tasks()
    }


def test_each_task_is_complete() -> None:
    for name, task in tasks().items():
        assert issubclass(task, Task) and task.__doc__
        assert not task.__abstractmethods__, name
        assert task.show is not Task.show or task.execute is not Task.execute
        assert not task.shows or task.show is not Task.show


def test_the_experiment_that_names_no_task_trains() -> None:
    assert task_of(experiment()).name == "train"
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


def test_no_other_file_decides_by_the_name_of_a_task(trees: dict[str, ast.Module]) -> None:
    own = {f"tasks/{name}{place}" for name in tasks() for place in (".py", "/__init__.py")}
    found = {file: list(decisions(tree)) for file, tree in trees.items() if file not in own}
    assert {file: where for file, where in found.items() if where} == {}


@pytest.mark.parametrize(
    "source",
    [
        'settings.task.name == "train"',
        'settings.task.name in ("train", "plan")',
        'READ_ONLY = frozenset({"plan", "modules"})',
        'name: Literal["train", "evaluate"]',
        'line.get("split") == "probe"',
        'text != "task=plan"',
        'match settings.task.name:\n    case "train":\n        pass',
        'RUNNERS = {"train": train, "predict": predict}',
    ],
)
def test_a_decision_is_found(source: str) -> None:
    assert list(decisions(ast.parse(source)))
