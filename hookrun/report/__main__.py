"""``python -m hookrun.report DIR``: make the page of a run or a sweep again, or the list of a folder of runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hookrun.command.json_output import Parser, answered
from hookrun.command.outcome import Outcome
from hookrun.errors import HookrunError, paths_refused
from hookrun.report import write_index, write_report
from hookrun.terminal import words


def main(argv: Sequence[str] | None = None) -> int:
    """Print the path of each page. Returns 0; 1 where a page can't be written; 2 where a folder holds no run."""
    return answered(argv, _main)


def _main(arguments: list[str], outcome: Outcome) -> int:
    parser = Parser(outcome, prog="python -m hookrun.report", description=__doc__)
    parser.add_argument(
        "dir", type=Path, nargs="+", help="a run directory, a sweep's directory, or a folder of runs"
    )
    with words():
        return max(_write(path, outcome) for path in parser.parse_args(arguments).dir)


def _write(path: Path, outcome: Outcome) -> int:
    folder = path.expanduser()
    try:
        with paths_refused():
            print(write_index(folder) or write_report(folder))
    except HookrunError as error:
        outcome.tell(error)
        return 1 if os.path.isdir(folder) and any(folder.glob("**/status.json")) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
