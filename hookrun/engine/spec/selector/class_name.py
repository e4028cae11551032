"""A selector by class."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hookrun.engine.spec.selector.base import Parser, Selector, alternatives, shown
from hookrun.engine.spec.selector.tree import Names, Tree
from hookrun.errors import nearest


@dataclass(frozen=True)
class ClassSelector(Selector):
    """``type:GLOB`` over the names of a module's class and its bases; braces list alternatives."""

    text: str
    globs: tuple[str, ...]

    position = 20
    rows = {
        "type:Conv2d": "class, by name or qualified name, or one of its bases; globs allowed",
        "type:{Linear,Conv2d}": "alternatives of classes",
    }
    prefix = "type:"
    schema = {"type": "string", "pattern": f"^{prefix}", "description": "type:CLASS"}

    @classmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        globs = tuple(glob.strip() for glob in alternatives(raw.removeprefix(cls.prefix)))
        if not all(globs):
            raise ValueError(f"found {shown(raw)} without a class name, expected for example type:Conv2d")
        parser.count(len(globs) - 1)
        return cls(raw, globs)

    def find(self, tree: Tree) -> list[str]:
        fitting = {types for types in {node.types for node in tree.nodes.values()} if self._fits(types)}
        return [path for path, node in tree.nodes.items() if node.types in fitting]

    def _fits(self, types: frozenset[str]) -> bool:
        return not types.isdisjoint(self.globs) or any(
            fnmatchcase(name, glob)
            for glob in self.globs
            if any(char in glob for char in "*?[")
            for name in types
        )

    def nearest(self, names: Names) -> str:
        return nearest(self.globs[0], names.classes)

    def possible(self, names: Names) -> list[str]:
        return [f"{self.prefix}{name}" for name in names.classes]
