"""Sweeps that go on: what is over stays, what was cut off goes on in its directory, and what is missing runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import hookrun.cli.sweep  # noqa: F401  # it keeps what it imports: before anything is replaced
from hookrun.cli import main
from hookrun.store.lock import sole_writer
from hookrun.tasks import Checked

Conf = Callable[..., str]


@pytest.fixture(autouse=True)
def earlier(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sweeps of these tests are; their jobs are not checked before, and have no pages."""
    monkeypatch.setattr("hookrun.cli.jobs.make_page", lambda _: None)
    monkeypatch.setattr("hookrun.tasks.check_jobs", lambda *_, **__: Checked({}, 0, 0))
    return cwd / "mine"


def swept(*typed: str) -> int:
    return main(["-m", *typed, "hydra.sweep.dir=mine"])


def jobs(folder: Path) -> dict[str, int]:
    """Directory -> seed of every job."""
    found = folder.glob("*/.hydra/config.yaml")
    return {file.parents[1].name: OmegaConf.load(file).seed for file in sorted(found)}


def test_what_is_over_is_not_run_again_and_the_rest_goes_on(pages, notes, earlier: Path, capsys) -> None:
    assert swept("seed=5,1,3,130,7") == 130
    before = (earlier / "0/.hydra/hydra.yaml").stat().st_mtime_ns
    notes.ran.clear()
    notes.mended = True
    assert main(["-m", "seed=5,1,3,130,7", "resume=mine"]) == 3, "the stopped job is over and counts"
    assert notes.ran == [(1, earlier / "1"), (130, earlier / "3"), (7, earlier / "4")]
    assert notes.went_on == [earlier / "1", earlier / "3"]
    assert (earlier / "0/.hydra/hydra.yaml").stat().st_mtime_ns == before
    out = capsys.readouterr().out
    assert "sweep: 4 of 5 jobs done, 2 of them before" in out and "report:" in out
    assert len((earlier / "sweep.csv").read_text().splitlines()) == 6
    notes.ran.clear()
    assert main(["-m", "+resume=mine"]) == 3 and notes.ran == [], "alone it is the sweep that is stored"


def test_a_wider_sweep_gives_new_numbers_and_a_changed_job_is_a_new_one(notes, earlier: Path, capsys) -> None:
    assert swept("seed=5,6") == 0
    assert main(["-m", "seed=8,5,6,9", "resume=mine"]) == 0
    assert jobs(earlier) == {"0": 5, "1": 6, "2": 8, "3": 9}
    notes.ran.clear()
    assert main(["-m", "resume=latest"]) == 2, "it lies elsewhere"
    assert main(["resume=mine"]) == 0 and notes.ran == [], (
        "the wider one is stored now; a sweep without -m as well"
    )
    assert main(["-m", "seed=5,6", "train.epochs=2", "resume=mine"]) == 0
    assert [run_dir.name for _, run_dir in notes.ran] == ["4", "5"]
    assert "4 more in it, of other configurations" in capsys.readouterr().out


