"""A selector by mapping: conditions that must all hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hookrun.engine.spec.selector.base import Parser, Selector, check_text, shown
from hookrun.engine.spec.selector.class_name import ClassSelector
from hookrun.engine.spec.selector.tree import Names, Tree
from hookrun.engine.spec.selector.union import UnionSelector
from hookrun.errors import nearest

KEYS = ("path", "type", "leaf", "exclude", "min_params")


@dataclass(frozen=True)
class MappingSelector(Selector):
    """A mapping: the condition of every given key must hold."""

    text: str
    path: Selector | None = None
    type: Selector | None = None
    leaf: bool | None = None
    exclude: Selector | None = None
    min_params: int | None = None

    position = 40
    rows = {
        "{path:, type:, leaf:, exclude:, min_params:}": "a mapping: all given keys must hold; "
        "`exclude` is a selector"
    }
    types = (dict,)
    schema = {
        "type": "object",
        "description": "a mapping",
        "additionalProperties": False,
        "minProperties": 1,
        "properties": {
            "path": {"type": ["string", "integer", "array", "object"]},
            "type": {"type": ["string", "array"], "items": {"type": "string"}},
            "leaf": {"type": "boolean"},
            "exclude": {"type": ["string", "integer", "array", "object"]},
            "min_params": {"type": "integer", "minimum": 0},
        },
    }

    @classmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        _check_keys(raw)
        keys: dict[str, Any] = {}
        texts: list[str] = []
        for key, given in raw.items():
            keys[key] = _parse_condition(key, given, parser)
            text = str(keys[key]).lower() if isinstance(given, bool) else str(keys[key])
            texts.append(f"{key}: {text}")
        return cls("{" + ", ".join(texts) + "}", **keys)

    def find(self, tree: Tree) -> set[str]:
        paths = set(tree.nodes)
        if self.path is None and self.type is None:
            paths -= tree.without_forward
        if self.path is not None:
            paths &= self.path.paths(tree)
        if self.type is not None:
            paths &= self.type.paths(tree)
        if self.leaf is not None:
            paths = {path for path in paths if tree.nodes[path].leaf == self.leaf}
        if self.min_params is not None:
            paths = {path for path in paths if tree.nodes[path].parameters >= self.min_params}
        if self.exclude is None:
            return paths
        return tree.without(paths, self.exclude.paths(tree.whole))  # what is excluded need not be called

    paths = find  # a condition on parameters holds for each of them, not for their module

    def unmatched(self, tree: Tree, where: str = "") -> Iterator[tuple[Selector, str]]:
        """Lists under `path` and `type` only; a name under `exclude` need not exist."""
        for key, part in (("path", self.path), ("type", self.type)):
            if part is not None:
                place = f"`{key}` of {where}" if where else f"`{key}`"
                yield from part.unmatched(tree, place)

    def nearest(self, names: Names) -> str:
        part = self.path or self.type
        return super().nearest(names) if part is None else part.nearest(names)


def _check_keys(raw: Mapping[Any, Any]) -> None:
    if not raw:
        raise ValueError("the mapping is empty: give at least one of " + ", ".join(KEYS))
    for key in raw:
        if key not in KEYS:
            text = key if isinstance(key, str) and len(key) < 100 else ""
            raise ValueError(f"found the key {shown(key)}: {nearest(text, KEYS)}")
    if "leaf" in raw and not isinstance(raw["leaf"], bool):
        raise ValueError(f"leaf: found {shown(raw['leaf'])}, expected true or false")
    if "min_params" in raw:
        least = raw["min_params"]
        if isinstance(least, bool) or not isinstance(least, int) or not 0 <= least < 10**18:
            raise ValueError(f"min_params: found {shown(least)}, expected a whole number of elements")


def _parse_condition(key: str, raw: Any, parser: Parser) -> Any:
    if key not in ("path", "type", "exclude"):
        return raw
    try:
        return _parse_types(raw, parser) if key == "type" else parser.parse(raw)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _parse_types(raw: Any, parser: Parser) -> Selector:
    """One class name or a list of them, with or without ``type:`` in front."""
    names = raw if isinstance(raw, list | tuple) else [raw]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"found {shown(raw)}, expected a class name or a list of them")
    parser.count(len(names))
    for name in names:
        check_text(name)
    parts = tuple(ClassSelector.parse(name, parser) for name in names)
    return parts[0] if len(parts) == 1 else UnionSelector.of(parts)
