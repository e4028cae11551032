"""Writes what a person reads after a mistake: the transcripts in tests/golden.

A transcript is a list of blocks: an experiment file (optional), the command, what it prints to stderr, its exit code.
To add a block write its file and its command, and run scripts/reference.
"""

from __future__ import annotations

import os
import shlex
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from hookrun.cli import main

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
COMMAND = "$ hookrun "
BETWEEN = "\n----\n\n"


def blocks(path: Path) -> list[str]:
    """The blocks of a transcript."""
    return path.read_text(encoding="utf-8").split(BETWEEN)


def repeated(block: str) -> str:
    """The block with what its command prints now. An experiment file before it is `mine` in the folder `my_conf`."""
    file, _, rest = block.partition(COMMAND)
    typed, printed = rest.partition("\n")[0], StringIO()
    with TemporaryDirectory() as folder, chdir(folder):
        here = os.getcwd()
        if file:
            experiment = Path("my_conf", "experiment", "mine.yaml")
            experiment.parent.mkdir(parents=True)
            experiment.write_text(file, encoding="utf-8")
        with redirect_stderr(printed), redirect_stdout(printed):
            code = main(shlex.split(typed))
    said = printed.getvalue().replace(here, "HERE").replace(str(ROOT), "HOOKRUN")
    return f"{file}{COMMAND}{typed}\n{said}exit code {code}\n"


if __name__ == "__main__":
    for path in sorted(GOLDEN.glob("*.txt")):
        path.write_text(BETWEEN.join(map(repeated, blocks(path))), encoding="utf-8")
