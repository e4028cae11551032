"""``python -m hookrun.runs [FOLDER] [KEY=VALUE …]``: the runs of a folder, one line each, the newest last."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from hookrun.callable_module import make_callable
from hookrun.command.json_output import Parser, answered
from hookrun.command.outcome import Outcome
from hookrun.errors import HookrunError
from hookrun.terminal import words


def main(argv: Sequence[str] | None = None) -> int:
    """Print the runs of which every condition holds. Returns 0; 2 for a folder, a key or a value that is not there."""
    return answered(argv, _main)


def _main(typed: list[str], outcome: Outcome) -> int:
    parser = Parser(outcome, prog="python -m hookrun.runs", description=__doc__)
    parser.add_argument("what", metavar="FOLDER KEY=VALUE", nargs="*", help=_HELP)
    arguments = parser.parse_args(typed).what
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    from hookrun.command.listing import chosen_runs, columns_of, lines_of

    with words():
        try:
            chosen = chosen_runs(arguments)
            outcome.told["runs"] = [columns_of(summary) for summary in chosen.summaries]
            for line in lines_of(chosen, width):
                print(line)
        except HookrunError as error:
            outcome.tell(error)
            return 2
    return 0


_HELP = (
    "a folder, by default outputs; then columns, metrics or keys of overrides: status=done tags=WORD seed=1"
)

make_callable(__name__, home="hookrun.store.runs")

if __name__ == "__main__":
    sys.exit(main())
