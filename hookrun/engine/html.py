"""HTML for notebooks: tables and lines in the notebook's own colours, bounded and escaped, without scripts or links.

What is shown comes from a file of somebody else: names, values, paths. All of it passes `escaped`. What has passed is
`Html`, and nothing else is accepted as a part of a page.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NewType

from hookrun.errors import first_lines, shortened

Html = NewType("Html", str)
"""A text in which everything from outside is escaped."""

MOST_ROWS = 20
"""How many rows of a table are shown."""
_FEW = 3
"""How many rows are shown in a plain repr."""
MOST_COLUMNS = 24
"""How many columns of a table are shown."""
MOST_OF_A_CELL = 80
MOST_OF_A_LINE = 320
"""How many characters of a text are shown."""

_RULE = "border-bottom:1px solid currentColor"
_CELL = "vertical-align:top;white-space:nowrap;padding:.1em 1em .1em 0;text-align:"

Cell = str | float | bool | None
"""A text, a number, or None for an empty cell."""


class Completed:
    """An object whose completion and `dir()` have its public names, none of pydantic's."""

    def __dir__(self) -> list[str]:
        hidden = set[str]()
        for base in type(self).__mro__:
            if base.__module__.startswith("pydantic"):
                hidden.update(vars(base))
        return [name for name in object.__dir__(self) if name not in hidden and not name.startswith("_")]


@dataclass(frozen=True)
class View:
    """What is shown of an object: a title, a table, and lines below it.

    rows:  a value for each head
    count: how many rows there are, if `rows` has the first ones only
    """

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    count: int | None = None
    lines: Sequence[str] = ()


class Shown(Completed):
    """An object that notebooks show as a table; its plain repr is the title with the first rows."""

    def _view(self) -> View:
        raise NotImplementedError

    def __repr__(self) -> str:
        view = self._view()
        shown = [f"<{shortened(view.title, MOST_OF_A_LINE)}>"]
        for row in view.rows[:_FEW]:
            shown.append(shortened("  ".join(filter(None, map(_text, row)))))
        count = len(view.rows) if view.count is None else view.count
        if count > _FEW:
            shown.append(f"and {count - _FEW:,} more")
        return "\n  ".join(shown)

    def _repr_html_(self) -> Html:
        view = self._view()
        lines = map(paragraph, first_lines(view.lines))
        return block(view.title, table(view.heads, view.rows, view.count), *lines)


def escaped(value: object, most: int = MOST_OF_A_CELL) -> Html:
    """A value as text: beginning and end of a long one, control characters and marks of direction as escapes."""
    return Html(html.escape(shortened(_text(value), most)))


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], count: int | None = None) -> Html:
    """A table of the first rows and columns, and below it how many more there are.

    rows:  one value for each head; numbers are aligned to the right
    count: how many rows there are, if `rows` has the first ones only
    """
    if count is None:
        rows = list(rows)
        count = len(rows)
    lines = [_row("th", heads, _RULE)]
    for row in islice(rows, MOST_ROWS):
        lines.append(_row("td", row))
    drawn = (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;color:inherit">'
        f"<thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table></div>"
    )
    missing = list[str]()
    if count > len(lines) - 1:
        missing.append(f"and {count - len(lines) + 1:,} more")
    if len(heads) > MOST_COLUMNS:
        missing.append(f"{len(heads) - MOST_COLUMNS:,} more columns")
    return Html(drawn + paragraph("; ".join(missing)))


def _row(tag: str, cells: Sequence[Cell], style: str = "") -> str:
    drawn = ""
    for cell in cells[:MOST_COLUMNS]:
        is_number = isinstance(cell, int | float) and not isinstance(cell, bool)
        side = "right" if is_number else "left"
        drawn += f'<{tag} style="{_CELL}{side};{style}">{escaped(cell)}</{tag}>'
    return f"<tr>{drawn}</tr>"


def paragraph(text: str) -> Html:
    """A line of text; nothing for an empty text."""
    if not text:
        return Html("")
    return Html(f"<div>{escaped(text, MOST_OF_A_LINE)}</div>")


def block(title: str, *parts: Html) -> Html:
    """A title in bold, and the parts below it."""
    return Html(
        f'<div style="color:inherit"><div><b>{escaped(title, MOST_OF_A_LINE)}</b></div>{"".join(parts)}</div>'
    )


_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)
"""What a page in a frame may load, whoever has made it: nothing from a network."""


def framed(page: str) -> Html:
    """A whole page inside a notebook: it runs the script that it contains, and may do nothing else."""
    content = html.escape(f"<!doctype html>{_POLICY}{page}")
    style = "width:100%;height:80vh;border:0"
    return Html(f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{content}"></iframe>')


def notebook() -> Any:
    """IPython's shell, if this process is the kernel of a notebook; else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None
