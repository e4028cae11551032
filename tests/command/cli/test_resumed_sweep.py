"""Resumed sweeps: finished jobs are not run again, unfinished ones continue in their directories, missing ones run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hookrun.cli import main
from hookrun.command.sweeps.composed_jobs import ComposedJob, composed_job
from hookrun.command.sweeps.resumed import is_sweep, sweep_command, sweep_folder
from hookrun.errors import SpecError
from hookrun.run.experiment.experiment import Experiment
from hookrun.store.files import make_folder, write_json
from hookrun.store.format import REPORT
from hookrun.store.lock import sole_writer


@pytest.fixture(autouse=True)
def earlier(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sweeps of these tests are; their jobs are not checked beforehand and have no pages."""
    monkeypatch.setattr("hookrun.command.sweeps.jobs.make_page", lambda folder, says=True: None)
    monkeypatch.setattr("hookrun.run.tasks.check_jobs", lambda *_, **__: {})
    return cwd / "mine"


def swept(*typed: str) -> int:
    return main(["-m", *typed, "hydra.sweep.dir=mine"])


def jobs(folder: Path) -> dict[str, int]:
    """Directory -> seed of every job."""
    found = folder.glob("*/.hydra/config.yaml")
    return {file.parents[1].name: OmegaConf.load(file).seed for file in sorted(found)}


def test_finished_jobs_are_not_run_again(pages, notes, earlier, capsys) -> None:
    assert swept("seed=5,1,3,130,7") == 130
    before = (earlier / "0/.hydra/hydra.yaml").stat().st_mtime_ns
    notes.ran.clear()
    notes.mended = True
    assert main(["-m", "seed=5,1,3,130,7", "resume=mine"]) == 3, "the stopped job is over and counts"
    assert notes.ran == [(1, earlier / "1"), (130, earlier / "3"), (7, earlier / "4")]
    assert notes.went_on == [earlier / "1", earlier / "3"]
    assert (earlier / "0/.hydra/hydra.yaml").stat().st_mtime_ns == before
    out = capsys.readouterr().out
    assert "sweep: 4 of 5 jobs done, 2 of them before" in out
    assert "report:" in out
    assert len((earlier / "sweep.csv").read_text().splitlines()) == 6
    notes.ran.clear()
    assert main(["-m", "+resume=mine"]) == 3
    assert notes.ran == [], "alone it is the sweep that is stored"


def test_a_finished_job_without_its_page_gets_it(notes, earlier, monkeypatch) -> None:
    assert swept("seed=5,6") == 0
    (earlier / "0/report.html").touch()
    made = list[Path]()
    monkeypatch.setattr(
        "hookrun.command.sweeps.jobs.make_page", lambda folder, says=True: made.append(folder)
    )
    assert main(["-m", "resume=mine"]) == 0
    assert made == [earlier / "1"]


