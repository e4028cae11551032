"""``python -m hookrun.verify RUN``: checks that every file of a run exists and is unchanged."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hookrun.errors import HookrunError


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each changed file. Returns 0 if there are none, 1 if there are some, 2 without such a run."""
    parser = argparse.ArgumentParser(prog="python -m hookrun.verify", description=__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="a run directory")
    code = 0
    for path in parser.parse_args(argv).run:
        code = max(code, _verify(path))
    return code


def _verify(path: Path) -> int:
    from hookrun.store.verify import verify

    try:
        found = verify(path.expanduser())
    except HookrunError as error:
        print(_printable(str(error)), file=sys.stderr)
        return 2
    for line in found.notes:
        print(f"note: {_printable(line)}")
    for line in found.bad:
        print(f"BAD: {_printable(line)}")
    verdict = f"{len(found.bad)} bad" if found.bad else "all well"
    if found.status == "running":
        verdict += " so far: the run has not ended"
    print(_printable(f"{path}: {found.shards} shards, {found.bytes:,} bytes, {verdict}"))
    return 1 if found.bad else 0


def _printable(text: str) -> str:
    """The text with control characters escaped, since names in a run may contain any."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


if __name__ == "__main__":
    sys.exit(main())
