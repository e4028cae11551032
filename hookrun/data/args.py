"""Arguments as YAML gives them, checked against a typed model; every mistake is a Problem with its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hookrun.errors import Problem
from hookrun.spec.problems import join, unknown_key


class Args(BaseModel):
    """Frozen arguments; an unknown key is an error, and so is a value that would need a conversion to fit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


A = TypeVar("A", bound=Args)


def parse(model: type[A], given: Mapping[str, Any], where: str) -> tuple[A | None, list[Problem]]:
    """The arguments, or None and every problem in them; `where` is the key path of the mapping itself."""
    try:
        return model.model_validate(dict(given)), []
    except ValidationError as error:
        return None, _problems(error, model, given, where)


def _problems(
    error: ValidationError, model: type[Args], given: Mapping[str, Any], where: str
) -> list[Problem]:
    """One problem for each argument, where pydantic has one for each alternative of a union and each item."""
    problems: list[Problem] = []
    messages: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        key = str(detail["loc"][0]) if detail["loc"] else ""
        match detail["type"]:
            case "extra_forbidden":
                problems.append(unknown_key(where, key, model.model_fields))
            case "missing":
                problems.append(Problem(join(where, key), "is missing", f"add `{key}:`"))
            case _:
                messages.setdefault(key, []).append(detail["msg"])
    for key, each in messages.items():
        found = f"found {given[key]!r}: " if key in given else ""
        problems.append(Problem(join(where, key), found + _merged(each)))
    return problems


def _merged(messages: list[str]) -> str:
    """``expected a valid integer or a valid list; list should have at most 2 items``."""
    prefix = "Input should be "
    expected = [each.removeprefix(prefix) for each in messages if each.startswith(prefix)]
    others = [each.removeprefix("Value error, ") for each in messages if not each.startswith(prefix)]
    clauses = ["expected " + " or ".join(dict.fromkeys(expected))] if expected else []
    clauses += [
        each[:1].lower() + each[1:].replace(" after validation", "") for each in dict.fromkeys(others)
    ]
    return "; ".join(clauses)
