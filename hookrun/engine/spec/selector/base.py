"""The base class of the selector forms, and the parser that reads nested selectors and braces within limits."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hookrun.engine.spec.selector.tree import Names, Tree, ancestors
from hookrun.errors import nearest
from hookrun.errors import shown as shown

MAX_TEXT = 1000
"""Characters of one path, glob, regular expression or class name."""
MAX_DEPTH = 32
"""The largest nesting depth of lists and mappings, and of braces."""
MAX_PARTS = 1000
"""The largest number of lists, mappings, members and alternatives in braces, together."""
GLOB_PARTS = 4
"""How many parts a glob, and each pattern with ``*`` or ``?`` in it, counts beside its alternatives."""
REGEX_PARTS = 20
"""How many parts a regular expression counts."""


class Selector(ABC):
    """A parsed selector. A form is a subclass in a module of this package; the module's name does not matter.

    text:     how the user wrote it
    position: the position of the form in the reference table; forms are tried from the last position to the first, so
              that the plain path, which reads every text, is tried last
    rows:     example -> what it matches, for the reference table
    schema:   the JSON schema of the values of this form, with a description
    types:    the types of the values of this form; an integer is passed as text
    prefix:   what a text of this form starts with
    """

    text: str
    position: ClassVar[int] = 100
    rows: ClassVar[Mapping[str, str]] = {}
    schema: ClassVar[Mapping[str, Any]]
    types: ClassVar[tuple[type, ...]] = (str,)
    prefix: ClassVar[str] = ""

    @classmethod
    def reads(cls, raw: Any) -> bool:
        """Whether a value from YAML or Python has this form."""
        return isinstance(raw, cls.types) and (not isinstance(raw, str) or raw.startswith(cls.prefix))

    @classmethod
    @abstractmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        """The selector for a value of this form; `parser` reads the selectors inside it.

        Raises ValueError, which says what was found and what is expected.
        """

    @abstractmethod
    def find(self, tree: Tree) -> Collection[str]:
        """The paths that match by themselves, in any order."""

    def select(self, tree: Tree) -> list[str]:
        """The `paths`, in the order of the tree; points follow the modules."""
        paths = self.paths(tree)
        return [path for path in (*tree.nodes, *tree.points) if path in paths] if paths else []

    def paths(self, tree: Tree) -> set[str]:
        """The paths that match, in any order; of parameters also those of every module that matches."""
        paths = set(self.find(tree))
        owners = set() if tree.modules is None else set(self.find(tree.modules))
        if owners:
            paths.update(name for name in tree.nodes if not owners.isdisjoint(ancestors(name)))
        return paths

    def unmatched(self, tree: Tree, where: str = "") -> Iterator[tuple[Selector, str]]:
        """The members of its lists that match nothing, with their places.

        where: the position within a larger selector, ``member 2 of the list``; empty for a whole selector
        """
        yield from ()

    def nearest(self, names: Names) -> str:
        """A hint on what the user may have meant, for a selector that matches nothing."""
        return nearest(self.text, names.children)

    def possible(self, names: Names) -> Sequence[str]:
        """The selectors that this one may be misspelled for; empty if it is not one name alone."""
        return ()

    def __str__(self) -> str:
        return self.text


@dataclass
class Parser:
    """Reads a selector and those inside it, and limits their nesting and number.

    forms: every form, in the order of their positions
    """

    forms: Sequence[type[Selector]]
    _depth: int = 0
    _parts: int = 0

    def parse(self, raw: Any) -> Selector:
        """The selector of any form. Raises ValueError, which says what is wrong with it."""
        if self._depth == MAX_DEPTH:
            raise ValueError(f"lists and mappings are nested too deep: at most {MAX_DEPTH} levels")
        self.count(1)
        if isinstance(raw, Selector):
            return raw
        value = _plain(raw)
        form = next((form for form in reversed(self.forms) if form.reads(value)), None)
        if form is None:
            raise ValueError(f"found {shown(raw)}, expected a path, a list or a mapping")
        self._depth += 1
        try:
            return form.parse(value, self)
        finally:
            self._depth -= 1

    def count(self, parts: int) -> None:
        """Add to the number of parts read so far. Raises ValueError above MAX_PARTS."""
        self._parts += parts
        if self._parts > MAX_PARTS:
            raise ValueError(
                f"the selector is too large: at most {MAX_PARTS:,} members of lists and mappings and alternatives "
                f"in braces, where a glob counts as {GLOB_PARTS + 1} and a regular expression as {REGEX_PARTS}"
            )


def _plain(raw: Any) -> Any:
    """The value itself, an integer as text; ValueError for scalars that are not names."""
    match raw:
        case bool() | None:
            word = {True: "true", False: "false", None: "nothing (null)"}[raw]
            raise ValueError(
                f"found {word}, expected a path, a list or a mapping; quote a name that is a YAML word"
            )
        case int() if abs(raw) >= 10**18:
            raise ValueError("found a whole number of more than 18 digits, expected a path")
        case int():
            return str(raw)
        case float():
            raise ValueError(f"found the number {raw!r}: quote it (YAML reads 1.10 as 1.1)")
        case str():
            check_text(raw)
    return raw


def check_text(text: str) -> None:
    """Raises ValueError for a text of more than MAX_TEXT characters, or that is not valid Unicode."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"found a text of {len(text):,} characters, expected at most {MAX_TEXT:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"found {shown(text)}, which is not valid Unicode") from error


def alternatives(text: str) -> list[str]:
    """Every text that braces such as ``{a,b}`` expand to, also nested ones, in the order in which they are written.

    Raises ValueError for a brace without its partner, braces nested deeper than MAX_DEPTH, and more than MAX_PARTS
    alternatives.
    """
    # One pair for each open brace and one for the text outside: the complete alternatives, up to the last comma,
    # and the beginnings of those that are being read.
    groups: list[tuple[list[str], list[str]]] = [([], [""])]
    for token in re.split(r"([{},])", text):
        complete, begun = groups[-1]
        match token:
            case "{" if len(groups) > MAX_DEPTH:
                raise ValueError(f"found {shown(text)}: braces are nested at most {MAX_DEPTH} deep")
            case "{":
                groups.append(([], [""]))
            case "}" if len(groups) == 1:
                raise ValueError(f"found {shown(text)}: a }} without its {{")
            case "}":
                groups.pop()
                outer, before = groups[-1]
                groups[-1] = (outer, _joined(before, complete + begun, text))
            case "," if len(groups) > 1:
                groups[-1] = (complete + begun, [""])
            case _:
                groups[-1] = (complete, [beginning + token for beginning in begun])
    if len(groups) > 1:
        raise ValueError(
            f"found {shown(text)}: a {{ without its }} (on the command line braces need quotes inside quotes)"
        )
    return groups[0][1]


def _joined(beginnings: list[str], ends: list[str], text: str) -> list[str]:
    if len(beginnings) * len(ends) > MAX_PARTS:
        raise ValueError(
            f"found {shown(text)}: its braces stand for more than {MAX_PARTS:,} alternatives, the most there may be"
        )
    return [beginning + end for beginning in beginnings for end in ends]
