"""From pydantic's errors to hookrun's: one line each, with its key path and the nearest names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hookrun.errors import Problem, nearest


def problems_of(error: ValidationError, where: str, model: type[BaseModel]) -> list[Problem]:
    """Every error of a validation as a `Problem`; `model` is that of the section at `where`."""
    return [_problem(detail, where, model) for detail in error.errors(include_url=False)]


def _problem(detail: ErrorDetails, where: str, model: type[BaseModel]) -> Problem:
    location = [str(part) for part in detail["loc"]]
    found = detail.get("input")
    path = join(where, *location)
    match detail["type"]:
        case "extra_forbidden":
            return unknown_key(join(where, *location[:-1]), location[-1], _keys(model, location[:-1]))
        case "missing":
            return Problem(path, "is missing", f"add `{location[-1]}:`")
        case "model_type" | "dict_type":
            keys = ", ".join(_keys(model, location))
            return Problem(path, f"found {found!r}, expected a mapping", f"its keys: {keys}" if keys else "")
        case "value_error":
            return Problem(path, detail["msg"].removeprefix("Value error, "))
        case "literal_error":
            options = [
                part.strip("' ") for part in detail["ctx"]["expected"].replace(" or ", ", ").split(",")
            ]
            return Problem(
                path, f"found {found!r}, expected one of {', '.join(options)}", _close(str(found), options)
            )
    return Problem(path, f"found {found!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}")


def _keys(model: type[BaseModel], location: Sequence[str]) -> Collection[str]:
    """What the section at a location may hold, whichever of several kinds it is."""
    models = [model]
    for part in location:
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        models = [inner for field in fields for inner in _models(field.annotation)]
    return dict.fromkeys(key for each in models for key in each.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation such as ``Scheduler | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _close(found: str, options: Sequence[str]) -> str:
    hint = nearest(found, options)
    return hint if hint.startswith("did you mean") else ""


def unknown_key(where: str, key: object, keys: Collection[str]) -> Problem:
    """The problem of a key that its section does not know."""
    if isinstance(key, bool):
        hint = "YAML reads on, off, yes and no as true and false: quote the key"
    else:
        hint = nearest(str(key), keys) if keys else ""
    return Problem(join(where, str(key)), "unknown key", hint)


def join(*parts: str) -> str:
    """A key path; empty parts fall away."""
    return ".".join(part for part in parts if part)
