"""The command that repeats a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from report_pages import table

import hookrun
from hookrun.cli import main


def test_the_command_on_the_page_repeats_the_results(observed: Path, page) -> None:
    words = shlex.split(page(observed).command)
    assert words[:3] == ["python", "-m", "hookrun"]
    assert not any(word.startswith("hydra.run.dir") for word in words)
    assert main([*words[3:], "hydra.run.dir=repeated"]) == 0
    assert hookrun.open_run("repeated").metrics == hookrun.open_run(observed).metrics


def test_the_command_on_the_page_repeats_the_sweep(sweep: Path, page) -> None:
    words = shlex.split(page(sweep).command)
    assert words[:4] == ["python", "-m", "hookrun", "--multirun"]
    assert main([*words[3:], "hydra.sweep.dir=again"]) == 0
    again = table(sweep.parent / "again")
    for one, other in zip(table(sweep), again, strict=True):
        assert one["val/accuracy"] == other["val/accuracy"]
