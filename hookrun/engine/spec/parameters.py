"""A choice of parameters: a selector over their names, `hook:NAME` for those that a hook adds, or a list of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from hookrun.engine.spec.selector import SchemaOnDemand, Selector, forms, select_schema
from hookrun.engine.spec.selector.base import Parser
from hookrun.engine.values.index import parsed_as

PREFIX = "hook:"
EVERY = "*"


@dataclass(frozen=True)
class AddedBy:
    """``hook:NAME``: the parameters that this hook adds; ``hook:*``: those that any hook adds."""

    hook: str

    def __str__(self) -> str:
        return PREFIX + self.hook

    @property
    def every(self) -> bool:
        """Whether it means all hooks."""
        return self.hook == EVERY


@dataclass(frozen=True)
class Choice:
    """The union of the parameters that its members choose."""

    members: tuple[Selector | AddedBy, ...]
    is_list: bool = False

    def __str__(self) -> str:
        text = ", ".join(map(str, self.members))
        return f"[{text}]" if self.is_list else text

    def placed(self, where: str) -> Iterator[tuple[str, Selector | AddedBy]]:
        """Each member with its key path; `where` is the key path of the whole choice."""
        for number, member in enumerate(self.members):
            yield (f"{where}.{number}" if self.is_list else where), member


def parse_choice(raw: Any) -> Choice:
    """The choice that a value from YAML or Python stands for.

    Raises ValueError, which says what was found and what is expected.
    """
    parser = Parser(forms())  # one parser for all members limits their total size
    if not isinstance(raw, list | tuple):
        return Choice((_member(raw, parser),))
    if not raw:
        raise ValueError("found an empty list, expected selectors or hook:NAME")
    return Choice(tuple(_member(member, parser) for member in raw), is_list=True)


def _member(raw: Any, parser: Parser) -> Selector | AddedBy:
    if not isinstance(raw, str) or not raw.startswith(PREFIX):
        return parser.parse(raw)
    if not (name := raw.removeprefix(PREFIX)):
        raise ValueError(f"found {raw!r}, expected hook:NAME, or hook:* for every hook")
    return AddedBy(name)


def _schema() -> dict[str, Any]:
    one = select_schema()
    return {"description": f"{one['description']}, hook:NAME, hook:*", "anyOf": one["anyOf"]}


AnyChoice = Annotated[Choice, parsed_as(Choice, parse_choice), SchemaOnDemand(_schema)]
"""The type of a pydantic field that holds a choice of parameters."""
