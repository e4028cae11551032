"""The section `task`: which task, its own keys, and the sections inside it that several modules read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from hookrun.engine.validation import Section, not_a_mapping, parse, unknown_key
from hookrun.errors import Problem, misnamed, nearest
from hookrun.run.experiment.settings import MOST, TaskKeys

WHERE = "task"


def parse_task(
    raw: Any, tasks: Mapping[str, type[TaskKeys]]
) -> tuple[TaskKeys | None, list[str], list[Problem]]:
    """The task with its keys, a note on each key that it does not use, and every mistake in the section.

    A key of another task is allowed, because an experiment that sets it may be run with a different task; its value
    must be valid for a task that has it. The task is None if there are mistakes.

    tasks: every task by name
    """
    if not isinstance(raw, Mapping):
        return None, [], [not_a_mapping(WHERE, raw, _keys(tasks))]
    given = dict(raw)
    if "name" not in given:
        given["name"] = next((name for name, task in tasks.items() if "is_default" in vars(task)), None)
    name = given.pop("name")
    chosen = tasks.get(name) if isinstance(name, str) else None
    problems: list[Problem] = []
    if chosen is None:
        what = f"found {name!r}, which is not a task"
        problems.append(misnamed(f"{WHERE}.name", what, str(name), tasks))
    fields = () if chosen is None else chosen.model_fields
    refused = {} if chosen is None else chosen.refuses
    used = {key: given[key] for key in given if key in fields}
    every_key = _keys(tasks) if len(used) < len(given) else used
    for key, value in given.items():
        if key not in every_key:
            problems.append(unknown_key(WHERE, key, every_key, section={key: value}))
    task = None
    if chosen is not None:
        task, wrong = parse(chosen, used, WHERE)
        problems += wrong
    notes: list[str] = []
    for key, value in given.items():
        if key in used or key not in every_key:
            continue
        problems += _problems_of_value(key, value, tasks)
        if key not in refused:
            notes.append(f"{WHERE}.{key} is not used by {WHERE}={name}")
        elif value is not None:
            problems.append(Problem(f"{WHERE}.{key}", refused[key], "leave it out, or set it to null"))
    return (None, [], problems) if problems else (task, notes, [])


def _problems_of_value(key: str, value: Any, tasks: Mapping[str, type[TaskKeys]]) -> list[Problem]:
    """The mistakes in the value of a key of other tasks: the fewest, since tasks may share the name of a key."""
    of_owners: list[list[Problem]] = []
    for task in tasks.values():
        if key in task.model_fields:
            problems = parse(task, {key: value}, WHERE)[1]
            inside = [problem for problem in problems if f"{problem.where}.".startswith(f"{WHERE}.{key}.")]
            of_owners.append(inside)
    return min(of_owners, key=len)


def _keys(tasks: Mapping[str, type[TaskKeys]]) -> list[str]:
    """The keys of all tasks, each once."""
    keys = ["name"]
    for task in tasks.values():
        keys += task.model_fields
    return list(dict.fromkeys(keys))


class Sampling(Section):
    """`task.sampling`: the distribution from which each token is drawn; the keys apply in this order.

    temperature: divides the logits; below 1 the most probable tokens become more probable
    top_k:       draw from this many of the most probable tokens; null: all
    top_p:       draw from the most probable tokens that together have this probability, at least one; null: all
    """

    temperature: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=1, le=MOST, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None

    def __str__(self) -> str:
        parts = [f"temperature {self.temperature:g}"]
        if self.top_k is not None:
            parts.append(f"top_k {self.top_k}")
        if self.top_p is not None:
            parts.append(f"top_p {self.top_p:g}")
        return ", ".join(parts)


LOGIT_DIFFERENCE = "logit_difference"
SCORES = ("label", "top", "class", "output", "loss", LOGIT_DIFFERENCE)
"""The scores by name, from which a backward pass without training may start."""


class BackwardPass(Section):
    """`task.backward`: the score whose gradients are computed.

    It is a sum over samples, so each row of a gradient depends on one sample. For sequences of tokens, label, top and
    class are summed over the tokens of `task.tokens`.

    score: label: the logit of the sample's label; top: the logit of the predicted class; class: the logit of `class`;
           output: the sum of the sample's outputs; loss: `train.loss` of the sample, as in a batch of one;
           logit_difference: the logit of the right answer minus that of the wrong one; or a function of a trusted
           package, (output, target) -> one number, called for each sample as in a batch of one
    class: the number of the class, for `score: class`
    """

    score: Annotated[str, Field(max_length=1_000)]
    class_: int | None = Field(default=None, alias="class", strict=True, ge=0, le=MOST)

    @field_validator("score")
    @classmethod
    def _is_score(cls, name: str) -> str:
        if name not in SCORES and ":" not in name:
            raise ValueError(f"found {name!r}, which is not a score: {nearest(name, SCORES)}")
        return name

    @model_validator(mode="after")
    def _class_goes_with_it(self) -> BackwardPass:
        if (self.score == "class") != (self.class_ is not None):
            raise ValueError("`class: NUMBER` goes with `score: class`, and only with it")
        return self

    def __str__(self) -> str:
        return {
            "label": "the logit of the label",
            "top": "the logit of the predicted class",
            "class": f"the logit of class {self.class_}",
            "output": "the output",
            "loss": "the loss",
            LOGIT_DIFFERENCE: "the logit of the right answer minus that of the wrong one",
        }.get(self.score, self.score)

    @property
    def is_own(self) -> bool:
        """Whether the score is a function of the user's own."""
        return self.score not in SCORES


ScoreKeys = Annotated[
    BackwardPass,
    BeforeValidator(
        lambda raw: {"score": raw} if isinstance(raw, str) else raw, json_schema_input_type=str | BackwardPass
    ),
]
"""A score; the short form is its name alone."""
