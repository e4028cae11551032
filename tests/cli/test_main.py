"""The command line as a whole: real runs in process, and what the process around them sees."""

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


def metrics(run: Path) -> list[dict[str, object]]:
    """The metrics of a run, but for what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: line[key] for key in ("step", "epoch", "split", "loss", "accuracy") if key in line}
        for line in lines
    ]


def status(run: Path) -> tuple[str, int]:
    found = json.loads((run / "status.json").read_text())
    return found["status"], found["exit_code"]


class TestRealRuns:
    def test_an_experiment_trains_and_leaves_its_record(self, cwd: Path) -> None:
        assert main([*SMALL, "hydra.run.dir=run"]) == 0
        assert status(cwd / "run") == ("done", 0)
        assert metrics(cwd / "run")
        assert {"plan.json", "env.json", ".hydra"} <= {path.name for path in (cwd / "run").iterdir()}

    def test_a_plan_is_shown_and_leaves_nothing(self, cwd: Path, capsys) -> None:
        assert main(["experiment=clip_fc", "task=plan"]) == 0
        assert "clip_fc" in capsys.readouterr().out
        assert list(cwd.iterdir()) == []

    def test_modules_are_shown_and_leave_nothing(self, cwd: Path, capsys) -> None:
        assert main(["task=modules", "task.select=conv*"]) == 0
        assert "conv1" in capsys.readouterr().out
        assert list(cwd.iterdir()) == []

    def test_hooks_that_do_not_fit_the_model_are_refused(self, cwd: Path, capsys) -> None:
        assert main([*SMALL, "hooks.clip_fc.select=fd"]) == 2
        printed = capsys.readouterr().err
        assert "hooks.clip_fc" in printed and "fc" in printed and "Traceback" not in printed
        assert list(cwd.iterdir()) == []

    @pytest.mark.parametrize(("policy", "state"), [("stop", "stopped"), ("error", "failed")])
    def test_a_check_that_trips_ends_with_3(self, policy: str, state: str, cwd: Path) -> None:
        hook = f"+hooks.low={{select: fc, hook: forward, action: check, min: -2000, max: -1000, policy: {policy}}}"
        assert main([*SMALL, hook, "hydra.run.dir=run"]) == 3
        assert status(cwd / "run") == (state, 3)


class TestProcess:
    """What `main` leaves alone in the process that calls it."""

    @pytest.mark.parametrize(
        "typed", [["--cfg", "job"], ["experiment=clip_fx"], ["--nothing"], ["-m", *SMALL]], ids=str
    )
    def test_it_can_be_called_again_and_again(self, typed: list[str], cwd: Path) -> None:
        def state() -> tuple[object, ...]:
            return sys.argv, dict(os.environ), os.getcwd(), logging.getLogger().handlers[:]

        before = state()
        codes = {main(typed) for _ in range(2)}
        assert len(codes) == 1
        assert state() == before
        assert not GlobalHydra.instance().is_initialized()
        assert not HydraConfig.initialized()

    def test_the_arguments_are_those_of_the_process_unless_given(self, monkeypatch, capsys) -> None:
        monkeypatch.setattr(sys, "argv", ["hookrun", "--cfg", "job", "seed=7"])
        assert main() == 0
        assert "seed: 7\n" in capsys.readouterr().out

    def test_without_any_stdout_it_still_works(self, monkeypatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        assert main(["--help"]) == 0

    def test_an_interrupt_while_composing_ends_quietly_with_130(self, monkeypatch, capsys) -> None:
        def interrupted(arguments: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("hookrun.cli.commands.execute", interrupted)
        assert main([]) == 130
        assert capsys.readouterr().err == ""


def hookrun(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "hookrun", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, text=True, **{"capture_output": True, **options})


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """As `hookrun --cfg all | head -1` does."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = hookrun("--cfg", "all", stdout=pipe, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_without_stdin_runs_and_refuses(cwd: Path, warm: WarmProcesses) -> None:
    program = (
        "import os, sys\n"
        "os.close(0)\n"  # and Python, started without it, sets:
        "sys.stdin = sys.__stdin__ = None\n"
        "from hookrun.cli import main\n"
        f"codes = main({[*SMALL, 'hydra.run.dir=run']}), main(['experiment=clip_fx'])\n"
        "print(sys.stdin, codes)"
    )
    done = warm.run(program, cwd=cwd)
    assert done.stdout.splitlines()[-1] == "None (0, 2)", done.stderr
    assert done.stderr.startswith("1 configuration error\n")
    assert status(cwd / "run") == ("done", 0)