def test_jobs_that_were_not_begun_keep_their_numbers_and_what_depends_on_them(notes, earlier: Path) -> None:
    sweep = ["train.epochs=5,6,7,8", "seed='${hydra:job.num}0'", "tags=['${hydra:runtime.output_dir}']"]
    assert swept(*sweep) == 0
    for number in (1, 3):
        for file in sorted((earlier / str(number)).rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
    notes.ran.clear()
    assert main(["-m", *sweep, "resume=mine"]) == 0
    assert notes.ran == [(10, earlier / "1"), (30, earlier / "3")]


def test_equal_jobs_are_told_apart_by_their_number(notes, earlier: Path) -> None:
    assert swept("seed=5,5,1") == 1
    notes.ran.clear()
    assert main(["-m", "seed=5,5,5,1", "resume=mine"]) == 1
    assert notes.ran == [(1, earlier / "2"), (5, earlier / "3")]


def test_the_newest_sweep_and_the_folder_of_its_files_are_found(conf: Conf, notes) -> None:
    folder = conf(**{"experiment/mine": "# @package _global_\ntrain: {epochs: 4}\n"})
    assert main(["-m", "--config-dir", folder, "experiment=mine", "seed=5,1"]) == 1
    notes.ran.clear()
    assert main(["-m", "resume=latest", "hydra.sweeper.max_batch_size=1"]) == 1
    ((seed, _),) = notes.ran
    assert (seed, notes.prepared[-1][0].settings.train.epochs) == (1, 4)


def test_what_cannot_go_on_is_refused(notes, cwd: Path, earlier: Path, capsys) -> None:
    assert swept("seed=5,1") == 1
    os.mkdir("empty")
    for typed, said in {
        "resume=nowhere": "there is no directory",
        "resume=empty": "it has no multirun.yaml",
        "resume=mine/0": f"is the directory of a run, not of a sweep\n      name the sweep's: resume={earlier}",
        "resume=true": "found True, expected a directory",
        "resume=latest": "there is no sweep in",
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
    (earlier / "1/job.json").unlink()
    assert main(["-m", "resume=mine"]) == 2
    assert "does not say which job it is" in capsys.readouterr().err and notes.ran == []


def test_a_stored_sweep_may_not_set_what_a_file_may_not(notes, earlier: Path, cwd: Path, capsys) -> None:
    assert swept("seed=5") == 0
    file = earlier / "multirun.yaml"
    stored = OmegaConf.load(file)
    for key, text, said in (
        ("task", "+trust=[os]", "trust"),
        ("task", "hydra.sweep.dir=x", "is not a key that a file may sweep over"),
        ("hydra", "hydra.searchpath=[file:///etc]", "type it as well: -m resume="),
        ("hydra", "hydra.job.env_set={A: b}", "type it as well"),
        ("hydra", "hydra/job_logging=default", "is not for a file to choose"),
        ("hydra", "hydra.sweep.subdir=../out", "type it as well"),
        ("hydra", "+hydra.callbacks.x={_target_: os.system}", "type it as well"),
    ):
        changed = stored.copy()
        changed.hydra = {"overrides": {**stored.hydra.overrides, key: [text]}}
        OmegaConf.save(changed, file)
        assert main(["-m", "resume=mine"]) == 2, text
        assert said in capsys.readouterr().err, text
    file.write_text("hydra: [1, 2]\n")
    assert main(["-m", "resume=mine"]) == 2
    assert "is not what Hydra writes" in capsys.readouterr().err
    assert [seed for seed, _ in notes.ran] == [5] and not (cwd / "out").exists()


def test_fail_fast_stops_at_the_first_failed_job_and_the_sweep_goes_on_later(
    pages, notes, earlier: Path, capsys
) -> None:
    assert swept("seed=5,1,6,7", "fail_fast=true") == 1
    assert [seed for seed, _ in notes.ran] == [5, 1]
    assert "stopped at the first failed job (fail_fast): job 1" in capsys.readouterr().out
    assert json.loads((earlier / "sweep.json").read_text()) == {"fail_fast": True, "stopped_by": "1"}
    page = (earlier / "report.html").read_text()
    assert "Stopped at the first failed job" in page and "2 jobs not started" in " ".join(page.split())
    assert swept("resume=mine", "fail_fast=true") == 2, "the directory was typed too"
    notes.ran.clear()
    notes.mended = True
    assert main(["-m", "resume=mine", "+fail_fast=true"]) == 0
    assert [seed for seed, _ in notes.ran] == [1, 6, 7]
    assert not (earlier / "sweep.json").exists() and not (earlier / ".stop").exists()
    assert "Stopped at" not in (earlier / "report.html").read_text()


def contents(place: Path) -> dict[Path, bytes]:
    """File -> its bytes, of a file or of all in a folder."""
    return {file: file.read_bytes() for file in (place, *place.rglob("*")) if file.is_file()}


def test_no_link_in_the_directory_is_written_through(notes, earlier: Path, tmp_path: Path, capsys) -> None:
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
        assert notes.ran == [] and contents(theirs) == before, place
        link.unlink()
        theirs.rename(link)
    (earlier / "jobs/2").symlink_to(theirs)  # it leads nowhere yet
    assert main(["-m", "seed=5,1,6", *typed[1:], "resume=mine"]) == 2
    assert notes.ran == [] and not theirs.exists()
