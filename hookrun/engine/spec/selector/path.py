"""A selector by path: exact, or a glob with braces and indexes, which becomes one regular expression of RE2."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import re2

from hookrun.engine.spec.selector.base import GLOB_PARTS, Parser, Selector, alternatives, shown
from hookrun.engine.spec.selector.regex import compiled, matching
from hookrun.engine.spec.selector.tree import Names, Tree
from hookrun.engine.validation import join
from hookrun.engine.values.index import IndexRange, number_or_range
from hookrun.errors import nearest

ANY_DEPTH = "**"
Segment = str | IndexRange
"""The pattern of one name of a path, or ``**`` for any number of names."""
Glob = tuple[Segment, ...]

_SHAPE = re.compile(r"([^\[\]]*)((?:\[[^\[\]]*\])*)")
_MAX_MEMORY = 1 << 20
"""Bytes for the expression of all alternatives: about 1,000 of them with ``**`` and five names."""


@dataclass(frozen=True)
class PathSelector(Selector):
    """An exact path or a glob, with Python indexes over numbered children.

    exact: the alternatives without wildcards and indexes
    globs: the segments of the others
    """

    text: str
    exact: frozenset[str] = field(compare=False, repr=False)
    globs: tuple[Glob, ...] = field(compare=False, repr=False)

    position = 0
    rows = {
        "layer4.0.conv1": "exact path; the empty string is the root module",
        "layer*.conv?": "glob: `*` and `?` stay inside one name between dots",
        "**.attn": "`**` spans any number of names, including zero",
        "{q,k,v}_proj": "alternatives, at most 1,000, nested at most 32 deep",
        "h[0:4].mlp": "Python index or slice over the numbered children of a container, in their order; "
        "on parameter hooks over numbered parameters too",
    }
    schema = {"type": ["string", "integer"], "description": "path or glob"}

    @classmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        texts = alternatives(raw)
        parser.count(len(texts) - 1)
        globs = {text: parse_glob(text) for text in texts}
        exact = frozenset(text for text, segments in globs.items() if all(map(_is_name, segments)))
        others = tuple(segments for text, segments in globs.items() if text not in exact)
        if others:
            special = {each for segments in others for each in segments if not _is_name(each)}
            parser.count(GLOB_PARTS * (1 + len(special - {"*", ANY_DEPTH})))
            try:
                compiled(_pattern(others), _MAX_MEMORY)
            except re2.error as error:
                raise ValueError(f"found {shown(raw)}: its alternatives are too large together") from error
        return cls(raw, exact, others)

    def find(self, tree: Tree) -> set[str]:
        if self.text in tree.nodes:  # an exact name wins, also if it looks like a glob
            return {self.text}
        paths = set[str]()
        for starts, globs in self._below_indexes(tree).items():
            paths.update(matching(_pattern(globs), tree.below(tree.nodes, starts)))
        named = self.exact & (tree.nodes.keys() | tree.points.keys())
        return paths - tree.without_forward | named

    def _below_indexes(self, tree: Tree) -> Mapping[frozenset[str], list[Glob]]:
        """Paths -> the globs without indexes that a path below one of them has to match."""
        pending = dict.fromkeys(self.globs, frozenset({""}))
        ends = defaultdict[frozenset[str], list[Glob]](list)
        while pending:
            glob = max(pending, key=len)  # globs with the same end go on together
            starts = pending.pop(glob)
            at = next((at for at, each in enumerate(glob) if isinstance(each, IndexRange)), None)
            if at is None:
                ends[starts].append(glob)
                continue
            index, end = glob[at], glob[at + 1 :]
            containers = matching(_pattern([glob[:at]]), tree.below(tree.numbered, starts))
            children = {
                join(each, name) for each in containers for name in tree.numbered[each][slice(*index)]
            }
            if children:
                pending[end] = pending.get(end, frozenset()) | children
        return ends

    def nearest(self, names: Names) -> str:
        if difflib.get_close_matches(self.text, names.paths, n=1):
            return nearest(self.text, names.paths)
        last = self.text.rpartition(".")[2].strip("*?").lower()
        containing = [path for path in names.paths if last and last in path.lower()]
        return nearest(self.text, containing or names.children)

    def possible(self, names: Names) -> Sequence[str]:
        return names.paths if self.text in self.exact else ()


def _is_name(segment: Segment) -> bool:
    return isinstance(segment, str) and "*" not in segment and "?" not in segment


def _pattern(globs: Iterable[Glob]) -> str:
    """The regular expression for paths with a dot before each name; an index stands for any name."""
    return "|".join("".join(map(_segment_pattern, glob)) for glob in globs)


def _segment_pattern(segment: Segment) -> str:
    if isinstance(segment, IndexRange):
        return r"\.[^.]*"
    if segment == ANY_DEPTH:
        return r"(?:\.[^.]*)*"
    wild = {"*": "[^.]*", "?": "[^.]"}
    return r"\." + "".join(wild.get(part) or re2.escape(part) for part in re.split(r"([*?])", segment))


def parse_glob(glob: str) -> Glob:
    """The segments of a glob without braces: ``h[0].*`` -> ``h``, an index, ``*``. ValueError for a mistake in it."""
    segments: list[Segment] = []
    for text in glob.split(".") if glob else ():
        if text == ANY_DEPTH:
            if segments[-1:] != [ANY_DEPTH]:  # two in a row mean the same as one
                segments.append(ANY_DEPTH)
            continue
        shape = _SHAPE.fullmatch(text)
        if shape is None:
            raise ValueError(f"found {shown(text)}: an index is written h[0], h[-1] or h[0:4]")
        name, indexes = shape.groups()
        if not text:
            raise ValueError(f"found {shown(glob)}: a name between two dots is empty")
        if ANY_DEPTH in name:
            raise ValueError(f"found {shown(text)}: ** stands alone between dots, inside a name * is enough")
        segments += [name] if name else []
        segments += [_parse_index(index, text) for index in re.findall(r"\[([^\[\]]*)\]", indexes)]
    return tuple(segments)


def _parse_index(index: str, text: str) -> IndexRange:
    place = number_or_range(index)
    if place is None:
        raise ValueError(f"found {shown(text)}: an index is a whole number or a slice, h[0], h[-1] or h[0:4]")
    if isinstance(place, int):
        return IndexRange(place, place + 1 or None)
    if place.every == 0:
        raise ValueError(f"found {shown(text)}: the step of a slice is not 0")
    return place
