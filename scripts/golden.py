"""Writes what a person reads after a mistake: the transcripts in tests/golden, and what a program reads of each.

A transcript is a list of blocks: an experiment file (optional), the command, what it prints to stderr, its exit code.
`mistakes.jsonl` has one line for each mistake of each block. To add a block write its file and its command, and run
scripts/reference.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hookrun.cli import main
from hookrun.command.cli.commands import execute
from hookrun.command.mistakes import mistakes_of
from hookrun.errors import HookrunError, paths_refused

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
COMMAND = "$ hookrun "
BETWEEN = "\n----\n\n"


def blocks(path: Path) -> list[str]:
    """The blocks of a transcript."""
    return path.read_text(encoding="utf-8").split(BETWEEN)


def repeated(block: str) -> str:
    """The block with what its command prints now. An experiment file before it is `mine` in the folder `my_conf`."""
    file, typed = parts(block)
    with beside(file) as printed:
        here = os.getcwd()
        code = main(shlex.split(typed))
    said = printed.getvalue().replace(here, "HERE").replace(str(ROOT), "HOOKRUN")
    return f"{file}{COMMAND}{typed}\n{said}exit code {code}\n"


def parts(block: str) -> tuple[str, str]:
    """The experiment file of a block, empty if it has none, and what is typed."""
    file, _, rest = block.partition(COMMAND)
    return file, rest.partition("\n")[0]


@contextmanager
def beside(file: str) -> Iterator[StringIO]:
    """A new current folder with the experiment file; receives what is printed."""
    printed = StringIO()
    with TemporaryDirectory() as folder, chdir(folder):
        if file:
            experiment = Path("my_conf", "experiment", "mine.yaml")
            experiment.parent.mkdir(parents=True)
            experiment.write_text(file, encoding="utf-8")
        with redirect_stderr(printed), redirect_stdout(printed):
            yield printed


def mistakes(file: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """The mistakes of a command beside an experiment file; none if it succeeds."""
    with beside(file):
        here = os.getcwd()
        try:
            with paths_refused():
                execute(words)
        except HookrunError as error:
            told = json.dumps(mistakes_of(error))
            return json.loads(told.replace(here, "HERE").replace(str(ROOT), "HOOKRUN"))
    return []


def lines(path: Path) -> Iterator[str]:
    """A line for each mistake of each block of a transcript: all that a program reads but the sentence."""
    for number, block in enumerate(blocks(path), start=1):
        file, typed = parts(block)
        for mistake in mistakes(file, shlex.split(typed)):
            del mistake["what"]
            yield json.dumps({"in": f"{path.name} {number}: {typed}", **mistake}, ensure_ascii=False)


if __name__ == "__main__":
    transcripts = sorted(GOLDEN.glob("*.txt"))
    for path in transcripts:
        path.write_text(BETWEEN.join(map(repeated, blocks(path))), encoding="utf-8")
    told = [line for path in transcripts for line in lines(path)]
    (GOLDEN / "mistakes.jsonl").write_text("\n".join([*told, ""]), encoding="utf-8")
