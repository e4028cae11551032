"""``python -m hookrun.runs [FOLDER] [KEY=VALUE …]``: the runs of a folder, one line each, the newest last."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hookrun.callable_module import make_callable
from hookrun.errors import HookrunError, printable, spec_error
from hookrun.terminal import words

if TYPE_CHECKING:
    from hookrun.store.runs import Runs
    from hookrun.store.summary import RunSummary

_HELP = (
    "a folder, by default outputs; then columns, metrics or keys of overrides: status=done tags=WORD seed=1"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the runs of which every condition holds. Returns 0; 2 for a folder, a key or a value that is not there."""
    parser = argparse.ArgumentParser(prog="python -m hookrun.runs", description=__doc__)
    parser.add_argument("what", metavar="FOLDER KEY=VALUE", nargs="*", help=_HELP)
    arguments = parser.parse_args(argv).what
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    with words():
        try:
            for line in _lines(_chosen(arguments), width):
                print(line)
        except HookrunError as error:
            print(error, file=sys.stderr)
            return 2
    return 0


def _chosen(arguments: list[str]) -> Runs:
    """The runs for ``[FOLDER] [KEY=VALUE …]``."""
    from hookrun.store.runs import runs

    folder = None
    if arguments and ("=" not in arguments[0] or os.path.isdir(arguments[0])):
        folder = arguments.pop(0)
    conditions = dict[str, str]()
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise spec_error(word, "is not a condition", "after the folder write KEY=VALUE: status=done")
        conditions[key] = value
    return runs(folder).where(conditions)


def _lines(chosen: Runs, width: int | None) -> Iterator[str]:
    """A line for each run, cut to the width of a terminal if there is one."""
    from rich.cells import cell_len, set_cell_size

    longest = max((len(summary.name) for summary in chosen.summaries), default=0)
    for summary in reversed(chosen.summaries):
        parts = [f"{summary.name:{min(longest, 40)}}", f"{summary.status:11}", *_said(summary)]
        line = printable("  ".join(filter(None, parts)))
        if width is not None and cell_len(line) > width:
            line = f"{set_cell_size(line, width - 1)}…"
        yield line
    if not chosen:
        yield f"no runs in {chosen.folder}"


def _said(summary: RunSummary) -> Iterator[str]:
    """The metric by which a run is judged, what it did, tags, note, and what went wrong."""
    from hookrun.store.objective import preferred
    from hookrun.store.summary import headline

    name = preferred(summary.metrics) or next(iter(summary.metrics), None)
    if name is not None:
        yield f"{name} {summary.metrics[name]:.4g}"
    yield headline(summary)
    if summary.tags:
        yield f"[{', '.join(summary.tags)}]"
    yield from (summary.note, summary.damaged, summary.reason)


if __name__ == "__main__":
    sys.exit(main())

make_callable(__name__, home="hookrun.store.runs")
