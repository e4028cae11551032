"""A selector by regular expression, in RE2: matching takes time linear in the length of a name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import re2

from hookrun.engine.spec.selector.base import REGEX_PARTS, Parser, Selector, shown
from hookrun.engine.spec.selector.tree import Tree

_MAX_MEMORY = 4 << 20
"""Bytes for one compiled expression with its cache of states; RE2 refuses larger expressions and clears the cache."""
_RANGE_BYTES = 100
"""Bytes to which the bounds of the names that an expression can match are cut."""


@dataclass(frozen=True)
class RegexSelector(Selector):
    r"""``re:PATTERN``, always a full match. A dot matches a newline too; ``\d``, ``\w`` and ``\s`` are ASCII."""

    text: str

    position = 10
    rows = {
        r"re:layer[1-4]\.\d+": "regular expression in RE2's syntax, always a full match; "
        r"no lookaround, no backreferences (use `exclude` instead); `\d`, `\w`, `\s` are ASCII"
    }
    prefix = "re:"
    schema = {"type": "string", "pattern": f"^{prefix}", "description": "re:PATTERN"}

    @classmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        parser.count(REGEX_PARTS - 1)
        pattern = raw.removeprefix(cls.prefix)
        try:
            compiled(pattern)
        except re2.error as error:
            reason = error.args[0].decode(errors="replace") if error.args else "it is too large"
            raise ValueError(
                f"found {shown(raw)}, which is not a regular expression of RE2: {reason}{_hint(pattern)}"
            ) from error
        return cls(raw)

    def find(self, tree: Tree) -> list[str]:
        texts = ((path, dotted[1:]) for path, dotted in tree.dotted.items())
        return matching(self.text.removeprefix(self.prefix), texts)


def matching(pattern: str, texts: Iterable[tuple[str, bytes]]) -> list[str]:
    """The paths whose text the whole pattern matches."""
    fullmatch = compiled(pattern).fullmatch
    try:  # for an expression that begins with ^ RE2 gives the range of its matches
        least, most = compiled(f"^(?:{pattern})").possiblematchrange(_RANGE_BYTES)
    except re2.error:  # a match may begin with anything
        return [path for path, text in texts if fullmatch(text)]
    return [path for path, text in texts if least <= text <= most and fullmatch(text)]


def compiled(pattern: str, memory: int = _MAX_MEMORY) -> Any:
    """The expression, of at most these bytes. Raises re2.error if it is wrong or too large."""
    options = re2.Options()
    options.dot_nl = True
    options.log_errors = False  # to stderr
    options.max_mem = memory
    options.never_capture = True  # without groups it matches in one pass
    return re2.compile(pattern, options)


def _hint(pattern: str) -> str:
    if re.search(r"\(\?(?:<?[=!]|P=|\()|\\[1-9]", pattern):
        return (
            "; lookaround and backreferences are not supported: write what must not match under `exclude`, "
            "as in {path: 're:h.*', exclude: 're:h.3.*'}"
        )
    return r"; a match is always full, leave \Z out" if r"\Z" in pattern else ""
