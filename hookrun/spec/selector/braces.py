"""Expands alternatives in braces, ``{q,k,v}_proj``, within limits."""

from __future__ import annotations

import re

from hookrun.spec.selector.base import MAX_DEPTH, MAX_PARTS, shown


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
        if token == "{":
            if len(groups) > MAX_DEPTH:
                raise ValueError(f"found {shown(text)}: braces are nested at most {MAX_DEPTH} deep")
            groups.append(([], [""]))
        elif token == "}":
            if len(groups) == 1:
                raise ValueError(f"found {shown(text)}: a }} without its {{")
            groups.pop()
            outer, before = groups[-1]
            groups[-1] = (outer, _joined(before, complete + begun, text))
        elif token == "," and len(groups) > 1:
            groups[-1] = (complete + begun, [""])
        else:
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
