"""Globs over dotted paths, matched name by name by one automaton."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hookrun.spec.selector.base import shown
from hookrun.spec.selector.tree import Tree


class NumberedIndex(NamedTuple):
    """The arguments of a slice over the numbered children of a container."""

    start: int | None
    stop: int | None
    step: int | None = None


ANY_DEPTH = "**"
Segment = str | NumberedIndex
"""The pattern of one name of a path, or ``**`` for any number of names."""

_SHAPE = re.compile(r"([^\[\]]*)((?:\[[^\[\]]*\])*)")


def parse_glob(glob: str) -> tuple[Segment, ...]:
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


def _parse_index(index: str, text: str) -> NumberedIndex:
    try:
        numbers = [int(part) if part.strip() else None for part in index.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or numbers == [None]:
        raise ValueError(f"found {shown(text)}: an index is a whole number or a slice, h[0], h[-1] or h[0:4]")
    if len(numbers) == 3 and numbers[2] == 0:
        raise ValueError(f"found {shown(text)}: the step of a slice is not 0")
    if len(numbers) > 1:
        return NumberedIndex(*numbers)
    at = numbers[0] or 0
    return NumberedIndex(at, at + 1 or None)


@dataclass(frozen=True)
class GlobSet:
    """Globs compiled into one nondeterministic automaton; a set of its states is an integer, one bit for each state.

    State i of a glob means that the names so far match its first i segments. In the fields below, the bit of a state
    says that the next segment is of that kind. Each name updates all states at once, so the work is proportional to the
    number of names, and all ways to match a path are tried together.

    literals:  segments without wildcards
    wildcards: patterns of segments with ``*`` or ``?``
    any_name:  ``*``
    any_depth: ``**``
    indexes:   indexes over numbered children
    start:     the states before the first name
    accept:    the states after the last segment
    """

    literals: dict[str, int]
    wildcards: tuple[tuple[re.Pattern[str], int], ...]
    any_name: int
    any_depth: int
    indexes: tuple[tuple[NumberedIndex, int], ...]
    start: int
    accept: int

    @property
    def exact(self) -> bool:
        """Whether every segment is a name."""
        return not (self.wildcards or self.any_name or self.any_depth or self.indexes)

    def find(self, tree: Tree) -> set[str]:
        """The paths that match any of the globs."""
        any_depth, accept, any_index = self.any_depth, self.accept, sum(bits for _, bits in self.indexes)
        fitting: dict[str, int] = {}  # name -> the states that have a transition for it
        found = {""} if tree.root.is_node and self.start & accept else set[str]()
        reached = [(tree.root, self.start)]
        while reached:
            branch, states = reached.pop()
            staying = states & any_depth
            numbered = tree.numbered.get(branch.path, ()) if states & any_index else ()
            picked = self._picked(states, numbered) if numbered else {}
            for name, child in branch.children.items():
                segments = fitting.get(name)
                if segments is None:
                    segments = fitting[name] = self._fitting(name)
                leaving = states & segments
                if picked:
                    leaving |= picked.get(name, 0)
                after = leaving << 1 | staying
                if not after:
                    continue
                after |= (after & any_depth) << 1
                if after & accept and child.is_node:
                    found.add(child.path)
                if child.children:
                    reached.append((child, after))
        return found

    def _fitting(self, name: str) -> int:
        """The states that have a transition for a name, not counting indexes."""
        found = self.any_name | self.literals.get(name, 0)
        for pattern, states in self.wildcards:
            if pattern.match(name):
                found |= states
        return found

    def _picked(self, states: int, numbered: Sequence[str]) -> dict[str, int]:
        """Numbered child -> the states whose index selects it."""
        found = defaultdict[str, int](int)
        for index, before in self.indexes:
            if states & before:
                for name in numbered[slice(*index)]:
                    found[name] |= states & before
        return found


def compile_globs(globs: Iterable[Sequence[Segment]]) -> GlobSet:
    """One automaton for several globs."""
    places = defaultdict[Segment, list[int]](list)
    starts, ends = [], []
    at = 0
    for segments in globs:
        starts.append(at)
        for segment in segments:
            places[segment].append(at)
            at += 1
        ends.append(at)
        at += 1
    states = {segment: _bits(numbers, at) for segment, numbers in places.items()}
    any_depth = states.pop(ANY_DEPTH, 0)
    any_name = states.pop("*", 0)
    start = _bits(starts, at)
    names = {segment: bits for segment, bits in states.items() if isinstance(segment, str)}
    wild = {name for name in names if "*" in name or "?" in name}
    return GlobSet(
        {name: bits for name, bits in names.items() if name not in wild},
        # the translation of fnmatch never backtracks
        tuple((re.compile(fnmatch.translate(name)), names[name]) for name in names if name in wild),
        any_name,
        any_depth,
        tuple((segment, bits) for segment, bits in states.items() if isinstance(segment, NumberedIndex)),
        start | (start & any_depth) << 1,
        _bits(ends, at),
    )


def _bits(places: Collection[int], length: int) -> int:
    """The integer with these bits set."""
    content = bytearray(length // 8 + 1)
    for place in places:
        content[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(content, "little")
