"""``python -m hookrun.compare RUN OTHER [KEY=VALUE ...]``: what differs between two runs or two sweeps."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hydra.core.override_parser.types import Quote, QuotedString

from hookrun.command.cli import carried_out as run
from hookrun.command.json_output import answered
from hookrun.command.outcome import Outcome
from hookrun.errors import HookrunError

USAGE = "usage: python -m hookrun.compare RUN OTHER [task.tolerance=1e-3 task.on_difference=stop ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run task=compare and return its exit code: 3 under ``task.on_difference=stop`` if results differ."""
    return answered(argv, _main)


def _main(arguments: list[str], outcome: Outcome) -> int:
    if len(arguments) < 2 or any(text.startswith("-") for text in arguments[:2]):
        if {"-h", "--help"} & set(arguments):
            print(USAGE)
            return 0
        outcome.tell(HookrunError(USAGE))
        return 2
    named = (QuotedString(path, Quote.single).with_quotes() for path in arguments[:2])
    runs = [f"task.{key}={path}" for key, path in zip(("run", "other"), named, strict=True)]
    return run(["task=compare", *runs, *arguments[2:]], outcome)


if __name__ == "__main__":
    sys.exit(main())
