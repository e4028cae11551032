"""The section `task`: keys of other tasks are checked and ignored, unknown keys are errors."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
from pydantic import ValidationError

from hookrun.run.experiment.experiment import Experiment, read_experiment
from hookrun.run.experiment.settings import TaskKeys
from hookrun.run.experiment.task_keys import BackwardPass, Sampling

ROOT: dict[str, Any] = {"model": {"name": "cnn"}, "data": {"name": "digits"}}


class Cook(TaskKeys):
    task_name: ClassVar[str] = "cook"
    is_default: ClassVar[bool] = True
    minutes: int = 5


class Bake(TaskKeys):
    task_name: ClassVar[str] = "bake"
    heat: Literal["low", "high"] = "low"
    minutes: int = 60


class Fry(Cook):
    task_name: ClassVar[str] = "fry"


TASKS = {task.task_name: task for task in (Bake, Fry, Cook)}


def test_a_task_without_a_name_is_the_default() -> None:
    experiment = parsed({"name": "bake", "heat": "high"})
    assert experiment.settings.task == Bake(heat="high")
    assert experiment.settings.task.name == "bake"
    assert experiment.notes == ()
    # that it is the default is not inherited
    assert read_experiment(ROOT, TASKS)[0].settings.task == Cook()
    assert parsed({"minutes": 3}).settings.task == Cook(minutes=3)


def test_a_key_of_another_task_must_be_valid_there() -> None:
    experiment = parsed({"name": "cook", "minutes": 3, "heat": "low"})
    assert experiment.settings.task == Cook(minutes=3)
    assert experiment.notes == ("task.heat is not used by task=cook",)
    assert problems({"name": "cook", "heat": "hot"}) == {"task.heat": "found 'hot': expected 'low' or 'high'"}


def test_a_key_of_no_task_is_an_error_with_the_nearest_names() -> None:
    assert problems({"name": "cook", "heta": 1}) == {"task.heta": "unknown key did you mean 'heat'?"}
    assert problems({"nmae": "cook"}) == {"task.nmae": "unknown key did you mean 'name'?"}
    assert "YAML reads on, off" in problems({True: 1})["task.True"]


@pytest.mark.parametrize("name", ["bak", None, 3, ["bake"]])
def test_an_unknown_task_is_an_error(name: Any) -> None:
    found = problems({"name": name, "heat": "hot"})
    assert set(found) == {"task.name", "task.heat"}
    assert found["task.name"].startswith(f"found {name!r}, which is not a task ")
    assert ("there are: bake, cook, fry" if name in (None, 3) else "did you mean 'bake'?") in found[
        "task.name"
    ]


def test_a_name_is_a_choice_of_the_defaults_list() -> None:
    for raw in (None, ["bake"]):
        assert problems(raw) == {"task": f"found {raw!r}, expected a mapping its keys: name, heat, minutes"}
    assert "in its defaults list: `- override /task: bake`; its keys: name" in problems("bake")["task"]


def test_the_text_of_sampling_has_the_given_keys() -> None:
    assert str(Sampling()) == "temperature 1"
    assert str(Sampling(temperature=0.5, top_k=3, top_p=0.9)) == "temperature 0.5, top_k 3, top_p 0.9"


def test_a_score_selects_what_the_gradients_are_of() -> None:
    texts = {"label": "the logit of the label", "output": "the output", "loss": "the loss"}
    for score, text in texts.items():
        assert str(BackwardPass.model_validate({"score": score})) == text
    assert str(BackwardPass.model_validate({"score": "class", "class": 0})) == "the logit of class 0"


@pytest.mark.parametrize(
    ("section", "raw"),
    [
        (Sampling, {"temperature": 0}),
        (Sampling, {"temperature": float("nan")}),
        (Sampling, {"temperature": 1001}),
        (Sampling, {"top_k": 0}),
        (Sampling, {"top_k": True}),
        (Sampling, {"top_k": 1.0}),
        (Sampling, {"top_p": 0}),
        (Sampling, {"top_p": 1.1}),
        (Sampling, {"topk": 3}),
        (BackwardPass, {"score": "class"}),
        (BackwardPass, {"score": "top", "class": 0}),
        (BackwardPass, {"score": "class", "class": -1}),
        (BackwardPass, {"score": "class", "class": True}),
        (BackwardPass, {"score": "clas"}),
        (BackwardPass, {}),
    ],
)
def test_wrong_scores_are_refused(section: Any, raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        section.model_validate(raw)


def parsed(task: Any) -> Experiment:
    experiment, problems = read_experiment(ROOT | {"task": task}, TASKS)
    assert experiment is not None
    assert not problems
    return experiment


def problems(task: Any, **more: Any) -> dict[str, str]:
    experiment, found = read_experiment(ROOT | {"task": task} | more, TASKS)
    assert experiment is None
    return {problem.where: f"{problem.what} {problem.hint}".strip() for problem in found}
