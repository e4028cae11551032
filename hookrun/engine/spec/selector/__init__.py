"""Selectors: which modules or parameters a hook is for. Parsed once, matched against names alone.

Each form is a class in a module of this package, found by `forms`: a new one is a new module. Imports no torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler, PlainValidator
from pydantic_core import CoreSchema

from hookrun.engine.discovery import own_subclasses, taken
from hookrun.engine.spec.selector.base import Parser, Selector
from hookrun.engine.spec.selector.tree import Names, Node, Tree
from hookrun.errors import spec_error

__all__ = [
    "AnySelector",
    "Names",
    "Node",
    "SchemaOnDemand",
    "Selector",
    "Tree",
    "forms",
    "parse_selector",
    "reference_rows",
    "select_schema",
]


@cache
def forms() -> tuple[type[Selector], ...]:
    """Every form of a selector, in the order of the reference table.

    Raises SpecError for a form of an extension that would read texts of another one.
    """
    subclasses = own_subclasses(sys.modules[__name__], Selector)  # type: ignore[type-abstract]
    concrete = [form for form in subclasses if not inspect.isabstract(form)]
    for form in concrete:
        is_shipped = form.__module__.startswith(f"{__name__}.")
        if not is_shipped and str in form.types and "reads" not in vars(form):
            _check_prefix(form, concrete)
    return tuple(sorted(concrete, key=lambda form: (form.position, form.__name__)))


def _check_prefix(form: type[Selector], forms: Sequence[type[Selector]]) -> None:
    if not form.prefix:
        raise spec_error(
            f"{form.__module__}.{form.__qualname__}",
            "has no prefix: it would read every path",
            'give it one, such as prefix = "depth:"',
        )
    for other in forms:
        if other is form or not other.prefix:
            continue
        if form.prefix.startswith(other.prefix) or other.prefix.startswith(form.prefix):
            raise taken(form, form.prefix, other)


def parse_selector(raw: Any) -> Selector:
    """Parse any form of a selector.

    Raises ValueError, which says what is wrong; also if it is too long, too deep or too large.
    """
    return Parser(forms()).parse(raw)


def select_schema() -> dict[str, Any]:
    """The JSON schema of a selector of any form."""
    schemas = [form.schema for form in forms()]
    return {"description": ", ".join(schema["description"] for schema in schemas), "anyOf": schemas}


def reference_rows() -> Mapping[str, str]:
    """An example of every form, with what it matches: the reference table."""
    return {example: meaning for form in forms() for example, meaning in form.rows.items()}


@dataclass(frozen=True)
class SchemaOnDemand:
    """The JSON schema of a pydantic field, made only when somebody asks for it."""

    make: Callable[[], dict[str, Any]]

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.make()


AnySelector = Annotated[Selector, PlainValidator(parse_selector), SchemaOnDemand(select_schema)]
"""The type of a pydantic field that holds a selector of any form."""
