"""The section `task`: which task, and its own keys. Keys of other tasks are checked and ignored, with a note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hookrun.arguments import not_a_mapping, problems_of, unknown_key
from hookrun.errors import Problem, nearest
from hookrun.spec.experiment import TaskKeys
from hookrun.spec.remains import validated as remains

WHERE = "task"


def parse_task(
    raw: Any, tasks: Mapping[str, type[TaskKeys]]
) -> tuple[TaskKeys | None, list[str], list[Problem]]:
    """The task with its keys, a note on each key that it does not use, and every mistake in the section.

    A key of another task is allowed, because an experiment that sets it may be run with a different task; its value
    must be valid for that task. The task is None if there are mistakes.

    tasks: every task by name
    """
    known = dict.fromkeys(["name", *(key for task in tasks.values() for key in task.model_fields)])
    if not isinstance(raw, Mapping):
        return None, [], [not_a_mapping(WHERE, raw, known)]
    given = dict(raw)
    name = given.pop("name", _default(tasks))
    chosen = tasks.get(name) if isinstance(name, str) else None
    problems = list[Problem]()
    if chosen is None:
        hint = nearest(str(name), tasks)
        problems.append(Problem(f"{WHERE}.name", f"found {name!r}, which is not a task", hint))
    problems += [unknown_key(WHERE, key, known) for key in given if key not in known]
    own = {key: given[key] for key in given if chosen is not None and key in chosen.model_fields}
    ignored = {key: given[key] for key in given if key in known and key not in own}
    task, wrong = (None, []) if chosen is None else _validated(chosen, own)
    problems += wrong
    for key, value in ignored.items():
        owner = next(each for each in tasks.values() if key in each.model_fields)
        _, wrong = _validated(owner, {key: value})
        problems += [each for each in wrong if f"{each.where}.".startswith(f"{WHERE}.{key}.")]
    refused = chosen.refuses if chosen is not None else {}
    problems += [
        Problem(f"{WHERE}.{key}", refused[key], "leave it out, or set it to null")
        for key, value in ignored.items()
        if key in refused and value is not None
    ]
    notes = [f"{WHERE}.{key} is not used by {WHERE}={name}" for key in ignored if key not in refused]
    return (None, [], problems) if problems else (task, notes, [])


def remaining_task(raw: Any, tasks: Mapping[str, type[TaskKeys]]) -> TaskKeys | None:
    """The task of a section with mistakes, without its wrong keys; the default task if its name is wrong."""
    given = dict(raw) if isinstance(raw, Mapping) else {}
    name = given.get("name")
    chosen = tasks.get(name) if isinstance(name, str) else None
    task = chosen or tasks.get(_default(tasks) or "")
    own = {key: given[key] for key in given if chosen is not None and key in chosen.model_fields}
    return None if task is None else remains(task, own, WHERE)[0]


def _default(tasks: Mapping[str, type[TaskKeys]]) -> str | None:
    """The task of an experiment that names none."""
    return next((name for name, task in tasks.items() if vars(task).get("is_default", False)), None)


def _validated(task: type[TaskKeys], given: Mapping[str, Any]) -> tuple[TaskKeys | None, list[Problem]]:
    try:
        return task.model_validate(dict(given)), []
    except ValidationError as error:
        return None, problems_of(error, WHERE, task)
