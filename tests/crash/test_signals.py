"""A run of the command line that gets one, two or five signals ends as interrupted and can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from warm_processes import WarmProcesses

from hookrun.store.reader import open_run
from hookrun.store.verify import verify


class Case(NamedTuple):
    """Overrides, the file to wait for, and (seconds of pause, signal)."""

    more: list[str]
    awaited: str
    signals: list[tuple[float, int]]


INT = 2
TERM = 15
HUP = 1
USR1 = 10
SIGNALS: dict[str, list[tuple[float, int]]] = {
    "HUP": [(0, HUP)],
    "USR1": [(0, USR1)],
    "INT while TERM is handled": [(0, TERM), (0.12, INT)],
    "both at once": [(0, TERM), (0, INT)],
    "five of INT": [(0, INT), *[(0.12, INT)] * 4],
}
CASES = {
    name: Case([f"hydra.run.dir={name}"], f"{name}/metrics.jsonl", signals)
    for name, signals in SIGNALS.items()
} | {"sweep": Case(["-m", "seed=1,2,3", "hydra.sweep.dir=sweep"], "sweep/0/metrics.jsonl", [(0, TERM)])}
CASES["HUP"].more.append("data.workers=1")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcesses) -> Ended:
    folder = tmp_path_factory.mktemp("signalled")
    done = warm.run(PROGRAM, json.dumps(CASES), cwd=folder)
    assert done.returncode == 0, done.stderr
    return Ended(folder, json.loads(done.stdout.splitlines()[-1]))


def test_the_first_signal_leaves_a_readable_run(ended: Ended) -> None:
    """One of them has a worker that loads its data."""
    for name, signals in SIGNALS.items():
        run = open_run(ended.folder / name)
        number = signals[0][1]
        code = ended.codes[name]
        assert code == 128 + number or (name == "both at once" and code == 128 + INT), name
        assert (run.status["status"], run.status["exit_code"]) == ("interrupted", code), name
        assert run.status["reason"].startswith("interrupted by SIG"), name
        assert verify(run.path).bad == [], name
        assert run.metrics, name
        assert not (run.path / ".lock").exists(), name
        said = ended.said(name)
        assert (
            f"interrupted by SIG{ {INT: 'INT', TERM: 'TERM', HUP: 'HUP', USR1: 'USR1'}[code - 128] }" in said
        )
        assert "Traceback" not in said, said
        assert "Exception" not in said, said


def test_one_signal_still_writes_the_page(ended: Ended) -> None:
    for name in ("HUP", "USR1"):
        assert (ended.folder / name / "report.html").is_file()


def test_a_signalled_sweep_starts_no_further_job(ended: Ended) -> None:
    assert ended.codes["sweep"] == 143
    assert open_run(ended.folder / "sweep/0").status["exit_code"] == 143
    assert not (ended.folder / "sweep/1").exists()
    said = ended.said("sweep")
    assert f"1 interrupted, 2 not started, in {ended.folder / 'sweep'}" in said
    assert "not started: #1 (seed=2), #2 (seed=3)" in said
    assert (ended.folder / "sweep/report.html").is_file()
    assert "Traceback" not in said


# One process forks a child for each run; a signal is sent once the run has logged a metric.
PROGRAM = """
import json, os, signal, sys, time

from hookrun.cli import main

for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):  # whatever the tests were started in
    signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
HOOK = "+hooks.h={select: relu2, hook: forward, action: capture}"
ARGV = ["compute.device=cpu", "compute.threads=1", "compute.capture_buffer=1", "train.epochs=1000", HOOK]


def started(name, more):
    child = os.fork()
    if child == 0:
        os.setpgrp()  # as a terminal does with what is typed at it
        log = os.open(f"{name}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1), os.dup2(log, 2)
        os._exit(main([*ARGV, *more]))
    return child


codes = {}
for name, (more, awaited, signals) in json.loads(sys.argv[1]).items():
    child = started(name, more)
    while not (os.path.exists(awaited) and os.path.getsize(awaited)):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), open(f"{name}.log").read()
        time.sleep(0.01)
    for pause, number in signals:
        time.sleep(pause)
        os.killpg(child, number)  # Ctrl-C and schedulers reach the workers too
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


class Ended(NamedTuple):
    folder: Path
    codes: dict[str, int]

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()
