"""The command line as a whole: what the process around it sees."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from warm_processes import WarmProcesses

from hookrun.cli import main
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir
from hookrun.terminal import wait_is_over, waiting, waiting_for, words

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["experiment=clip_fc", "train.epochs=1", "train.limit_batches=2", "compute=cpu"]


class TestProcess:
    """`main` restores the state of the process that calls it."""

    @pytest.mark.parametrize(
        "typed", [["--cfg", "job"], ["experiment=clip_fx"], ["--nothing"], ["-m", *SMALL]], ids=str
    )
    def test_it_leaves_no_trace_in_the_process(self, typed: list[str], cwd: Path) -> None:
        def state() -> tuple[object, ...]:
            return sys.argv, dict(os.environ), os.getcwd(), logging.getLogger().handlers[:]

        before = state()
        assert main(typed) == (0 if typed[0] in ("--cfg", "-m") else 2)
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

    def test_an_interrupt_while_composing_exits_with_130(self, monkeypatch, capsys) -> None:
        def interrupted(*_: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("hookrun.command.cli.commands.execute", interrupted)
        assert main([]) == 130
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command", ["hookrun --cfg all", "hookrun.verify RUN", "hookrun.report RUN", "hookrun.schema"]
)
def test_a_closed_pipe_is_not_an_error(command: str, tmp_path: Path) -> None:
    """As `hookrun --cfg all | head -1` does."""
    run = RunDir.create(tmp_path)
    run.set_status("running")
    run.write_manifest()
    run.set_status("done")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        typed = [sys.executable, "-W", "error", "-m", *command.replace("RUN", str(tmp_path)).split()]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(typed, env=env, text=True, stdout=pipe, stderr=subprocess.PIPE)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_process_without_stdin_runs(cwd: Path, warm: WarmProcesses) -> None:
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
    assert open_run(cwd / "run").status["exit_code"] == 0


LEAVES = """
import atexit, sys, threading, time
import hookrun.command.cli
from concurrent.futures import ThreadPoolExecutor

hookrun.command.cli._main = lambda *_: CODE
atexit.register(print, "atexit")
pool = ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.2), print("piece")))
sys.argv = ["hookrun"]
hookrun.command.cli.main()
print("not reached")
"""


@pytest.mark.parametrize("code", [3, 2])
def test_a_process_of_several_keeps_its_exit_code(code: int) -> None:
    """After a refusal it waits until torchrun ends it, since rank 0 has failed too."""
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "1", "PYTHONPATH": str(ROOT)}
    program = LEAVES.replace("CODE", str(code))
    if code == 2:
        program = "import os\n" + program.replace(
            "time.sleep(0.2)", "(time.sleep(0.2), os.kill(os.getpid(), 15))"
        )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == code
    assert done.stdout == "piece\natexit\n"
    assert done.stderr == ""


def test_a_verbose_sweep_lists_its_jobs(notes, capsys) -> None:
    assert main(["-v", "-m", "experiment=clip_fc", "seed=5,6"]) == 0
    told = re.findall(r"\[HYDRA\] (.*)", capsys.readouterr().out)
    jobs = [f"\t#{number} : experiment=clip_fc seed={number + 5}" for number in (0, 1)]
    assert told == ["Launching 2 jobs locally", *jobs]


def test_neither_a_run_nor_a_library_logs_anything(notes, monkeypatch, capsys) -> None:
    run = notes.execute

    def talkative(prepared: object, run_dir: Path, **options: bool) -> int:
        logging.getLogger("some.library").info("heard by nobody")
        return run(prepared, run_dir, **options)

    monkeypatch.setattr("hookrun.run.execute.execute", talkative)
    assert main(["seed=5"]) == 0
    assert main(["-m", "seed=5"]) == 0
    assert "heard by nobody" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "typed",
    [
        ["hydra/job_logging=default"],
        ["-m", "hydra/job_logging=default", "hydra/hydra_logging=default"],
        ["hydra.verbose=true"],
        ["-m", "hydra.verbose=[some.library]"],
        ["--info", "plugins"],
    ],
    ids=" ".join,
)
def test_the_loggers_are_restored_afterwards(typed: list[str], notes) -> None:
    root = logging.getLogger()
    library = logging.getLogger("some.library")
    before = (root.level, root.handlers[:], library.level, library.handlers[:], library.disabled)
    assert main([*typed, *([] if "--info" in typed else ["seed=5"])]) == 0
    assert (root.level, root.handlers[:], library.level, library.handlers[:], library.disabled) == before
    assert logging.getLogger("hydra").handlers == []


PROGRAM = """
import json, os, sys
from hookrun.cli import main

