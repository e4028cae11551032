"""Checks arguments against a pydantic model or a function's signature before they are used. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from types import NoneType, UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hookrun.engine.html import Completed
from hookrun.errors import Fix, Problem, SpecError, counted, misnamed, nearest, renamed

M = TypeVar("M", bound=BaseModel)

MISSING = "is missing"
"""What is wrong where a required key is not given."""


class Section(Completed, BaseModel):
    """A frozen section of the configuration; an unknown key is an error.

    Importing builds no validators, which takes milliseconds for each class: `defer_build`, and defaults that are
    made with `model_construct`, which does not validate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Args(Section):
    """Frozen arguments; an unknown key is an error, and so is a value of another type."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class FromRegistry(Section):
    """A name of a closed registry with its arguments, or `python` with a function of the user's own."""

    name: str
    args: dict[str, Any] = {}
    factory: str | None = None

    @model_validator(mode="after")
    def _factory_goes_with_python(self) -> Self:
        if (self.name == "python") != (self.factory is not None):
            raise ValueError("`factory: package.module:function` goes with `name: python`, and only with it")
        return self


def parse(model: type[M], given: Mapping[str, Any], where: str) -> tuple[M | None, list[Problem]]:
    """The validated model, or None and every mistake in `given`; `where` is the key path of `given` itself."""
    try:
        return model.model_validate(dict(given)), []
    except ValidationError as error:
        return None, problems_of(error, where, model)


def validated(model: type[M], given: Mapping[str, Any], where: str) -> M:
    """The validated model, as `parse`. Raises SpecError with every mistake in `given`."""
    content, problems = parse(model, given, where)
    if content is None:
        raise SpecError(problems)
    return content


_TAGS = ("a name", "a run", "a mapping")
"""The tags of discriminated unions, which pydantic inserts into the location of an error; no key has such a name."""


def problems_of(error: ValidationError, where: str, model: type[BaseModel]) -> list[Problem]:
    """One problem for each key with a mistake; pydantic has one error for each member of a union.

    model: the model of the section at the key path `where`
    """
    by_key: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for raw in error.errors(include_url=False):
        location = tuple(part for part in raw["loc"] if part not in _TAGS)
        detail: ErrorDetails = {**raw, "loc": location}
        by_key.setdefault(_key(detail, model), []).append(detail)
    above = {key[:depth] for key in by_key for depth in range(len(key))}
    problems: list[Problem] = []
    for key, details in by_key.items():
        if key in above:  # pydantic does not count the wrong items of a list, and may then find too few
            details = [detail for detail in details if detail["type"] != "too_short"]
        if details:
            problems.append(_problem(details, key, where, model))
    return problems


def parameters(target: Callable[..., object]) -> dict[str, inspect.Parameter] | None:
    """The parameters of `target` that can be given by name; None if its signature does not list all of them."""
    signature = _signature(target)
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature):
        return None
    return _by_name(signature)


