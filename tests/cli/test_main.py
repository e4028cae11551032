"""The command line as a whole: what the process around it sees."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from warm_processes import WarmProcesses

from hookrun.cli import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["experiment=clip_fc", "train.epochs=1", "train.limit_batches=2", "compute=cpu"]


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def status(run: Path) -> tuple[str, int]:
    found = json.loads((run / "status.json").read_text())
    return found["status"], found["exit_code"]


class TestProcess:
    """`main` restores the state of the process that calls it."""

    @pytest.mark.parametrize(
        "typed", [["--cfg", "job"], ["experiment=clip_fx"], ["--nothing"], ["-m", *SMALL]], ids=str
    )
    def test_it_can_be_called_repeatedly(self, typed: list[str], cwd: Path) -> None:
        def state() -> tuple[object, ...]:
            return sys.argv, dict(os.environ), os.getcwd(), logging.getLogger().handlers[:]

        before = state()
        codes = {main(typed) for _ in range(2)}
        assert len(codes) == 1
        assert state() == before
        assert not GlobalHydra.instance().is_initialized()
        assert not HydraConfig.initialized()

    def test_the_arguments_default_to_those_of_the_process(self, monkeypatch, capsys) -> None:
        monkeypatch.setattr(sys, "argv", ["hookrun", "--cfg", "job", "seed=7"])
        assert main() == 0
        assert "seed: 7\n" in capsys.readouterr().out

    def test_without_any_stdout_it_still_works(self, monkeypatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        assert main(["--help"]) == 0

    def test_an_interrupt_while_composing_exits_with_130_without_a_traceback(
        self, monkeypatch, capsys
    ) -> None:
        def interrupted(arguments: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("hookrun.cli.commands.execute", interrupted)
        assert main([]) == 130
        assert capsys.readouterr().err == ""


def hookrun(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "hookrun", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, text=True, **{"capture_output": True, **options})


def test_a_closed_pipe_is_not_an_error() -> None:
    """As `hookrun --cfg all | head -1` does."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = hookrun("--cfg", "all", stdout=pipe, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_without_stdin_runs_and_refuses(cwd: Path, warm: WarmProcesses) -> None:
    program = (
        "import os, sys\n"
        "os.close(0)\n"  # then Python starts without stdin and sets:
        "sys.stdin = sys.__stdin__ = None\n"
        "from hookrun.cli import main\n"
        f"codes = main({[*SMALL, 'hydra.run.dir=run']}), main(['experiment=clip_fx'])\n"
        "print(sys.stdin, codes)"
    )
    done = warm.run(program, cwd=cwd)
    assert done.stdout.splitlines()[-1] == "None (0, 2)", done.stderr
    assert done.stderr.startswith("1 configuration error\n")
    assert status(cwd / "run") == ("done", 0)


LEAVES = """
import atexit, sys, threading, time
import hookrun.cli
from concurrent.futures import ThreadPoolExecutor

hookrun.cli._main = lambda arguments: 3
atexit.register(print, "atexit")
pool = ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.2), print("piece")))
sys.argv = ["hookrun"]
hookrun.cli.main()
print("not reached")
"""


def test_a_process_of_several_ends_its_threads_and_keeps_its_exit_code() -> None:
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (3, "piece\natexit\n", "")
