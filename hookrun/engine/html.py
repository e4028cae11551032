"""HTML for notebooks: tables and lines in the notebook's own colours, bounded and escaped, without scripts or links.

What is shown comes from a file of somebody else: names, values, paths. All of it passes `escaped`.
"""

from __future__ import annotations

import io
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookrun.errors import first_lines, shortened

if TYPE_CHECKING:
    from rich.console import Console

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
        return [name for name in super().__dir__() if name not in hidden and not name.startswith("_")]


@dataclass(frozen=True)
class View:
    """What is shown of an object: a title, a table, and lines below it.

    rows:  a value for each head; numbers are aligned to the right
    count: how many rows there are, if `rows` has the first ones only
    """

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    count: int | None = None
    lines: Sequence[str] = ()

    def as_text(self) -> str:
        """The title with the first rows."""
        rows = self.rows[:_FEW]
        lines = [f"<{shortened(self.title, MOST_OF_A_LINE)}>"]
        for row in rows:
            lines.append(shortened("  ".join(filter(None, map(_text, row)))))
        return "\n  ".join([*lines, *self._more(len(rows))])

    def as_html(self) -> str:
        """The title, the first rows and columns of the table, how many more there are, and the lines."""
        rows = self.rows[:MOST_ROWS]
        below = [*self._more(len(rows)), *first_lines(self.lines)]
        if len(self.heads) > MOST_COLUMNS:
            below.insert(0, f"{len(self.heads) - MOST_COLUMNS:,} more columns")
        body = "".join(_row("td", row) for row in rows)
        return (
            f'<div style="color:inherit"><div><b>{escaped(self.title, MOST_OF_A_LINE)}</b></div>'
            '<div style="overflow-x:auto"><table style="border-collapse:collapse;color:inherit">'
            f"<thead>{_row('th', self.heads, _RULE)}</thead><tbody>{body}</tbody></table></div>"
            f"{''.join(f'<div>{escaped(line, MOST_OF_A_LINE)}</div>' for line in below)}</div>"
        )

    def _more(self, shown: int) -> Iterator[str]:
        count = len(self.rows) if self.count is None else self.count
        if count > shown:
            yield f"and {count - shown:,} more"


class Shown(Completed):
    """An object that notebooks show as a table; its plain repr is the title with the first rows."""

    @abstractmethod
    def _view(self) -> View:
        """What is shown of it."""

    def __repr__(self) -> str:
        return self._view().as_text()

    def _repr_html_(self) -> str:
        return self._view().as_html()


def escaped(value: object, most: int = MOST_OF_A_CELL) -> str:
    """A value as text: beginning and end of a long one, control characters and marks of direction as escapes."""
    return _escape(shortened(_text(value), most))


def _escape(text: str) -> str:
    import html  # which every command would import, and a notebook alone needs

    return html.escape(text)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def _row(tag: str, cells: Sequence[Cell], style: str = "") -> str:
    drawn = ""
    for cell in cells[:MOST_COLUMNS]:
        is_number = isinstance(cell, int | float) and not isinstance(cell, bool)
        side = "right" if is_number else "left"
        drawn += f'<{tag} style="{_CELL}{side};{style}">{escaped(cell)}</{tag}>'
    return f"<tr>{drawn}</tr>"


_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)
"""What a page in a frame may load, whoever has made it: nothing from a network."""


def framed(page: str) -> str:
    """A whole page inside a notebook: it runs the script that it contains, and may do nothing else."""
    content = _escape(f"<!doctype html>{_POLICY}{page}")
    style = "width:100%;height:80vh;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{content}"></iframe>'


def text_console(width: int) -> Console:
    """A console for rich's tables and trees as plain text, to be captured. In a notebook it shows nothing by itself."""
    from rich.console import Console

    return Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        highlight=False,
        emoji=False,
        markup=False,
        _environ={},
    )


def notebook() -> Any:
    """IPython's shell, if this process is the kernel of a notebook; else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None
