"""Selectors: which modules or parameters a hook is for. Parsed once, matched against names alone."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hookrun.errors import nearest

FORMS = {
    "layer4.0.conv1": "exact path; the empty string is the root module",
    "layer*.conv?": "glob: `*` and `?` stay inside one name between dots",
    "**.attn": "`**` spans any number of names, none included",
    "{q,k,v}_proj": "alternatives",
    "h[0:4].mlp": "Python index or slice over the numbered children of a container, in their order",
    r"re:layer[1-4]\.\d+": "regular expression, always a full match",
    "type:Conv2d": "class, by name or qualified name, or one of its bases; globs allowed",
    "[conv1, fc]": "a list: union, each module once",
    "{path:, type:, leaf:, exclude:, min_params:}": "a mapping: all given keys must hold; `exclude` is a selector",
}
"""Every form of a selector, with what it matches: the reference table."""

_Pick = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Node:
    """A module, or a parameter, as selectors see it.

    path:       its name in ``named_modules(remove_duplicate=False)`` (the root's is empty) or ``named_parameters``
    types:      class name and qualified name of its class and of each base; a parameter has its module's
    leaf:       it has no children; a parameter: its module has none
    parameters: number of elements of its own and its descendants' parameters
    """

    path: str
    types: frozenset[str] = frozenset()
    leaf: bool = True
    parameters: int = 0


@dataclass(frozen=True)
class Tree:
    """Every path of a model in ``named_modules`` order, and the numbered children of its containers.

    first: path -> the first name of the same object, for whatever has several
    """

    nodes: Mapping[str, Node]
    numbered: Mapping[str, Sequence[str]] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)

    def without(self, found: Iterable[str], excluded: Iterable[str]) -> list[str]:
        """The paths found but those of an excluded object, whichever of its names was excluded."""
        first = self.first
        objects = {first.get(path, path) for path in excluded}
        return [path for path in found if first.get(path, path) not in objects]


class Selector(ABC):
    """A parsed selector. `text` is how the user wrote it; `select` gives matching paths in the tree's order."""

    text: str

    def select(self, tree: Tree) -> list[str]:
        """The paths that match, each once, in the order of the tree."""
        return [path for path, node in tree.nodes.items() if self.matches(node, tree)]

    def select_parameters(self, modules: Tree, parameters: Tree) -> set[str]:
        """The parameters that match: by name, or because a module that they belong to matches."""
        found = set(self.select(parameters))
        owners = set(self.select(modules))
        found.update(name for name in parameters.nodes if owners and not owners.isdisjoint(_ancestors(name)))
        return found

    @abstractmethod
    def matches(self, node: Node, tree: Tree) -> bool:
        """Whether the node is selected."""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(parse_selector)


@dataclass(frozen=True)
class Path(Selector):
    """An exact path or a glob, with Python indexes over numbered children."""

    text: str
    patterns: tuple[tuple[re.Pattern[str], tuple[_Pick, ...]], ...] = field(compare=False)

    def select(self, tree: Tree) -> list[str]:
        if self.text in tree.nodes:  # an exact name wins, also one that looks like a glob
            return [self.text]
        found = set[str]()
        for pattern, picks in self.patterns:
            fullmatch = pattern.fullmatch  # there may be thousands of paths
            found.update(
                path for path in tree.nodes if fullmatch(path) and _picked(pattern, picks, path, tree)
            )
        return [path for path in tree.nodes if path in found] if found else []

    def matches(self, node: Node, tree: Tree) -> bool:
        return node.path == self.text or any(
            pattern.fullmatch(node.path) and _picked(pattern, picks, node.path, tree)
            for pattern, picks in self.patterns
        )


@dataclass(frozen=True)
class Regex(Selector):
    """``re:PATTERN``, always a full match."""

    text: str
    pattern: re.Pattern[str]

    def matches(self, node: Node, tree: Tree) -> bool:
        return self.pattern.fullmatch(node.path) is not None


@dataclass(frozen=True)
class Type(Selector):
    """``type:GLOB`` over the names of a module's class and its bases."""

    text: str
    glob: str

    def matches(self, node: Node, tree: Tree) -> bool:
        if self.glob in node.types:
            return True
        return any(char in self.glob for char in "*?[") and any(
            fnmatchcase(name, self.glob) for name in node.types
        )


@dataclass(frozen=True)
class Union(Selector):
    """A list: whatever any of its selectors matches."""

    text: str
    parts: tuple[Selector, ...]

    def select(self, tree: Tree) -> list[str]:
        found = {path for part in self.parts for path in part.select(tree)}
        return [path for path in tree.nodes if path in found]

    def select_parameters(self, modules: Tree, parameters: Tree) -> set[str]:
        return {name for part in self.parts for name in part.select_parameters(modules, parameters)}

    def matches(self, node: Node, tree: Tree) -> bool:
        return any(part.matches(node, tree) for part in self.parts)


@dataclass(frozen=True)
class All(Selector):
    """A mapping: every given key must hold."""

    text: str
    path: Selector | None = None
    type: Selector | None = None
    leaf: bool | None = None
    exclude: Selector | None = None
    min_params: int | None = None

    def select(self, tree: Tree) -> list[str]:
        candidates = self.path.select(tree) if self.path else tree.nodes
        found = [path for path in candidates if self._holds(tree.nodes[path], tree)]
        return found if self.exclude is None else tree.without(found, self.exclude.select(tree))

    def select_parameters(self, modules: Tree, parameters: Tree) -> set[str]:
        found = set(parameters.nodes)
        for part in (self.path, self.type):
            if part is not None:
                found &= part.select_parameters(modules, parameters)
        if self.exclude is not None:
            excluded = self.exclude.select_parameters(modules, parameters)
            found = set(parameters.without(found, excluded))
        rest = All(self.text, leaf=self.leaf, min_params=self.min_params)
        return {name for name in found if rest.matches(parameters.nodes[name], parameters)}

    def matches(self, node: Node, tree: Tree) -> bool:
        if self.exclude is not None and self.exclude.matches(node, tree):
            return False
        return (self.path is None or self.path.matches(node, tree)) and self._holds(node, tree)

    def _holds(self, node: Node, tree: Tree) -> bool:
        return (
            (self.type is None or self.type.matches(node, tree))
            and (self.leaf is None or self.leaf == node.leaf)
            and (self.min_params is None or node.parameters >= self.min_params)
        )


def parse_selector(raw: Any) -> Selector:
    """Parse any form of a selector; ValueError says what is wrong with it."""
    match raw:
        case Selector():
            return raw
        case bool() | None:
            raise ValueError(
                f"found {_yaml(raw)}, expected a path, a list or a mapping; quote a name that is a YAML word"
            )
        case int():
            return parse_selector(str(raw))
        case float():
            raise ValueError(f"found the number {raw!r}: quote it (YAML reads 1.10 as 1.1)")
        case str():
            return _parse_text(raw)
        case list() | tuple():
            if not raw:
                raise ValueError("the list is empty: name at least one module")
            parts = tuple(parse_selector(item) for item in raw)
            return Union("[" + ", ".join(part.text for part in parts) + "]", parts)
        case dict():
            return _parse_mapping(raw)
    raise ValueError(f"found {raw!r}, expected a path, a list or a mapping")


def _yaml(raw: bool | None) -> str:
    return {True: "true", False: "false", None: "nothing (null)"}[raw]


def _parse_text(text: str) -> Selector:
    if text.startswith("re:"):
        try:
            return Regex(text, re.compile(text[3:], re.DOTALL))
        except re.error as error:
            raise ValueError(f"found {text!r}, which is no regular expression: {error}") from error
    if text.startswith("type:"):
        if not (glob := text[5:].strip()):
            raise ValueError("found 'type:' without a class name, expected for example type:Conv2d")
        return Type(text, glob)
    return Path(text, tuple(_compile(alternative) for alternative in _expand(text)))


MAPPING_KEYS = ("path", "type", "leaf", "exclude", "min_params")


def _parse_mapping(raw: Mapping[Any, Any]) -> Selector:
    if not raw:
        raise ValueError("the mapping is empty: give at least one of " + ", ".join(MAPPING_KEYS))
    for key in raw:
        if key not in MAPPING_KEYS:
            raise ValueError(f"found the key {key!r}: {nearest(str(key), MAPPING_KEYS)}")
    keys: dict[str, Any] = dict(raw)
    if "leaf" in keys and not isinstance(keys["leaf"], bool):
        raise ValueError(f"leaf: found {keys['leaf']!r}, expected true or false")
    least = keys.get("min_params")
    if "min_params" in keys and (isinstance(least, bool) or not isinstance(least, int) or least < 0):
        raise ValueError(f"min_params: found {least!r}, expected a whole number of elements")
    for key in ("path", "exclude"):
        if key in keys:
            keys[key] = _named(key, parse_selector, keys[key])
    if "type" in keys:
        keys["type"] = _named("type", _parse_types, keys["type"])
    shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in keys.items()}
    text = "{" + ", ".join(f"{key}: {value}" for key, value in shown.items()) + "}"
    return All(text, **keys)


