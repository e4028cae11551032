"""From pydantic's errors to hookrun's: one line each, with its key path and the nearest names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hookrun.errors import Problem, nearest


def problems_of(error: ValidationError, where: str, keys: Collection[str]) -> list[Problem]:
    """Every error of a validation as a `Problem`; `keys` are what the section at `where` may hold."""
    return [_problem(detail, where, keys) for detail in error.errors(include_url=False)]


def _problem(detail: ErrorDetails, where: str, keys: Collection[str]) -> Problem:
    location = [str(part) for part in detail["loc"]]
    found = detail.get("input")
    path = join(where, *location)
    match detail["type"]:
        case "extra_forbidden" if len(location) == 1:
            return unknown_key(where, location[0], keys)
        case "extra_forbidden":
            return Problem(path, "unknown key")
        case "missing":
            return Problem(path, "is missing", f"add `{location[-1]}:`")
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


def _close(found: str, options: Sequence[str]) -> str:
    hint = nearest(found, options)
    return hint if hint.startswith("did you mean") else ""


def unknown_key(where: str, key: object, keys: Collection[str]) -> Problem:
    """The problem of a key that its section does not know."""
    if isinstance(key, bool):
        hint = "YAML reads on, off, yes and no as true and false: quote the key"
    else:
        hint = nearest(str(key), keys)
    return Problem(join(where, str(key)), "unknown key", hint)


def join(*parts: str) -> str:
    """A key path; empty parts fall away."""
    return ".".join(part for part in parts if part)
