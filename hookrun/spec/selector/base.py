"""The base class of the forms of a selector, and the parser that reads nested selectors within limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hookrun.errors import nearest
from hookrun.errors import shown as shown
from hookrun.spec.selector.tree import Names, Tree, ancestors

MAX_TEXT = 1000
"""Characters of one path, glob, regular expression or class name."""
MAX_DEPTH = 32
"""How deep lists and mappings may be nested in each other, and braces in each other."""
MAX_PARTS = 1000
"""Lists, mappings, their members and the alternatives in braces, together; each counts as one."""
GLOB_PARTS = 4
"""What a glob counts as beyond its alternatives, and each pattern with ``*`` or ``?`` in it: matching it takes time."""
REGEX_PARTS = 20
"""What a regular expression counts as."""
_MAX_INTEGER = 10**18


@dataclass(frozen=True)
class Unmatched:
    """A member of a list that matches nothing, and its place: ``member 2 of the list``."""

    selector: Selector
    place: str


class Selector(ABC):
    """A parsed selector. A form is a subclass in a module of this package; the module's name does not matter.

    text:     how the user wrote it
    position: the place of the form in the reference table; a form in a later place is asked earlier whether it
              reads a value, so that the plain path, which reads every text, is asked last
    rows:     example -> what it matches, for the reference table
    """

    text: str
    position: ClassVar[int] = 100
    rows: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @abstractmethod
    def reads(cls, raw: Any) -> bool:
        """Whether a value from YAML or Python is written in this form. An integer arrives as text."""

    @classmethod
    @abstractmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        """The selector of a value that the form reads; `parser` reads the selectors inside it.

        Raises ValueError, which says what was found and what is expected.
        """

    @classmethod
    @abstractmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON schema of the values that it reads, with a description."""

    @abstractmethod
    def find(self, tree: Tree) -> Collection[str]:
        """The paths that match, in any order."""

    def select(self, tree: Tree) -> list[str]:
        """The paths that match, each once, in the order of the tree."""
        return tree.ordered(self.find(tree))

    def select_parameters(self, modules: Tree, parameters: Tree) -> set[str]:
        """The parameters that match: by name, or because a module that they belong to matches."""
        found = set(self.find(parameters))
        owners = set(self.find(modules))
        if owners:
            found.update(name for name in parameters.nodes if not owners.isdisjoint(ancestors(name)))
        return found

    def unmatched(
        self, modules: Tree, parameters: Tree | None = None, where: str = ""
    ) -> Iterator[Unmatched]:
        """The members of its lists that match no module, or no parameter of `parameters` if that is given.

        where: what the selector is within a larger one, ``member 2 of the list``; empty for a whole selector
        """
        yield from ()

    def nearest(self, names: Names) -> str:
        """What the user may have meant, where the selector matches nothing."""
        return nearest(self.text, names.children)

    def __str__(self) -> str:
        return self.text


class Parser:
    """Reads one selector and those inside it, and counts them: nesting and number are limited."""

    def __init__(self, forms: Sequence[type[Selector]]) -> None:
        self._asked = sorted(forms, key=lambda form: form.position, reverse=True)
        self._depth = 0
        self._parts = 0

    def parse(self, raw: Any) -> Selector:
        """The selector of any form. Raises ValueError, which says what is wrong with it."""
        if self._depth == MAX_DEPTH:
            raise ValueError(f"lists and mappings are nested too deep: at most {MAX_DEPTH} levels")
        self.count(1)
        self._depth += 1
        try:
            return self._parse(_plain(raw))
        finally:
            self._depth -= 1

    def named(self, key: str, raw: Any, parse: Callable[[Any], Selector] | None = None) -> Selector:
        """The selector under a key of a mapping, which errors name. `parse`: by default that of any form."""
        try:
            return (parse or self.parse)(raw)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    def count(self, parts: int) -> None:
        """Add to the number of parts read so far. Raises ValueError beyond MAX_PARTS."""
        self._parts += parts
        if self._parts > MAX_PARTS:
            raise ValueError(
                f"the selector is too large: at most {MAX_PARTS:,} members of lists and mappings and alternatives "
                f"in braces, where a glob counts as {GLOB_PARTS + 1} and a regular expression as {REGEX_PARTS}"
            )

    def _parse(self, raw: Any) -> Selector:
        if isinstance(raw, Selector):
            return raw
        for form in self._asked:
            if form.reads(raw):
                return form.parse(raw, self)
        raise ValueError(f"found {shown(raw)}, expected a path, a list or a mapping")


def _plain(raw: Any) -> Any:
    """The value itself, an integer as text; ValueError for scalars that are not names."""
    if isinstance(raw, bool) or raw is None:
        found = {True: "true", False: "false", None: "nothing (null)"}[raw]
        raise ValueError(
            f"found {found}, expected a path, a list or a mapping; quote a name that is a YAML word"
        )
    if isinstance(raw, int):
        if abs(raw) >= _MAX_INTEGER:
            raise ValueError("found a whole number of more than 18 digits, expected a path")
        return str(raw)
    if isinstance(raw, float):
        raise ValueError(f"found the number {raw!r}: quote it (YAML reads 1.10 as 1.1)")
    if isinstance(raw, str):
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
