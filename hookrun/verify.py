"""``python -m hookrun.verify RUN``: checks that every file of a run exists and is unchanged."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hookrun.errors import HookrunError, first_lines, printable
from hookrun.terminal import words


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each changed file. Returns 0 if there are none, 1 if there are some, 2 without such a run."""
    parser = argparse.ArgumentParser(prog="python -m hookrun.verify", description=__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="a run directory")
    with words():
        return max(map(_verify, parser.parse_args(argv).run))


def _verify(path: Path) -> int:
    from hookrun.store.verify import verify

    try:
        found = verify(path.expanduser())
    except HookrunError as error:
        print(error, file=sys.stderr)
        return 2
    # a name with a line break could forge a line
    for line in first_lines(f"note: {printable(note)}" for note in found.notes):
        print(line)
    for line in first_lines(f"BAD: {printable(fault)}" for fault in found.bad):
        print(line)
    verdict = f"{len(found.bad):,} bad" if found.bad else "all well"
    if found.status == "running":
        verdict += " so far: the run has not ended"
    print(printable(f"{path}: {found.shards} shards, {found.bytes:,} bytes, {verdict}"))
    return 1 if found.bad else 0


if __name__ == "__main__":
    sys.exit(main())
