"""``python -m hookrun.report DIR``: make the page of a run, or of a sweep, again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hookrun.errors import HookrunError
from hookrun.report import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Print the path of each page. Returns 0; 1 where a page can't be written; 2 where a folder holds no run."""
    parser = argparse.ArgumentParser(prog="python -m hookrun.report", description=__doc__)
    parser.add_argument("dir", type=Path, nargs="+", help="a run directory, or a directory of a sweep's runs")
    code = 0
    for path in parser.parse_args(argv).dir:
        folder = path.expanduser()
        try:
            print(write_report(folder))
        except HookrunError as error:
            print(error, file=sys.stderr)
            has_run = folder.is_dir() and any(folder.glob("**/status.json"))
            code = max(code, 1 if has_run else 2)
    return code


if __name__ == "__main__":
    sys.exit(main())
