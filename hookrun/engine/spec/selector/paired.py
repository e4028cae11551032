"""Modules of two models that belong together: globs whose wildcards correspond one to one. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

import re2
from pydantic import Field

from hookrun.engine.spec.selector import parse_selector
from hookrun.engine.spec.selector.base import alternatives, shown
from hookrun.engine.spec.selector.path import ANY_DEPTH, PathSelector, parse_glob
from hookrun.engine.spec.selector.tree import Names, Tree
from hookrun.engine.validation import Section, validated
from hookrun.errors import MOST_LISTED, Mistakes, nearest, refused_at, spec_error

V = TypeVar("V")

MOST_PAIRS = 10_000
_WILDCARD = re.compile(r"(\*\*|\*|\?)")
_GROUPS = {ANY_DEPTH: r"((?:\.[^.]*)*)", "*": "([^.]*)", "?": "([^.])"}
"""A wildcard -> what it matches in a path with a dot before each name."""

Name = str | Annotated[int, Field(strict=True)]
"""A glob; YAML reads the name of a layer such as 0 as a number."""


class Paired(Section):
    """What is said of two models whose modules have other names.

    names:     globs of the first model -> globs of the other one
    transpose: globs of the other model -> the dimensions of its values in the order of the first model's
    """

    names: Annotated[dict[Name, Name], Field(min_length=1)] | None = None
    transpose: dict[Name, tuple[int, ...]] = {}

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Self:
        """Raises SpecError with every mistake in what was given at the key path `where`."""
        return validated(cls, given, where)


@dataclass(frozen=True)
class Side:
    """The modules of one of the two models.

    title: what the model is called in messages
    paths: of all its modules
    used:  of those that are looked at
    """

    title: str
    paths: Collection[str]
    used: Collection[str]


@dataclass(frozen=True)
class _Glob:
    """A glob without braces that can match a name in one way only.

    tokens: names with a dot before each, and wildcards between them
    """

    text: str
    tokens: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> _Glob:
        """Raises ValueError for an index, and where it is open what a wildcard stands for."""
        dotted = ""
        for segment in parse_glob(text):
            if not isinstance(segment, str):
                raise ValueError(f"found {shown(text)}: an index counts modules, write * for their names")
            dotted += segment if segment == ANY_DEPTH else f".{segment}"
        tokens = tuple(_WILDCARD.split(dotted))
        if re.search(r"\*[^.*]+\*", dotted) or tokens.count(ANY_DEPTH) > 1:
            raise ValueError(
                f"found {shown(text)}: of two * in one name, or two **, it is open what each stands for"
            )
        return cls(text, tokens)

    @property
    def wildcards(self) -> tuple[str, ...]:
        """The wildcards in their order."""
        return self.tokens[1::2]

    def matches(self, names: Collection[str]) -> list[tuple[str, tuple[str, ...]]]:
        """Each name that it matches, and what its wildcards stand for there."""
        if not self.wildcards:
            return [(self.text, ())] if self.text in names else []
        pattern = "".join(_GROUPS.get(token) or re2.escape(token) for token in self.tokens)
        fullmatch = re2.compile(pattern).fullmatch
        matches = ((name, fullmatch(f".{name}" if name else "")) for name in names)
        return [(name, match.groups()) for name, match in matches if match]

    def filled(self, parts: tuple[str, ...]) -> str:
        """The name in which the wildcards stand for these parts."""
        texts = list(self.tokens)
        texts[1::2] = parts
        return "".join(texts)[1:]


def partners(given: Mapping[Any, Any], first: Side, other: Side, where: str) -> dict[str, str]:
    """A module of the first model -> the one of the other model that belongs to it.

    given: globs of the first model -> globs of the other one, whose wildcards and alternatives in braces correspond; a
           module that none of them names belongs to the one of the same name
    where: the key path of `given`

    Raises SpecError for globs that do not correspond or match nothing, for a module that is looked at and whose partner
    is missing, and for a module that two of them name.
    """
    mistakes = Mistakes()
    globs: list[tuple[str, _Glob, _Glob]] = []
    for left, right in given.items():
        place = f"{where}.{left}"
        globs += [(place, *pair) for pair in mistakes.tried(_corresponding, left, right, place) or ()]
        if len(globs) > MOST_PAIRS:
            what = f"holds more than {MOST_PAIRS:,} pairs, alternatives in braces counted"
            raise spec_error(where, what, "use wider globs")
    mistakes.refuse()
    named: dict[str, str] = {}
    taken: dict[str, str] = {}
    for place, left, right in globs:
        mistakes.tried(_matched, right, left, other, first, place)  # each that is looked at needs its partner
        for path, partner in mistakes.tried(_matched, left, right, first, other, place) or ():
            known = taken.setdefault(partner, path), named.setdefault(path, partner)
            if known != (path, partner):
                what = f"pairs {path!r} with {partner!r}, of which another entry names one as well"
                mistakes.note(place, what, "leave one of them out")
        if len(mistakes.problems) >= MOST_LISTED:  # the nearest names take time
            break
    mistakes.refuse()
    same = [path for path in first.paths if path in other.paths and path not in taken]
    return {path: path for path in same} | named


def _corresponding(left: Any, right: Any, where: str) -> list[tuple[_Glob, _Glob]]:
    """The alternatives of two globs in pairs. Raises SpecError if they do not correspond."""
    with refused_at(where, kinds=ValueError):
        lefts = _alternatives(left)
        rights = _alternatives(right)
        if [each.wildcards for each in lefts] != [each.wildcards for each in rights]:
            raise ValueError(
                f"does not correspond to {right!r}: both need the same wildcards in the same order, and as many "
                "alternatives in braces"
            )
    return list(zip(lefts, rights, strict=True))


def _alternatives(raw: Any) -> list[_Glob]:
    selector = parse_selector(raw)
    if not isinstance(selector, PathSelector):
        raise ValueError(f"found {shown(raw)}, expected a name or a glob")
    return [_Glob.parse(text) for text in alternatives(selector.text)]


def _matched(glob: _Glob, opposite: _Glob, side: Side, other: Side, where: str) -> list[tuple[str, str]]:
    """The modules of a side that the glob matches, with their partners.

    Raises SpecError if there are none, or if the partner of one that is looked at is missing.
    """
    found = glob.matches(side.paths)
    if not found:
        hint = parse_selector(glob.text).nearest(Names(list(side.paths)))
        raise spec_error(where, f"{glob.text!r} matches no module of {side.title}", hint)
    pairs: list[tuple[str, str]] = []
    for name, parts in found:
        partner = opposite.filled(parts)
        if partner in other.paths:
            pairs.append((name, partner))
        elif name in side.used:
            what = f"{name!r} belongs to {partner!r}, which is missing in {other.title}"
            raise spec_error(where, what, nearest(partner, filter(None, other.paths)))
    return pairs


def chosen(given: Mapping[Any, V], side: Side, where: str) -> dict[str, V]:
    """Each module that is looked at -> the value of the selector that matches it.

    Raises SpecError for a selector that matches none, and for a module that two of them match.
    """
    tree = Tree.of_names(side.used)
    values: dict[str, V] = {}
    for text, value in given.items():
        place = f"{where}.{text}"
        with refused_at(place, kinds=ValueError):
            selector = parse_selector(text)
        paths = selector.select(tree)
        if not paths or values.keys() & set(paths):
            what = f"matches no module of {side.title} that is compared, or one that another entry matches"
            raise spec_error(place, what, nearest(str(text), filter(None, side.used)))
        values |= dict.fromkeys(paths, value)
    return values
