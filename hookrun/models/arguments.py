"""A constructor and its arguments: which there are, which the data set fills in, and whether it takes them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, ValidationError, create_model

from hookrun.errors import Problem, SpecError, nearest

if TYPE_CHECKING:
    from torch import nn

# A width or a number of channels, for the signatures of our own models.
Size = Annotated[int, Field(ge=1, strict=True)]

# Arguments that a data set can tell; null stands for that, in every model, so that one set of them serves many.
FROM_DATA = ("num_classes", "in_features", "in_channels", "image_size")


@dataclass(frozen=True, slots=True)
class Call:
    """A constructor with the arguments it will get, and what can be told to be wrong with them before the call."""

    target: Callable[..., object]
    args: Mapping[str, Any]
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """What a data set tells a model: the shape of one sample (-1: differs), the number of classes; None: unknown."""

    shape: tuple[int, ...] | None
    num_classes: int | None

    def values(self) -> dict[str, Any]:
        """The arguments that follow from it, by name; all of them are in `FROM_DATA`."""
        found: dict[str, Any] = {}
        if self.num_classes is not None:
            found["num_classes"] = self.num_classes
        if self.shape is not None and -1 not in self.shape:
            found["in_features"] = math.prod(self.shape)
        if self.shape is not None and len(self.shape) == 3:
            channels, *size = self.shape
            if channels != -1:
                found["in_channels"] = channels
            if -1 not in size:
                found["image_size"] = tuple(size)
        return found

    def lack(self, name: str) -> str:
        """Why the argument `name` does not follow from it; empty for an argument that no data set tells."""
        if name not in FROM_DATA:
            return ""
        if name == "num_classes":
            return "the data set names no number of classes"
        shape = "no known shape" if self.shape is None else f"the shape {list(self.shape)}"
        return f"the data set's samples have {shape}"


def given(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without those that are null for the data set to tell."""
    return {name: value for name, value in args.items() if value is not None or name not in FROM_DATA}


def unknown(args: Mapping[str, Any], names: Collection[str], model: str) -> list[Problem]:
    """A problem for each argument that is not among `names`."""
    return [
        Problem(
            f"model.args.{name}",
            f"'{model}' takes no argument '{name}'; {nearest(name, names)}",
            "correct the name, or remove it",
        )
        for name in args
        if name not in names
    ]


def missing(
    args: Mapping[str, Any], found: Mapping[str, inspect.Parameter], model: str, sample: Sample | None = None
) -> list[Problem]:
    """A problem for each parameter without a default that is not in `args`.

    sample: why it does not follow from the data set; None where nothing is taken from there
    """
    problems: list[Problem] = []
    for name, parameter in found.items():
        if parameter.default is parameter.empty and name not in args:
            why = sample.lack(name) if sample else ""
            what = f"'{model}' needs the argument '{name}'" + (f", and {why}" if why else "")
            problems.append(Problem(f"model.args.{name}", what, f"set model.args.{name}"))
    return problems


def parameters(target: Callable[..., object]) -> dict[str, inspect.Parameter] | None:
    """The arguments of `target` that can be given by name; None where its signature does not tell them all."""
    try:
        found = inspect.signature(target).parameters
    except (TypeError, ValueError):  # builtins and C extensions need not have one
        return None
    if any(p.kind is p.VAR_KEYWORD for p in found.values()):
        return None
    return {name: p for name, p in found.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def checked(model: type[nn.Module], args: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The arguments as the annotations of the constructor have them, or the problem of each that does not fit.

    For models of ours, whose annotations are written to be checked.
    """
    hints = get_type_hints(model.__init__, include_extras=True)
    fields: dict[str, Any] = {name: (hints[name], ...) for name in args}
    schema = create_model(model.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    try:
        return dict(schema.model_validate(dict(args))), []
    except ValidationError as error:
        return {}, [
            Problem(
                ".".join(["model.args", *map(str, detail["loc"])]),
                f"{_expected(detail['msg'])}, found {detail['input']!r}",
                "correct the value",
            )
            for detail in error.errors(include_url=False, include_context=False)
        ]


def construct(call: Call, model: str) -> nn.Module:
    """The module. Raises SpecError with the call's problems, or with what the constructor itself has to say."""
    if call.problems:
        raise SpecError(call.problems)
    from torch import nn

    try:
        built = call.target(**call.args)
    except SpecError:
        raise
    except Exception as error:  # whatever a constructor raises, it raises over its arguments
        shown = ", ".join(f"{name}={value!r}" for name, value in call.args.items())
        what = f"'{model}' cannot be built with ({shown}): {reason(error)}"
        raise SpecError([Problem("model.args", what, "correct the arguments")]) from error
    if not isinstance(built, nn.Module):
        what = f"'{model}' returned {type(built).__qualname__}, not a torch.nn.Module"
        raise SpecError([Problem("model.factory", what, "name a function or class that returns the module")])
    return built


def _expected(message: str) -> str:
    """pydantic's message in the words of YAML, which has lists and no fields or tuples."""
    words = {
        "Input should be": "expected",
        "valid tuple": "list",
        "Tuple": "the list",
        "Field required": "missing",
    }
    for theirs, ours in words.items():
        message = message.replace(theirs, ours)
    return message


def reason(error: Exception) -> str:
    """An exception in one line: its type and the first line of its message."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
