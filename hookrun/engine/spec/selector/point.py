"""A selector of what another hook adds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hookrun.engine.spec.selector.base import Parser, Selector, shown
from hookrun.engine.spec.selector.tree import Names, Tree
from hookrun.errors import nearest

_POINT = re.compile(r"[^\W\d][\w-]*\.\w+")


@dataclass(frozen=True)
class PointSelector(Selector):
    """``hook:NAME.POINT``: a point of the hook NAME, at each of its modules.

    point: ``NAME.POINT``
    """

    text: str
    point: str

    position = 25
    rows = {
        "hook:sae.features": "what the hook `sae` adds, at each of its modules; one alone is `fc:sae.features`"
    }
    prefix = "hook:"
    schema = {"type": "string", "pattern": f"^{prefix}", "description": "hook:NAME.POINT"}

    @classmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        point = raw.removeprefix(cls.prefix)
        if _POINT.fullmatch(point) is None:
            raise ValueError(
                f"found {shown(raw)}, expected the name of a hook and of what it adds, such as hook:sae.features"
            )
        return cls(raw, point)

    def find(self, tree: Tree) -> list[str]:
        return [path for path, point in tree.points.items() if point == self.point]

    def nearest(self, names: Names) -> str:
        why = names.without_points.get(self.point.partition(".")[0])
        return why or nearest(self.text, self.possible(names))

    def possible(self, names: Names) -> list[str]:
        return [f"{self.prefix}{point}" for point in names.points]
