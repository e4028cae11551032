"""What a run prints on a terminal or below a notebook's cell: a progress bar, and one line for each epoch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from hookrun.engine.html import text_console
from hookrun.errors import printable
from hookrun.terminal import discard, is_cell, noted, of_a_notebook

T = TypeVar("T")

_BETWEEN = 0.05
"""The least time in seconds between two updates of the bar, which is drawn ten times a second."""
_BETWEEN_IN_A_CELL = 0.25
"""The same in a notebook, where each update is a message to the browser."""
_CELL_WIDTH = 115
"""The most characters of the line in a notebook, rich's own number."""


class _Console(Console):
    """A console for texts of strangers; its pipe may be closed, as by ``| head``: the run continues without output."""

    def on_broken_pipe(self) -> None:
        """Write nothing from now on, not even at exit."""
        self.quiet = True
        discard(cast(TextIO, self.file))

    def render_str(self, text: str, **options: Any) -> Text:
        """The text as rich shows it, with control characters escaped."""
        return super().render_str(printable(text, kept="\n\t"), **options)


class _CellLine:
    """A line of text below the cell of a notebook that is running; it is rewritten, in all runs of the cell.

    rich's own bar for notebooks needs ipywidgets, and leaves a widget in the file of the notebook for each pass.
    """

    _cell: int | None = None

    def show(self, text: str) -> None:
        """Show the text in place of the last one; for a new cell, in a line of its own."""
        ipython: Any = import_module("IPython")  # the kernel has imported it
        cell = ipython.get_ipython().execution_count
        name = f"hookrun {os.getpid()} {cell}"
        ipython.display.display({"text/plain": text}, raw=True, display_id=name, update=cell == self._cell)
        self._cell = cell


_cell_line = _CellLine()


class _CellProgress(Progress):
    """A progress bar as one line of text, without colours and codes of terminals."""

    def __init__(self, *columns: ProgressColumn) -> None:
        super().__init__(*columns, console=text_console(_CELL_WIDTH), auto_refresh=False)

    def start(self) -> None:
        """Show nothing yet: a short pass needs no bar."""

    def stop(self) -> None:
        """Leave the last line, without the numbers of one batch, which are not those of the pass."""
        for task in self.task_ids:
            self.update(task, numbers="", rate="")
        self.refresh()

    def refresh(self) -> None:
        """Rewrite the line."""
        with self.console.capture() as captured:
            self.console.print(self.get_renderable(), no_wrap=True, crop=True)
        _cell_line.show(captured.get().rstrip())


_PLAN = "the plan"
_TOLD: ContextVar[set[str] | None] = ContextVar("told", default=None)
"""The notes that the jobs of a sweep have printed so far, and whether one has printed its plan; None: a single run."""


@contextmanager
def one_of_many(told: set[str]) -> Iterator[None]:
    """In the block a run prints its plan if no other did, and notes that are new; the sweep prints a line for it.

    told: what the runs have printed; it is extended
    """
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


class Screen:
    """Writes to stdout. The bar is drawn only on terminals, and removed after each pass; below a cell it is a line.

    quiet: write nothing, because another rank shows the run
    """

    def __init__(self, *, quiet: bool = False) -> None:
        # For sizes that are not positive integers rich would print nothing.
        self._environ = dict(os.environ)
        for key in ("COLUMNS", "LINES"):
            value = os.environ.get(key, "")
            if not value.isdecimal() or int(value) == 0:
                self._environ.pop(key, None)
        self._told = _TOLD.get()
        self._in_cell = is_cell(sys.stdout)
        console = partial(
            _Console,
            highlight=False,
            emoji=False,
            markup=False,
            soft_wrap=True,
            force_terminal=False if self._in_cell else None,
            force_jupyter=False,  # which would show each line as HTML of its own
            _environ=self._environ,
        )
        self.console = console(quiet=quiet or self._told is not None)
        self._loud = self.console if self._told is None else console(quiet=quiet)

    @property
    def width(self) -> int | None:
        """The width of a line in characters, from the terminal or COLUMNS; None: no limit."""
        return self.console.width if self.console.is_terminal or "COLUMNS" in self._environ else None

    @property
    def height(self) -> int | None:
        """The number of lines of the terminal; None if the output is not a terminal."""
        return self.console.height if self.console.is_terminal else None

    def say(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        self.console.print(text)

    def note(self, notes: Iterable[str], line: Callable[[str], str] = noted) -> None:
        """Print a line for each note; in a sweep one that other jobs have printed is left out.

        line: the line of a note
        """
        for note in notes:
            if self._told is None or note not in self._told:
                self._loud.print(line(note))
        if self._told is not None:
            self._told.update(notes)

    def for_plan(self, *, has_hooks: bool) -> Console:
        """The console for the plan, which of the jobs of a sweep only the first one with hooks prints."""
        if self._told is None or _PLAN in self._told or not has_hooks:
            return self.console
        self._told.add(_PLAN)
        return self._loud

    def track(
        self, batches: Iterable[T], total: int, label: str, shown: Mapping[str, float], start: int = 0
    ) -> Generator[T]:
        """Iterate over batches with a progress bar. Close the generator to remove the bar before printing an error.

        shown: the numbers beside the bar, read at every update
        start: how many of the `total` batches were finished before
        """
        is_watched = self._loud.is_terminal and not of_a_notebook()
        if self._loud.quiet or not (self._in_cell or is_watched):
            yield from batches
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        between = _BETWEEN_IN_A_CELL if self._in_cell else _BETWEEN
        with self._bar(*columns) as progress:
            task = progress.add_task(label, total=total, completed=start, numbers="", rate="")
            updated = 0.0
            for done, batch in enumerate(batches, start + 1):
                yield batch
                now = time.monotonic()
                if now < updated + between and done < total:
                    continue
                updated = now
                speed = progress.tasks[0].speed
                rate = f"{speed:.1f} batches/s" if speed else ""
                progress.update(
                    task, completed=done, numbers=numbers(shown), rate=rate, refresh=self._in_cell
                )

    def _bar(self, *columns: ProgressColumn) -> Progress:
        if self._in_cell:
            return _CellProgress(*columns)
        return Progress(*columns, console=self._loud, transient=True)


def numbers(values: Mapping[str, float]) -> str:
    """``loss 0.1234  accuracy 96.5 %  changed 12 of 12``."""
    parts: list[str] = []
    for name, value in values.items():
        if name == "accuracy":
            text = f"{value * 100:.1f} %"
        elif name == "changed" and "samples" in values:
            text = f"{round(value * values['samples'])} of {values['samples']}"
        elif isinstance(value, int):
            text = f"{value:,}"
        else:
            text = f"{value:.4g}"
        parts.append(f"{printable(name)} {text}")
    return "  ".join(parts)
