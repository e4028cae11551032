"""A selector by list: the union of its members."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hookrun.engine.spec.selector.base import Parser, Selector
from hookrun.engine.spec.selector.tree import Names, Tree


@dataclass(frozen=True)
class UnionSelector(Selector):
    """A list: everything that any of its members matches."""

    text: str
    members: tuple[Selector, ...]

    position = 30
    rows = {
        "[conv1, fc]": "a list: union, each module once; each member must match, unless `expect` allows 0 "
        '(`">=0"`)'
    }
    types = (list, tuple)
    schema = {
        "type": "array",
        "items": {"type": ["string", "integer", "array", "object"]},
        "minItems": 1,
        "description": "a list of selectors",
    }

    @classmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        if not raw:
            raise ValueError("the list is empty: name at least one module")
        return cls.of(tuple(parser.parse(item) for item in raw))

    @classmethod
    def of(cls, members: tuple[Selector, ...]) -> UnionSelector:
        """The union of parsed selectors."""
        return cls("[" + ", ".join(member.text for member in members) + "]", members)

    def find(self, tree: Tree) -> set[str]:
        return {path for member in self.members for path in member.paths(tree)}

    paths = find  # its members count the parameters of their modules

    def unmatched(self, tree: Tree, where: str = "") -> Iterator[tuple[Selector, str]]:
        for number, member in enumerate(self.members, start=1):
            place = f"member {number} of {where or 'the list'}"
            if inner := list(member.unmatched(tree, place)):
                yield from inner
            elif not member.paths(tree):
                yield member, place

    def nearest(self, names: Names) -> str:
        return self.members[0].nearest(names)
