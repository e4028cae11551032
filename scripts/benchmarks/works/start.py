"""Whole processes: help, configuration and completion compared with a bare Hydra application; runs, with imports."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.measure import OURS, Result, Run, Settings, interleaved, judged

BARE_HYDRA = """
import hydra
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg): pass
main()
"""
IMPORTS = "import torch, hydra; from sklearn.datasets import load_digits; load_digits()"
HOOKRUN = (sys.executable, "-m", "hookrun")
# The same as the console script: Hydra completes only if the command line does not begin with an interpreter.
SCRIPT = (sys.executable, "-c", "import sys; from hookrun.cli import main; sys.exit(main())")
CLIP = ("experiment=clip_fc",)
CLIP_FC = "hooks.clip_fc"
ONE_BATCH = (*CLIP, "train.steps=1", "train.limit_batches=1")


def process(command: Sequence[str], folder: str, env: Mapping[str, str] | None = None, code: int = 0) -> Run:
    """A function that runs a process in a folder; CalledProcessError if it does not exit with `code`.

    Python may write bytecode files: otherwise hookrun, in a checkout, would be compiled at every start, but not its
    dependencies. They are written in the first run, which is not measured.
    """
    outer = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run() -> None:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**outer, **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if done.returncode != code:
            raise subprocess.CalledProcessError(done.returncode, command)

    return run


def against_hydra(arguments: Sequence[str], words: str = "") -> Callable[[str], dict[str, Run]]:
    """The same arguments for a bare Hydra application and for hookrun. words: the command line to be completed."""

    def runs(folder: str) -> dict[str, Run]:
        Path(folder, "app.py").write_text(BARE_HYDRA)
        Path(folder, "conf").mkdir()
        Path(folder, "conf", "config.yaml").write_text("seed: 0\n")
        line = {"COMP_LINE": words, "COMP_POINT": str(len(words))} if words else {}
        ours = SCRIPT if words else HOOKRUN
        return {
            "bare Hydra": process([sys.executable, "app.py", *arguments], folder, line),
            OURS: process([*ours, *arguments], folder, line),
        }

    return runs


def against_imports(base: str, code: str, arguments: Sequence[str]) -> Callable[[str], dict[str, Run]]:
    """hookrun compared with a process that only imports."""

    def runs(folder: str) -> dict[str, Run]:
        return {
            base: process([sys.executable, "-c", code], folder),
            OURS: process([*HOOKRUN, *arguments], folder),
        }

    return runs


def against_help(arguments: Sequence[str]) -> Callable[[str], dict[str, Run]]:
    """A command line that hookrun refuses compared with its help."""

    def runs(folder: str) -> dict[str, Run]:
        return {
            "hookrun --help": process([*HOOKRUN, "--help"], folder),
            OURS: process([*HOOKRUN, *arguments], folder, code=2),
        }

    return runs


def row(
    name: str, work: str, runs: Callable[[str], dict[str, Run]], target: float
) -> Callable[[Settings], Result]:
    """The function that measures one row."""

    def measure(settings: Settings) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            times = interleaved(runs(folder), settings.slow(), 0)
        return judged(work, times, target=target)

    measure.__name__ = name
    return measure


_first_batch = partial(against_imports, "import torch, hydra, digits", IMPORTS)
_torch = partial(against_imports, "import torch", "import torch")
ROWS = (
    row("start_help", "hookrun --help", against_hydra(["--help"]), 1.5),
    row("start_cfg", "hookrun --cfg job", against_hydra(["--cfg", "job"]), 1.5),
    row("start_completion", "shell completion", against_hydra(["-sc", "query=bash"], "hookrun see"), 1.5),
    row("start_batch", "start to first batch on digits", _first_batch(ONE_BATCH), 1.3),
    row("start_smallest", "the smallest run", _torch(ONE_BATCH), 1.5),
    row("start_typed", "a misspelt key on the command line", against_help([*CLIP, f"{CLIP_FC}.maxx=3"]), 1.5),
    row("start_value", "a misspelt value of a hook", against_help([*CLIP, f"{CLIP_FC}.action=clmap"]), 1.5),
    row("start_plan", "task=plan", _torch(["experiment=clip_fc", "task=plan"]), 1.5),
)
