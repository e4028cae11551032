"""``python -m hookrun.verify RUN``: checks that every file of a run, or of a sweep's runs, exists and is unchanged."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hookrun.command.json_output import Parser, answered
from hookrun.command.outcome import Outcome
from hookrun.errors import HookrunError, counted, first_lines, printable
from hookrun.terminal import words


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each changed file. Returns 0 if there are none, 1 if there are some, 2 without such a run."""
    return answered(argv, _main)


def _main(arguments: list[str], outcome: Outcome) -> int:
    parser = Parser(outcome, prog="python -m hookrun.verify", description=__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="a run directory, or that of a sweep")
    with words():
        paths = parser.parse_args(arguments).run
        return max(_verify(run, outcome) for path in paths for run in _runs(path.expanduser()))


def _runs(path: Path) -> list[Path]:
    """The runs of a sweep's directory; else the path itself."""
    from hookrun.store.format import MULTIRUN
    from hookrun.store.runs import run_folders

    return sorted(run_folders(path)) or [path] if os.path.isfile(path / MULTIRUN) else [path]


def _verify(path: Path, outcome: Outcome) -> int:
    from hookrun.store.verify import verify

    try:
        found = verify(path)
    except HookrunError as error:
        outcome.tell(error)
        return 2
    outcome.told.setdefault("verified", []).append({"run": str(path), **vars(found)})
    # a name with a line break could forge a line
    notes = first_lines(f"note: {printable(note)}" for note in found.notes)
    bad = first_lines(f"BAD: {printable(fault)}" for fault in found.bad)
    verdict = f"{len(found.bad):,} bad" if found.bad else "all well"
    if found.status == "running":
        verdict += " so far: the run has not ended"
    shards = f" with {counted(found.shards, 'shard')}" if found.shards else ""
    checked = f"{counted(found.files, 'file')}{shards}, {found.bytes:,} bytes"
    line = printable(f"{path}: {checked}, {verdict}")
    print("\n".join([*notes, *bad, line]))
    if not found.bad:
        return 0
    outcome.errors.append(HookrunError(line))
    return 1


if __name__ == "__main__":
    sys.exit(main())