class TestASweepOfWhichAllIsDone:
    @pytest.fixture
    def composed(self, earlier: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
        """The overrides of each job that is composed; pages are empty files."""
        monkeypatch.setattr(
            "hookrun.command.sweeps.jobs.make_page", lambda folder, says=True: (folder / REPORT).touch()
        )
        monkeypatch.setattr(
            "hookrun.command.sweeps.sweep.make_page", lambda folder: (folder / REPORT).touch()
        )
        composed = list[Sequence[str]]()

        def compose(app: Any, cfg: Any, overrides: Sequence[str]) -> ComposedJob:
            composed.append(overrides)
            return composed_job(app, cfg, overrides)

        monkeypatch.setattr("hookrun.command.sweeps.composed_jobs.composed_job", compose)
        return composed

    def finished(self, composed: list[Sequence[str]], *typed: str) -> None:
        assert swept(*typed) == 0
        assert main(["-m", "resume=mine"]) == 0, "it writes the pages of jobs"
        composed.clear()

    def test_says_so_without_composing_a_job(self, notes, composed, capsys) -> None:
        self.finished(composed, "seed=5,6")
        notes.ran.clear()
        capsys.readouterr()
        assert main(["-m", "resume=mine"]) == 0
        out = capsys.readouterr().out
        assert "sweep: 2 of 2 jobs done, 2 of them before" in out
        assert "report: " in out
        assert composed == []
        assert notes.ran == []

    def test_runs_jobs_with_another_configuration(self, notes, composed) -> None:
        self.finished(composed, "seed=5,6")
        notes.ran.clear()
        assert main(["-m", "seed=5,6", "train.epochs=2", "resume=mine"]) == 0
        assert len(composed) == len(notes.ran) == 2

    def test_writes_a_missing_page(self, notes, earlier, composed) -> None:
        self.finished(composed, "seed=5,6")
        (earlier / "1" / REPORT).unlink()
        assert main(["-m", "resume=mine"]) == 0
        assert (earlier / "1" / REPORT).exists()

    def test_a_copy_of_a_job_does_not_stand_for_one_that_was_removed(self, notes, earlier, composed) -> None:
        self.finished(composed, "seed=5,6")
        notes.ran.clear()
        shutil.rmtree(earlier / "1")
        shutil.copytree(earlier / "0", earlier / "7")
        os.utime(earlier / "7" / REPORT)
        assert main(["-m", "resume=mine"]) == 0
        assert len(notes.ran) == 1

    def test_jobs_that_choose_files_are_composed_again(self, notes, composed) -> None:
        self.finished(composed, "model=cnn,mlp")
        assert main(["-m", "resume=mine"]) == 0
        assert len(composed) == 2


def test_the_best_job_is_shown_with_its_own_keys_only(earlier, capsys) -> None:
    small = ["compute.device=cpu", "model=mlp", "train.limit_batches=1", "train.epochs=1"]
    assert swept(*small, "seed=1") == 0
    rest = [text for text in small if "epochs" not in text]
    assert main(["-m", *rest, "seed=2", "train.optimizer.lr=0.01", "resume=mine"]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("best: ")]
    assert "train.optimizer.lr=0.01" in line or "job 0, " in line


def test_a_changed_job_of_a_larger_sweep_is_a_new_job(notes, earlier, capsys) -> None:
    assert swept("seed=5,6") == 0
    assert main(["-m", "seed=8,5,6,9", "resume=mine"]) == 0
    assert jobs(earlier) == {"0": 5, "1": 6, "2": 8, "3": 9}
    notes.ran.clear()
    assert main(["-m", "resume=latest"]) == 2, "it lies elsewhere"
    assert main(["resume=mine"]) == 0
    assert notes.ran == [], "the wider one is stored now"
    assert main(["-m", "seed=5,6", "train.epochs=2", "resume=mine"]) == 0
    assert [run_dir.name for _, run_dir in notes.ran] == ["4", "5"]
    assert "4 more in it, with configurations other than this sweep's" in capsys.readouterr().out


def test_jobs_that_had_not_started_keep_their_numbers(notes, earlier) -> None:
    sweep = ["train.epochs=5,6,7,8", "seed='${hydra:job.num}0'", "tags=['${hydra:runtime.output_dir}']"]
    assert swept(*sweep) == 0
    for number in (1, 3):
        for file in sorted((earlier / str(number)).rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
    notes.ran.clear()
    assert main(["-m", *sweep, "resume=mine"]) == 0
    assert notes.ran == [(10, earlier / "1"), (30, earlier / "3")]


def test_a_resolver_may_follow_the_number_in_a_directory(notes, earlier, capsys) -> None:
    subdir = "hydra.sweep.subdir='job${hydra:job.num}'"
    assert swept("seed=5,1", subdir) == 1
    assert main(["-m", "seed=5,1,7,8", subdir, "resume=mine"]) == 1
    assert jobs(earlier) == {"job0": 5, "job1": 1, "job2": 7, "job3": 8}
    assert main(["-m", "seed=9", "hydra.sweep.subdir=${nowhere}", "resume=mine"]) == 2
    assert "hydra.sweep.subdir: Interpolation key 'nowhere' not found" in capsys.readouterr().err
    assert main(["-m", "seed=9", "hydra.sweep.subdir=job0", "resume=mine"]) == 2
    assert "job0 is the directory of a job with another configuration" in capsys.readouterr().err


def test_equal_jobs_are_distinguished_by_their_number(notes, earlier) -> None:
    assert swept("seed=5,5,1") == 1
    notes.ran.clear()
    assert main(["-m", "seed=5,5,5,1", "resume=mine"]) == 1
    assert notes.ran == [(1, earlier / "2"), (5, earlier / "3")]


def test_the_config_dir_of_a_found_sweep_is_typed_again(conf, notes, capsys) -> None:
    folder = conf(**{"experiment/mine": "# @package _global_\ntrain: {epochs: 4}\n"})
    assert main(["-m", "--config-dir", folder, "experiment=mine", "seed=5,1"]) == 1
    notes.ran.clear()
    assert Path("multirun/latest").is_symlink()
    assert main(["-m", "resume=latest"]) == 2
    assert f"type it as well: --config-dir {folder} -m resume=" in capsys.readouterr().err
    assert main(["--config-dir", folder, "-m", "resume=latest", "hydra.sweeper.max_batch_size=1"]) == 1
    ((seed, _),) = notes.ran
    assert seed == 1
    assert notes.prepared[-1][0].settings.train.epochs == 4


def test_sweeps_that_cannot_be_resumed_are_refused(notes, cwd, earlier, capsys) -> None:
    assert swept("seed=5,1") == 1
    os.mkdir("empty")
    for typed, said in {
        "resume=nowhere": "there is no directory",
        "resume=empty": "it has no multirun.yaml",
        "resume=mine/0": f"is the directory of a run, not of a sweep\n      name the sweep's: resume={earlier}",
        "resume=true": "found True, expected a directory",
        "resume=latest": "multirun/latest",
    }.items():
        assert main(["-m", typed]) == 2
        assert said in capsys.readouterr().err, typed
    assert main(["-m", "resume=mine", "resume=mine"]) == main(["-m", "resume=mine", "hydra.sweep.dir=a"]) == 2
    assert main(["resume=mine", "fail_fast=maybe"]) == main(["fail_fast=true"]) == 2
    capsys.readouterr()
    notes.ran.clear()
    for held in (earlier, earlier / "1"):
        with sole_writer(held):
            assert main(["-m", "resume=mine"]) == 2
        assert f"resume: {held} is being written by process" in capsys.readouterr().err
    for content in ("[]", '{"config": "x"}'):
        (earlier / "1/job.json").write_text(content)
        assert main(["-m", "resume=mine"]) == 2
        assert "1/job.json: " in capsys.readouterr().err
    (earlier / "1/job.json").unlink()
    assert main(["-m", "resume=mine"]) == 2
    assert "does not say which job it is" in capsys.readouterr().err
    assert notes.ran == []


def test_a_stored_sweep_may_set_only_what_a_file_may_set(notes, earlier, cwd, capsys) -> None:
    assert swept("seed=5") == 0
    file = earlier / "multirun.yaml"
    stored = OmegaConf.load(file)
    for key, text, said in (
        ("task", "+trust=[os]", "trust"),
        ("task", "hydra.sweep.dir=x", "is not a key that a file may sweep over"),
        ("hydra", "hydra.searchpath=[file:///etc]", "type it as well: -m resume="),
        ("hydra", "hydra.job.env_set={A: b}", "type it as well"),
        ("hydra", "hydra/job_logging=default", "cannot be chosen in a file"),
        ("hydra", "hydra.sweep.subdir=../out", "type it as well"),
        ("hydra", "+hydra.callbacks.x={_target_: os.system}", "type it as well"),
    ):
        changed = stored.copy()
        changed.hydra = {"overrides": {**stored.hydra.overrides, key: [text]}}
        OmegaConf.save(changed, file)
        assert main(["-m", "resume=mine"]) == 2, text
        assert said in capsys.readouterr().err, text
    sources = [*stored.hydra.runtime.config_sources]
    for folder in ("/proc/self", "/", str(cwd)):  # some of them hold links to themselves
        changed = stored.copy()
        one = {"path": folder, "schema": "file", "provider": "command-line"}
        changed.hydra.runtime.config_sources = [*sources, one]
        OmegaConf.save(changed, file)
        assert main(["-m", "resume=mine"]) == 2, folder
        assert f"type it as well: --config-dir {folder} -m resume=" in capsys.readouterr().err
    file.write_text("hydra: [1, 2]\n")
    assert main(["-m", "resume=mine"]) == 2
    assert "is not what Hydra writes" in capsys.readouterr().err
    assert [seed for seed, _ in notes.ran] == [5]
    assert not (cwd / "out").exists()


def test_a_sweep_stopped_by_fail_fast_can_be_resumed(pages, notes, earlier, capsys) -> None:
    assert swept("seed=5,1,6,7", "fail_fast=true") == 1
    assert [seed for seed, _ in notes.ran] == [5, 1]
    out = capsys.readouterr().out
    assert "stopped at the first failed job (fail_fast): job 1" in out
    assert "sweep: 1 of 4 jobs done, 2 not started, in" in out
    stopped = {"jobs": 4, "fail_fast": True, "stopped_by": "1"}
    assert json.loads((earlier / "sweep.json").read_text()) == stopped
    page = (earlier / "report.html").read_text()
    assert "Stopped at the first failed job" in page
    assert "2 jobs not started" in " ".join(page.split())
    assert swept("resume=mine", "fail_fast=true") == 2, "the directory was typed too"
    notes.ran.clear()
    notes.mended = True
    assert main(["-m", "resume=mine", "+fail_fast=true"]) == 0
    assert [seed for seed, _ in notes.ran] == [1, 6, 7]
    assert json.loads((earlier / "sweep.json").read_text()) == {"jobs": 4}
    assert not (earlier / ".stop").exists()
    assert "Stopped at" not in (earlier / "report.html").read_text()


def test_stored_settings_that_are_typed_again_are_accepted(notes, earlier, cwd, capsys) -> None:
    logging = ["hydra/job_logging=none", "hydra.verbose=[a]"]
    typed = ["hydra.searchpath=[]", "++hydra.job.env_set.A=b c", *logging]
    assert swept("seed=5,1", *typed) == 1
    assert main(["-m", "resume=mine"]) == 2
    hints = [line for line in capsys.readouterr().err.splitlines() if "type it as well" in line]
    again = [shlex.split(line)[-1] for line in hints]
    assert sorted(again) == sorted(typed)
    notes.ran.clear()
    assert main(["-m", "resume=mine", *again]) == 1
    assert notes.ran == [(1, earlier / "1")]
    again[again.index("hydra.verbose=[a]")] = "hydra.verbose=[b]"
    assert main(["-m", "resume=mine", *again]) == 1, "with another value"
    assert main(["-m", "resume=mine", *again[1:]]) == 2


def test_the_message_names_the_missing_jobs(notes, earlier, capsys) -> None:
    assert swept("seed=5,6", "train.epochs=3") == 0
    assert main(["-m", "seed=130,8,6,9,5", "train.epochs=3", "resume=mine"]) == 130
    said = capsys.readouterr().err
    assert "2 done, 1 interrupted, 2 not started" in said
    assert "not started: #1 (seed=8), #3 (seed=9)\n" in said, "what all jobs share is not repeated"


def test_a_job_that_is_resumed_alone_stays_a_job_of_its_sweep(notes, earlier, monkeypatch, capsys) -> None:
    def leave_a_state(prepared: Experiment, run_dir: Path, **options: bool) -> int:
        state = run_dir / "checkpoints/state_000001"
        make_folder(state)
        write_json(state / "state.json", {})
        return notes.execute(prepared, run_dir, **options)

    monkeypatch.setattr("hookrun.run.execute.execute", leave_a_state)
    assert swept("seed=130,5") == 130
    assert main(["resume=mine/0"]) == 130
    assert capsys.readouterr().err.count("to go on: hookrun -m resume=mine\n") == 2
    assert main(["resume=mine/0", "fail_fast=true"]) == 2
    assert "is for a sweep, and this is one run" in capsys.readouterr().err
    saved = [experiment.settings.train.checkpoint.save for experiment, _ in notes.prepared]
    assert saved == ["best", "best"]


def test_a_directory_with_dots_is_the_same_for_all_jobs(notes, cwd, monkeypatch) -> None:
    assert main(["-m", "seed=5,1", "hydra.sweep.dir=a/../../up"]) == 1
    assert main(["-m", "seed=5,1", "resume=../up"]) == 1
    monkeypatch.setenv("HOOKRUN_OUTPUT", "../out")
    assert main(["seed=7"]) == main(["-m", "seed=7"]) == 0
    assert [run_dir.parent for _, run_dir in notes.ran[:3]] == [cwd.parent / "up"] * 3
    others = [run_dir.relative_to(cwd.parent).parts[:2] for _, run_dir in notes.ran[3:]]
    assert others == [("out", "outputs"), ("out", "multirun")]
    assert main(["-m", "resume=latest"]) == main(["resume=latest"]) == 0


def contents(place: Path) -> dict[Path, bytes]:
    """File -> its bytes, for a file or for all files of a folder."""
    return {file: file.read_bytes() for file in (place, *place.rglob("*")) if file.is_file()}


def test_no_link_in_the_directory_is_written_through(notes, earlier, tmp_path, capsys) -> None:
    assert swept("seed=5,1", "hydra.sweep.subdir=jobs/${hydra.job.num}") == 1
    notes.ran.clear()
    theirs = tmp_path / "theirs"
    for place in ("jobs/0", "jobs/1/.hydra", "jobs/1/.hydra/config.yaml", "multirun.yaml", "jobs"):
        link = earlier / place
        link.rename(theirs)
        link.symlink_to(theirs)
        before = contents(theirs)
        typed = ["seed=5,1", "hydra.sweep.subdir=jobs/${hydra.job.num}"]
        assert main(["-m", *typed, "resume=mine"]) == 2, place
        assert f"{link} is a link" in capsys.readouterr().err, place
        assert notes.ran == [], place
        assert contents(theirs) == before, place
        link.unlink()
        theirs.rename(link)
    link = earlier / "jobs/1/error.txt"
    link.rename(theirs)
    link.symlink_to(theirs)
    theirs.write_text("theirs")
    assert main(["-m", *typed, "resume=mine"]) == 1, "the job fails again, and that is told in its own file"
    assert theirs.read_text() == "theirs"
    assert "out of luck" in link.read_text()
    assert not link.is_symlink()
    theirs.unlink()
    notes.ran.clear()
    (earlier / "jobs/2").symlink_to(theirs)  # a link without a target yet
    assert main(["-m", "seed=5,1,6", *typed[1:], "resume=mine"]) == 2
    assert notes.ran == []
    assert not theirs.exists()


def sweep(folder: Path, text: str = "hydra: {}\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").write_text(text)
    return folder


def test_resume_names_a_sweep_by_its_folder_or_as_latest(cwd) -> None:
    old = sweep(cwd / "multirun/b")
    new = sweep(cwd / "multirun/a")
    (cwd / "multirun/latest").symlink_to("a")
    assert sweep_folder("latest") == sweep_folder("multirun/latest") == new
    assert sweep_folder("multirun/b") == old
    assert is_sweep("multirun/b")
    assert not is_sweep("multirun")
    assert not is_sweep("latest")
    for wrong in ("multirun", "nowhere"):
        with pytest.raises(SpecError):
            sweep_folder(wrong)


def test_a_file_that_hydra_did_not_write_is_refused(cwd) -> None:
    wrong = ("hydra: [1]\n", "hydra: {overrides: 3}\n", "[", "a: 1\n", "x: !!python/name:os\n")
    for number, text in enumerate(wrong):
        folder = sweep(cwd / str(number), text)
        with pytest.raises(SpecError, match=r"multirun\.yaml"):
            sweep_command(folder, None, (), (), has_folder=False)


def test_only_resume_sets_the_directory(cwd) -> None:
    folder = cwd / "it's ${a}"
    _, overrides = sweep_command(folder, None, (), ["seed=1"], has_folder=False)
    assert overrides == ["seed=1", f"hydra.sweep.dir='{cwd}/it\\'s \\${{a}}'"]
    with pytest.raises(SpecError, match="leave it out"):
        sweep_command(folder, None, (), ["+hydra.sweep.dir=b"], has_folder=False)
