"""``python -m hookrun.runs [FOLDER] [KEY=VALUE …]``: the runs of a folder, one line each, the newest last."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence

from hookrun.callable_module import make_callable
from hookrun.errors import HookrunError
from hookrun.terminal import words


def main(argv: Sequence[str] | None = None) -> int:
    """Print the runs of which every condition holds. Returns 0; 2 for a folder, a key or a value that is not there."""
    parser = argparse.ArgumentParser(prog="python -m hookrun.runs", description=__doc__)
    parser.add_argument("what", metavar="FOLDER KEY=VALUE", nargs="*", help=_HELP)
    arguments = parser.parse_args(argv).what
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    from hookrun.command.listing import chosen_runs, lines_of

    with words():
        try:
            for line in lines_of(chosen_runs(arguments), width):
                print(line)
        except HookrunError as error:
            print(error, file=sys.stderr)
            return 2
    return 0


_HELP = (
    "a folder, by default outputs; then columns, metrics or keys of overrides: status=done tags=WORD seed=1"
)

make_callable(__name__, home="hookrun.store.runs")

if __name__ == "__main__":
    sys.exit(main())
