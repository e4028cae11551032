"""``python -m hookrun.compare RUN OTHER [KEY=VALUE ...]``: what differs between two runs or two sweeps."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hydra.core.override_parser.types import Quote, QuotedString

from hookrun.command.cli import carried_out as run
from hookrun.command.json_output import Parser, answered
from hookrun.command.outcome import Outcome
from hookrun.engine.keys import key_of
from hookrun.errors import HookrunError

USAGE = (
    "usage: python -m hookrun.compare RUN OTHER [--names FILE] [--tolerance X] "
    "[task.tolerance=1e-3 task.on_difference=stop ...]"
)
_NAMES = "task.names"
_TOLERANCE = "task.tolerance"
_ON_DIFFERENCE = "task.on_difference"


def main(argv: Sequence[str] | None = None) -> int:
    """Run task=compare and return its exit code.

    It is 3 if results differ, where a tolerance was typed or under ``task.on_difference=stop``.
    """
    return answered(argv, _main)


def _main(arguments: list[str], outcome: Outcome) -> int:
    parser = Parser(outcome, usage=USAGE.removeprefix("usage: "), description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--names", metavar="FILE", help="YAML: modules of RUN, and those of OTHER: a.*.b: c.*.d"
    )
    parser.add_argument(
        "--tolerance", metavar="X", type=float, help="exit with 3 if the relative L2 of a row is above it"
    )
    try:
        typed, words = parser.parse_known_args(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    if len(words) < 2 or any(text.startswith("-") for text in words[:2]):
        outcome.tell(HookrunError(USAGE))
        return 2
    given = [f"task.run={_quoted(words[0])}", f"task.other={_quoted(words[1])}"]
    keys = {key_of(word) for word in words[2:]}
    names = None if typed.names is None else _quoted(typed.names)
    options = {_NAMES: names, _TOLERANCE: typed.tolerance}
    for key, value in options.items():
        if value is None:
            continue
        if key in keys:
            option = key.removeprefix("task.")
            outcome.tell(HookrunError(f"--{option} and {key} are the same: leave one of them out"))
            return 2
        keys.add(key)
        given.append(f"{key}={value}")
    if _TOLERANCE in keys and _ON_DIFFERENCE not in keys:
        given.append(f"{_ON_DIFFERENCE}=stop")
    return run(["task=compare", *given, *words[2:]], outcome)


def _quoted(text: str) -> str:
    return str(QuotedString(text, Quote.single).with_quotes())


if __name__ == "__main__":
    sys.exit(main())