def _signature(target: Callable[..., object]) -> list[inspect.Parameter] | None:
    """Every parameter of `target`; None where it has no signature, as builtins and C extensions need not have."""
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def _by_name(signature: Iterable[inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """The parameters that can be given by name."""
    return {p.name: p for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def unknown_arguments(
    given: Collection[str], known: Collection[str], where: str, owner: str
) -> list[Problem]:
    """A problem for each given name that `owner`, a function or class, does not take."""
    problems: list[Problem] = []
    for name in given:
        if name not in known:
            what = f"'{owner}' takes no argument '{name}'; {nearest(name, known)}"
            problem = Problem(join(where, name), what, "correct the name, or remove it")
            section = {name: given[name]} if isinstance(given, Mapping) else None
            problems.append(renamed(problem, name, known, section))
    return problems


def missing_arguments(
    given: Collection[str],
    found: Mapping[str, inspect.Parameter],
    where: str,
    owner: str,
    why: Callable[[str], str] = lambda name: "",
) -> list[Problem]:
    """A problem for each parameter of `owner` that has no default and is not given.

    why: argument name -> the reason why nothing else supplies it, or an empty text
    """
    return [
        Problem(
            join(where, name),
            "; ".join(filter(None, [f"is missing: '{owner}' needs it", why(name)])),
            f"set {join(where, name)}",
        )
        for name, parameter in found.items()
        if parameter.default is parameter.empty and name not in given
    ]


def takes(target: Callable[..., object], name: str) -> bool:
    """Whether `target` has a parameter of that name which can be given by name."""
    return name in _by_name(_signature(target) or ())


def wrong_call(
    target: Callable[..., object],
    given: Collection[str],
    where: str,
    owner: str,
    *,
    first: int = 0,
    also: Collection[str] = (),
) -> list[Problem]:
    """The mistakes in a call of a user's own function with `first` positional arguments and those that are `given`.

    where: the key path of the given arguments
    also:  arguments that hookrun passes by name if the function has them
    """
    signature = _signature(target)
    if signature is None:
        return []
    kinds = {p.kind for p in signature}
    in_order = [p for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(in_order) < first and inspect.Parameter.VAR_POSITIONAL not in kinds:
        takes_count = counted(len(in_order), "positional argument")
        return [
            Problem(
                where, f"'{owner}' takes {takes_count}, and is called with {first}", "change its signature"
            )
        ]
    taken = {p.name for p in in_order[:first]} | set(also)
    free = {name: p for name, p in _by_name(signature).items() if name not in taken}
    checked = given
    if inspect.Parameter.VAR_KEYWORD in kinds:  # which takes any other name
        checked = [name for name in given if name in taken]
    return [*unknown_arguments(checked, free, where, owner), *missing_arguments(given, free, where, owner)]


def unknown_key(
    where: str, key: object, keys: Collection[str], deeper: Collection[str] = (), section: object = None
) -> Problem:
    """The problem of a key that its section does not have.

    deeper:  the key paths below the section that end in the key; see `paths_to`
    section: what was given in the section, at least the key
    """
    problem = Problem(join(where, str(key)), "unknown key", found=key)
    if isinstance(key, bool):
        return replace(problem, hint="YAML reads on, off, yes and no as true and false: quote the key")
    if deeper:
        near = [join(where, each) for each in deeper]
        hint = f"did you mean {' or '.join(map(repr, near))}?"
        fix = None
        if len(near) == 1 and isinstance(section, Mapping):
            fix = Fix(near[0], section[key])
        return replace(problem, hint=hint, near=near, fix=fix)
    if key in keys:
        return replace(problem, hint="it does not go with the keys beside it")
    if not keys:
        return problem
    return renamed(replace(problem, hint=nearest(str(key), keys)), str(key), keys, section)


def paths_to(key: str, section: Any) -> list[str]:
    """Up to three of the shortest key paths below a section of this type that end in `key`: ``optimizer.lr``."""
    sections: list[tuple[str, Any]] = [("", section)]
    for _ in range(_DEEPEST):
        inner: list[tuple[str, FieldInfo]] = []
        for path, annotation in sections:
            for name, field in _fields(annotation).items():
                if _fields(field.annotation):
                    inner.append((f"{path}{name}.", field))
        paths = [path + key for path, field in inner if key in _all_keys(field)]
        if paths:
            return paths[:3]
        sections = [(path, field.annotation) for path, field in inner]
    return []


_DEEPEST = 3
"""How many sections below one another are searched for a key."""


def _all_keys(section: FieldInfo) -> set[Any]:
    """The keys of a section: its fields, and what its default has beside them, such as an optimizer's arguments."""
    default = section.get_default()
    beside = default.model_extra if isinstance(default, BaseModel) else None
    return {*_fields(section.annotation), *(beside or ())}


def join(*parts: str) -> str:
    """A key path; empty parts are left out."""
    return ".".join(part for part in parts if part)


def _key(detail: ErrorDetails, model: type[BaseModel]) -> tuple[int | str, ...]:
    """The keys and list indices that lead to the mistake, up to the first union."""
    location = detail["loc"]
    annotation: Any = model
    for depth, part in enumerate(location):
        annotation = _under(annotation, part)
        if annotation is None:
            is_unknown_key = depth == len(location) - 1 and detail["type"] == "extra_forbidden"
            return location if is_unknown_key else location[:depth]
    return location


def _under(annotation: Any, key: int | str) -> Any:
    """The annotation of the member under a key of a value of type `annotation`; None if it is not known."""
    fields = _fields(annotation)
    if key in fields:
        return fields[key].annotation
    members = [each for each in _members(annotation) if each is not NoneType]
    origin, inner = get_origin(members[0]), get_args(members[0])
    if len(members) == 1 and isinstance(origin, type) and issubclass(origin, Mapping | Sequence):
        return inner[-1] if issubclass(origin, Mapping) else inner[0]
    return None


def _fields(annotation: Any) -> dict[Any, FieldInfo]:
    """The fields of all models in the annotation; empty if it contains none."""
    fields: dict[Any, FieldInfo] = {}
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            fields |= {field.alias or name: field for name, field in member.model_fields.items()}
    return fields


def _members(annotation: Any) -> list[Any]:
    """The types in a union; the type itself if it is not a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin not in (Union, UnionType):
        return [annotation]
    members: list[Any] = []
    for part in get_args(annotation):
        members += _members(part)
    return members


def _problem(
    details: Sequence[ErrorDetails], key: tuple[int | str, ...], where: str, model: type[BaseModel]
) -> Problem:
    """The problem of one key, from every error that pydantic has for it."""
    first = min(details, key=lambda detail: len(detail["loc"]))
    kind = first["type"] if len(first["loc"]) == len(key) else "in a union"
    path = join(where, *map(str, key))
    found = first["input"]
    match kind:
        case "extra_forbidden":
            section: Any = reduce(_under, key[:-1], model)
            deeper = paths_to(str(key[-1]), section)
            above = join(where, *map(str, key[:-1]))
            return unknown_key(above, key[-1], list(_fields(section)), deeper, {key[-1]: found})
        case "missing":
            return Problem(path, MISSING, f"add `{key[-1]}:`" if isinstance(key[-1], str) else "")
        case "value_error":
            return Problem(path, _message(first), found=found)
        case "model_type" | "dict_type":
            return not_a_mapping(path, found, list(_fields(reduce(_under, key, model))))
    what = f"found {found!r}: {_merged(details)}"
    hint = _hint(first)
    if isinstance(found, str) and kind == "literal_error":
        return misnamed(path, what, found, _options(first), hint)
    return Problem(path, what, hint, found=found)


def not_a_mapping(path: str, found: object, keys: Collection[str]) -> Problem:
    """The problem of a value where a section is expected, such as ``model: mlp``, which means a choice of a group."""
    hint = f"its keys: {', '.join(keys)}" if keys else ""
    fix = None
    if isinstance(found, str) and path in _GROUPS:
        hint = f"a file chooses from a group in its defaults list: `- override /{path}: {found}`; {hint}"
    elif isinstance(found, str) and "name" in keys:
        hint = f"choose by name: {path}.name={found}"
        fix = Fix(join(path, "name"), found)
    return Problem(path, f"found {found!r}, expected a mapping", hint, found=found, fix=fix)


_GROUPS = ("task", "model", "data", "train", "compute")


def _merged(details: Sequence[ErrorDetails]) -> str:
    """``expected a valid integer or a valid list; list should have at most 2 items``."""
    expected: list[str] = []
    others: list[str] = []
    for message in dict.fromkeys(map(_message, details)):
        if message.startswith("Input should be "):
            expected.append(message.removeprefix("Input should be "))
        else:
            others.append(message[:1].lower() + message[1:])
    if expected:
        others.insert(0, "expected " + " or ".join(expected))
    return "; ".join(others)


def _message(detail: ErrorDetails) -> str:
    """pydantic's message in the words of YAML, which has lists and no tuples."""
    if detail["type"] == "value_error":  # the message comes from hookrun's own validators
        return detail["msg"].removeprefix("Value error, ")
    message = detail["msg"].replace(" after validation", "")
    return message.replace("valid tuple", "valid list").replace("Tuple", "List")


def _hint(detail: ErrorDetails) -> str:
    """``did you mean 'fast'?`` for a misspelled name, and how to write a word that YAML has read as true or false."""
    if detail["type"] not in ("string_type", "literal_error"):
        return ""
    if isinstance(detail["input"], bool):
        words = "on and yes as true" if detail["input"] else "off and no as false"
        return f"YAML reads {words}: quote the word"
    hint = nearest(str(detail["input"]), _options(detail))
    return hint if hint.startswith("did you mean") else ""


def _options(detail: ErrorDetails) -> list[str]:
    """The words of a Literal, which pydantic gives as one text: ``'a', 'b' or 'c'``."""
    expected = detail.get("ctx", {}).get("expected", "")
    return [part.strip("' ") for part in expected.replace(" or ", ", ").split(",")]
