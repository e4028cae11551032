"""What a person sees while a run goes on: a bar with loss, accuracy and rate, and one line for each epoch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")

_BETWEEN = 0.05
"""Seconds between two updates of the bar, which is drawn ten times a second."""


class _Console(Console):
    """A console whose reader may leave, as ``| head`` does: the run goes on without it."""

    def on_broken_pipe(self) -> None:
        """Write nothing more, and nothing at exit."""
        self.quiet = True
        if sys.stdout is sys.__stdout__ and sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Screen:
    """Writes to stdout. The bar is drawn on terminals only and gone when a pass is over.

    quiet: nothing is written: another rank shows the run
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._environ = _without_empty_sizes(os.environ)
        self.console = _Console(
            highlight=False, emoji=False, markup=False, soft_wrap=True, quiet=quiet, _environ=self._environ
        )

    @property
    def width(self) -> int | None:
        """Characters of a line: of the terminal, elsewhere what COLUMNS says; None: as many as it takes."""
        return self.console.width if self.console.is_terminal or "COLUMNS" in self._environ else None

    @property
    def height(self) -> int | None:
        """Lines of the terminal; None where there is none."""
        return self.console.height if self.console.is_terminal else None

    @property
    def draws_lines(self) -> bool:
        """Whether it has characters to draw lines with."""
        return self.console.encoding.startswith("utf")

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        if self.console.is_terminal or not (text.isascii() and text.isprintable()):
            self.console.print(text)
        elif not self.console.quiet:  # the same characters, in a tenth of the time
            try:
                self.console.file.write(f"{text}\n")
                self.console.file.flush()
            except BrokenPipeError:
                self.console.on_broken_pipe()

    def note(self, notes: Iterable[str]) -> None:
        """What to know beside what is shown, a line for each note."""
        for note in notes:
            self.say(f"NOTE: {note}")

    def track(
        self, batches: Iterable[T], total: int, label: str, shown: Mapping[str, float], start: int = 0
    ) -> Generator[T]:
        """Go through batches under a bar, and close it, so that the bar is gone before an error is told.

        shown: read at every update: put the latest numbers there
        start: how many of the `total` were gone through before
        """
        if not self.console.is_terminal:
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
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(label, total=total, completed=start, numbers="", rate="")
            updated = 0.0
            for done, batch in enumerate(batches, start + 1):
                yield batch
                if (now := time.monotonic()) < updated + _BETWEEN and done < total:
                    continue
                updated, speed = now, progress.tasks[0].speed
                rate = f"{speed:.1f} batches/s" if speed else ""
                progress.update(task, completed=done, numbers=numbers(shown), rate=rate)


def _without_empty_sizes(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without COLUMNS and LINES where they are not whole numbers above 0: rich would print nothing."""
    sizes = ("COLUMNS", "LINES")
    return {
        key: value
        for key, value in environ.items()
        if key not in sizes or (value.isdecimal() and int(value) > 0)
    }


def numbers(values: Mapping[str, float]) -> str:
    """``loss 0.1234  accuracy 96.5 %``."""
    return "  ".join(
        f"{name} {value * 100:.1f} %"
        if name == "accuracy"
        else f"{name} {value:,}"
        if isinstance(value, int)
        else f"{name} {value:.4g}"
        for name, value in values.items()
    )