def _named(key: str, parse: Callable[[Any], Selector], raw: Any) -> Selector:
    try:
        return parse(raw)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _parse_types(raw: Any) -> Selector:
    names = raw if isinstance(raw, list | tuple) else [raw]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"found {raw!r}, expected a class name or a list of them")
    parts = tuple(Type(name, name.removeprefix("type:")) for name in names)
    return parts[0] if len(parts) == 1 else Union("[" + ", ".join(names) + "]", parts)


# ---- globs -----------------------------------------------------------------------------------------------------


def _expand(text: str) -> Iterator[str]:
    """The alternatives of ``{a,b}``, nested ones too."""
    start = text.find("{")
    if start < 0:
        if "}" in text:
            raise ValueError(f"found {text!r}: a }} without its {{")
        yield text
        return
    depth, parts, last = 0, [], start + 1
    for at in range(start, len(text)):
        char = text[at]
        depth += (char == "{") - (char == "}")
        if (char == "," and depth == 1) or depth == 0:
            parts.append(text[last:at])
            last = at + 1
        if depth == 0:
            break
    else:
        raise ValueError(
            f"found {text!r}: a {{ without its }} (on the command line braces need quotes inside quotes)"
        )
    for part in parts:
        yield from _expand(text[:start] + part + text[last:])


