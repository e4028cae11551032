"""The pictures of the page as one SVG by itself, for notebooks and files: readable on light and on dark paper."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hookrun.engine.html import Completed
from hookrun.errors import counted, shortened
from hookrun.report.draw.charts import WIDTH, Figure
from hookrun.report.draw.rendering import rendered

_GREY = "#7a828c"
"""The colour of texts where the paper is not known: its contrast to white and to black is above 3.8."""
_SIZE = re.compile(r'<svg [^>]*?viewBox="0 0 (\d+) (\d+)"')
_FOR_THE_PAGE = re.compile(r' data-hover="[^"]*"')


class Plot(Completed):
    """Pictures of the page as one SVG. A notebook shows it; `save` writes it into a file.

    figures: the pictures; those that are not drawn, such as coloured texts, are on the page only
    """

    def __init__(self, title: str, figures: Sequence[Figure]) -> None:
        self.title = title
        self.figures = tuple(figures)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the SVG into a file, whose path is returned."""
        file = Path(path).expanduser()
        file.write_text(self._repr_svg_(), encoding="utf-8")
        return file

    def _repr_svg_(self) -> str:
        return self._drawn(_GREY)

    def _repr_html_(self) -> str:
        return self._drawn("")  # in the colour of the notebook's text

    def __repr__(self) -> str:
        pictures = counted(len(self.figures), "picture")
        return f"<plot of {shortened(self.title)}: {pictures}; save('plot.svg') writes it>"

    def _drawn(self, colour: str) -> str:
        parts: list[dict[str, Any]] = []
        for figure in self.figures:
            picture = figure.picture if figure.alone is None else figure.alone()
            size = _SIZE.match(picture)
            if size is not None:
                width, height = map(int, size.groups())
                placed = f'<svg width="{width}" height="{height}" {picture.removeprefix("<svg ")}'
                svg = Markup(_FOR_THE_PAGE.sub("", placed))  # the page's code has made it
                parts.append({"figure": figure, "width": width, "height": height, "svg": svg})
        missing = ""
        if len(parts) < len(self.figures):
            missing = f"on the page only: {counted(len(self.figures) - len(parts), 'picture')} of texts"
        width = max((part["width"] for part in parts), default=WIDTH)
        return rendered("plot.svg", parts=parts, width=width, colour=colour, missing=missing)
