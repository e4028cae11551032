"""A selector of what another hook adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hookrun.engine.spec.selector.base import Parser, Selector
from hookrun.engine.spec.selector.tree import Names, Tree
from hookrun.errors import nearest


@dataclass(frozen=True)
class PointSelector(Selector):
    """``hook:NAME.POINT``: what the hook NAME adds at each of its modules."""

    text: str

    position = 25
    rows = {
        "hook:sae.features": "what the hook `sae` adds, at each of its modules; at one alone `fc:sae.features`"
    }
    prefix = "hook:"
    schema = {"type": "string", "pattern": f"^{prefix}", "description": "hook:NAME.POINT"}

    @classmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        return cls(raw)

    def find(self, tree: Tree) -> list[str]:
        return [path for path, selector in tree.points.items() if selector == self.text]

    def nearest(self, names: Names) -> str:
        if self.text in names.disabled_points:
            return "the hook that adds it is disabled: set its `enabled: true`"
        near = nearest(self.text, names.points)
        return f"{near}; an enabled hook before this one must add it, and only hooks can select it"

    def possible(self, names: Names) -> tuple[str, ...]:
        return names.points
