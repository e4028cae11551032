"""The processes that tests fork instead of starting: they end, fail and are killed like others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from warm_processes import WarmProcesses


def test_a_program_runs_like_python_c(warm: WarmProcesses, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("text = 'mine'\n")
    program = (
        "import os, sys\n"
        "from mine import text\n"
        "print(__name__, sys.argv, os.getcwd(), os.environ['A'], sys.stdin.read() == '', text)\n"
        "print('said', file=sys.stderr)\n"
        "sys.exit(int(sys.argv[1]))"
    )
    done = warm.run(program, 5, cwd=tmp_path, env={"A": "b"}, paths=(tmp_path,))
    assert (done.returncode, done.stderr) == (5, "said\n")
    assert done.stdout == f"__main__ ['-c', '5'] {tmp_path} b True mine\n"
    assert warm.run("import sys; print('A' in __import__('os').environ)").stdout == "False\n"


def test_an_error_is_printed_and_the_exit_code_is_1(warm: WarmProcesses) -> None:
    done = warm.run("def f():\n    raise ValueError('no')\nf()")
    assert done.returncode == 1 and done.stderr.endswith("ValueError: no\n")


def test_torch_and_hookrun_are_imported_and_can_train(warm: WarmProcesses, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "before = {'torch', 'hookrun.cli', 'hookrun.tasks.training.loop'} <= set(sys.modules)\n"
        "from hookrun.cli import main\n"
        "code = main(['compute.device=cpu', 'train.epochs=1', 'train.limit_batches=1', 'hydra.run.dir=run'])\n"
        "print(before, code)"
    )
    assert warm.run(program, cwd=tmp_path).stdout.splitlines()[-1] == "True 0"
    assert (tmp_path / "run/metrics.jsonl").is_file()


def test_a_process_can_be_polled_and_killed(warm: WarmProcesses) -> None:
    read, write = os.pipe()
    process = warm.start("import time; print('here', flush=True); time.sleep(60)", stdout=write)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.readline() == "here\n"
        assert process.poll() is None and process.pid != os.getpid()
        process.send_signal(signal.SIGKILL)
        assert process.wait() == process.poll() == -signal.SIGKILL
        assert said.read() == ""
