"""The jobs in a sweep's directory, each identified by the hash of its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hookrun.errors import SpecError
from hookrun.store.files import make_folder, write_json
from hookrun.store.run_dir import RunDir
from hookrun.sweeps.job_directories import JobDirectories, KnownJob, refuse_links

SAME, OTHER = "a" * 64, "b" * 64


def job(folder: Path, name: str, config: str, status: str, code: int | None = None) -> None:
    run = RunDir.create(folder / name)
    write_json(folder / name / "job.json", {"config": config})
    run.set_status(status, *([] if code is None else ["", code]))
    run.close()


def test_each_job_is_taken_once_and_equal_hashes_in_order(tmp_path: Path) -> None:
    make_folder(tmp_path)
    for name, config, status, code in (
        ("0", SAME, "done", None),
        ("1", OTHER, "stopped", 3),
        ("2", OTHER, "failed", 1),
        ("10", SAME, "interrupted", None),
    ):
        job(tmp_path, name, config, status, code)
    jobs = JobDirectories(tmp_path)
    assert jobs.begun == {"0", "1", "2", "10"} and jobs.left == 4
    assert [jobs.take(SAME) for _ in range(3)] == [KnownJob("0", 0), KnownJob("10", None), None]
    assert jobs.take(OTHER) == KnownJob("1", 3) and jobs.left == 1


def test_a_job_without_a_readable_hash_is_refused(tmp_path: Path) -> None:
    job(tmp_path, "0", SAME, "done")
    for content, said in (("[]", "job.json"), (json.dumps({"config": "x"}), "job.json"), (None, "which job")):
        (tmp_path / "0/job.json").unlink()
        if content is not None:
            (tmp_path / "0/job.json").write_text(content)
        with pytest.raises(SpecError, match=said):
            JobDirectories(tmp_path)


def test_a_link_in_the_directory_of_a_job_is_refused(tmp_path: Path) -> None:
    sweep, theirs = tmp_path / "sweep", tmp_path / "theirs"
    (sweep / "a/0").mkdir(parents=True)
    theirs.mkdir()
    refuse_links(sweep, "a/0")
    (sweep / "a/0/.hydra").symlink_to(theirs)
    (sweep / "b").symlink_to(theirs)
    for name in ("a/0", "b/0"):
        with pytest.raises(SpecError, match="is a link"):
            refuse_links(sweep, name)