def said(*names):
    print(json.dumps([codes, sorted(set(names) & set(sys.modules))]), file=sys.stderr)

shows = [['--help'], ['--cfg', 'job'], ['--info', 'config'], ['--hydra-help'], ['--version']]
wrong = [['--cfg', 'job', 'sed=1'], ['--cfg', 'job', 'model=cn'], ['--cfg', 'job', '-p', 'sed']]
codes = [main(line) for line in [*shows, *wrong]]
said('pydantic', 'hookrun.engine.spec', 'hookrun.store.files', 'hookrun.run.tasks', 'hookrun.report', 'torch')

os.environ['COMP_LINE'] = 'hookrun experiment='
shows = [['--cfg', 'all', 'experiment=clip_fc'], ['-sc', 'query=bash'], ['--info', 'defaults']]
wrong = [['train.epochs=-1'], ['-m', 'experiment=clip_fc', 'train.epochs=1,-1']]
stderr, sys.stderr = sys.stderr, open(os.devnull, 'w')
codes = [main(line) for line in [*shows, *wrong]]
sys.stderr = stderr
said('torch', 'torchvision', 'sklearn', 'rich')

small = ['experiment=clip_fc', 'train.steps=1', 'train.limit_batches=1']
codes = [main([*small, 'task=plan']), main([*small, 'hydra.run.dir=run'])]
said('torch._dynamo', 'torch._inductor', 'sympy', 'triton', 'sklearn', 'scipy', 'pandas', 'torchvision')
"""


def test_each_command_imports_only_what_it_uses(tmp_path: Path) -> None:
    """All in one process, the lightest first."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path)
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[[")]
    assert len(found) == 3, done.stderr
    shows, refusals, small_run = found
    assert shows == [[0, 0, 0, 0, 0, 2, 2, 2], []], "help and configurations need no class that validates"
    assert refusals == [[0, 0, 0, 2, 2], []], "completion and refusals need no torch"
    assert small_run == [[0, 0], []], "a small run needs neither the compiler nor scikit-learn"
    assert "configuration error" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("[[")


CLEAR = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """A function after whose call stderr is a terminal, and stdout is not."""
    found = Terminal()

    def watched() -> Terminal:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", found)
        return found

    return watched


def test_the_line_is_cleared_before_the_configuration_is_printed(watch, capsys) -> None:
    terminal = watch()
    assert main(["--cfg", "job"]) == 0
    assert terminal.getvalue() == f"{CLEAR}hookrun: reading the configuration …{CLEAR}"
    assert capsys.readouterr().out.startswith("task:\n")
    assert sys.stderr is terminal


def test_the_line_is_cleared_before_an_error(watch: Callable[[], Terminal]) -> None:
    terminal = watch()
    assert main(["--nothing"]) == 2
    assert f"…{CLEAR}1 configuration error\n" in terminal.getvalue()


def test_any_output_clears_the_line(watch: Callable[[], Terminal], capsys) -> None:
    terminal = watch()
    with waiting([]), words():
        waiting_for("a")
        print("text")
        waiting_for("b")
        wait_is_over()
        waiting_for("c")
    assert terminal.getvalue() == f"{CLEAR}hookrun: a …{CLEAR}{CLEAR}hookrun: b …{CLEAR}"
    assert capsys.readouterr().out == "text\n"


def test_completion_writes_nothing_to_the_terminal() -> None:
    """In a separate process, on a real terminal."""
    ours, theirs = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "hookrun", "-sc", "query=bash"],
        env={**os.environ, "COMP_LINE": "hookrun experiment=clip", "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.set_blocking(ours, False)
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs, "rb"):
        assert terminal.read() is None, "nothing was written"
    assert done.returncode == 0
    assert "experiment=clip_fc" in done.stdout.split()


def test_no_line_without_a_capable_terminal(watch: Callable[[], Terminal], monkeypatch, capsys) -> None:
    terminal = watch()
    monkeypatch.setenv("TERM", "dumb")
    assert main(["--cfg", "job"]) == 0
    assert terminal.getvalue() == ""
    monkeypatch.undo()
    assert main(["--cfg", "job"]) == 0
    assert capsys.readouterr().err == ""