_SEGMENT = re.compile(r"([^\[\]]*)((?:\[[^\[\]]*\])*)")


def _compile(glob: str) -> tuple[re.Pattern[str], tuple[_Pick, ...]]:
    """A pattern over whole paths; its groups are the (container, child) pairs that the picks then judge."""
    pattern, picks = "", []
    while "**.**" in glob:
        glob = glob.replace("**.**", "**")
    segments = glob.split(".") if glob else []
    for number, segment in enumerate(segments):
        first, final = number == 0, number == len(segments) - 1
        if segment == "**":
            if first:
                pattern += r"(?:[^.]+(?:\.[^.]+)*)?" if final else r"(?:[^.]+\.)*"
            else:
                pattern += r"(?:\.[^.]+)*"
            continue
        if (shape := _SEGMENT.fullmatch(segment)) is None:
            raise ValueError(f"found {segment!r}: an index is written h[0], h[-1] or h[0:4]")
        name, indexes = shape.groups()
        if not name and not indexes:
            raise ValueError(f"found {glob!r}: a name between two dots is empty")
        glued = first or (number == 1 and segments[0] == "**")
        if name:
            pattern += "" if glued else r"\."
            pattern += _translate(name)
            glued = False
        for index in re.findall(r"\[([^\[\]]*)\]", indexes):
            picks.append(_pick(index, segment))
            pattern += "()" + ("" if glued else r"\.") + r"([^.]+)"
            glued = False
    return re.compile(pattern, re.DOTALL), tuple(picks)


def _ancestors(name: str) -> Iterator[str]:
    """Every module path that `name` lies under, the root's too: ``a.b.weight`` -> ``a.b``, ``a``, the empty one."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _translate(name: str) -> str:
    if "**" in name:
        raise ValueError(f"found {name!r}: ** stands alone between dots, inside a name * is enough")
    special = {"*": "[^.]*", "?": "[^.]"}
    return r"[^.]+" if name == "*" else "".join(special.get(char) or re.escape(char) for char in name)


def _pick(index: str, segment: str) -> _Pick:
    try:
        numbers = [int(part) if part.strip() else None for part in index.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or numbers == [None]:
        raise ValueError(f"found {segment!r}: an index is a whole number or a slice, h[0], h[-1] or h[0:4]")
    if len(numbers) == 3 and numbers[2] == 0:
        raise ValueError(f"found {segment!r}: the step of a slice is not 0")
    if len(numbers) > 1:
        return lambda children: children[slice(*numbers)]
    at = numbers[0] or 0
    return lambda children: children[at : at + 1 or None]


def _picked(pattern: re.Pattern[str], picks: Iterable[_Pick], path: str, tree: Tree) -> bool:
    """Whether every index of a path that matches `pattern` is among those that its container's children allow."""
    found = pattern.fullmatch(path) if picks else None
    if found is None:
        return True
    for number, pick in enumerate(picks):
        container = path[: found.start(2 * number + 1)]
        if found.group(2 * number + 2) not in pick(tree.numbered.get(container.removesuffix("."), ())):
            return False
    return True
