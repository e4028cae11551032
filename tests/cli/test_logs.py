"""Logging: sweeps log their jobs, other libraries do not log under Hydra's name, loggers are restored afterwards."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hookrun.cli import main
from hookrun.cli.commands import loggers_restored


def test_a_sweep_lists_its_jobs(notes, capsys) -> None:
    assert main(["-m", "experiment=clip_fc", "seed=5,6"]) == 0
    lines = [
        line.partition("[HYDRA] ")[2] for line in capsys.readouterr().out.splitlines() if "[HYDRA]" in line
    ]
    assert lines == [
        "Launching 2 jobs locally",
        "\t#0 : experiment=clip_fc seed=5",
        "\t#1 : experiment=clip_fc seed=6",
    ]


def test_neither_a_run_nor_a_library_logs_anything(notes, monkeypatch, capsys) -> None:
    run = notes.execute

    def talkative(prepared: object, run_dir: Path, **options: bool) -> int:
        logging.getLogger("some.library").info("heard by nobody")
        return run(prepared, run_dir, **options)

    monkeypatch.setattr("hookrun.tasks.execute", talkative)
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
    root, library = logging.getLogger(), logging.getLogger("some.library")
    before = (root.level, root.handlers[:], library.level, library.handlers[:], library.disabled)
    assert main([*typed, *([] if "--info" in typed else ["seed=5"])]) == 0
    assert (root.level, root.handlers[:], library.level, library.handlers[:], library.disabled) == before
    assert logging.getLogger("hydra").handlers == []


def test_loggers_are_restored_after_an_exception() -> None:
    library = logging.getLogger("some.library")
    with pytest.raises(KeyError), loggers_restored():
        library.addHandler(logging.NullHandler())
        library.setLevel("DEBUG")
        raise KeyError
    assert (library.handlers, library.level) == ([], logging.NOTSET)


def test_hydra_s_own_log_file_can_be_chosen(cwd: Path, notes) -> None:
    assert main(["seed=5", "hydra/job_logging=default", "hydra.run.dir=mine"]) == 0
    assert (cwd / "mine/hookrun.log").is_file()
