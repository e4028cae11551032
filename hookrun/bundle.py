"""``python -m hookrun.bundle RUN OUT``: writes the hooks of a run that edit, and their tensors, into a folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path

from hookrun.command.json_output import Parser, answered
from hookrun.command.outcome import Outcome
from hookrun.command.sweeps.exit_codes import exit_code
from hookrun.engine.keys import HOOKS_FROM
from hookrun.errors import HookrunError, counted, printable
from hookrun.terminal import words


def main(argv: Sequence[str] | None = None) -> int:
    """Write the bundle, and print what is in it. Returns 0; 2 for a run that has none to hand on; 1 for a full disk."""
    return answered(argv, _main)


def _main(typed: list[str], outcome: Outcome) -> int:
    parser = Parser(outcome, prog="python -m hookrun.bundle", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run that is done")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    arguments = parser.parse_args(typed)
    out = Path(expanduser(arguments.out))
    with words():
        from hookrun.command.compose.written import override
        from hookrun.run.bundling import write_bundle

        try:
            made = write_bundle(Path(expanduser(arguments.run)), out)
        except HookrunError as error:
            outcome.tell(error)
            return exit_code(error)
        for name, why in made.left_out.items():
            print(printable(f"{name} is left out: {why}"))
        tensors = list(made.tensors.values())
        for autoencoder in made.folders.values():
            tensors += autoencoder.tensors.values()
        size = sum(tensor.nbytes for tensor in tensors)
        inside = f"{counted(len(made.hooks), 'hook')}, {counted(len(tensors), 'tensor')} of {size:,} bytes"
        print(printable(f"{out}: {inside}"))
        applied = shlex.quote(override(HOOKS_FROM, str(out)))
        print(printable(f"apply it: python -m hookrun {applied}"))
        outcome.told["answer"] = {
            "what": "bundle",
            "bundle": str(out),
            "hooks": list(made.hooks),
            "left_out": made.left_out,
            "tensors": len(tensors),
            "bytes": size,
        }
    return 0


if __name__ == "__main__":
    sys.exit(main())
