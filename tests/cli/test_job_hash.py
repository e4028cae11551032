"""The hash that identifies a job of a sweep: of its resolved configuration, without its number and directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hookrun.cli.hydra import conf_dir, opened
from hookrun.cli.job_hash import job_record, read_job, record_of, without_place, write_job


def hydra(number: int, folder: str) -> Any:
    content = {"job": {"num": number, "id": str(number)}, "runtime": {"output_dir": folder}}
    return OmegaConf.create({**content, "sweep": {"dir": folder, "subdir": str(number)}})


def test_the_hash_ignores_the_number_and_directory_of_a_job(tmp_path: Path) -> None:
    def record(seed: object, number: int = 3) -> dict[str, Any]:
        users = OmegaConf.create({"seed": seed, "vars": {"a": 5}, "tags": ["${hydra:runtime.output_dir}"]})
        return job_record(users, hydra(number, f"/sweep/{number}"))

    with opened(conf_dir()):  # makes `hydra:` resolvable
        assert record("${hydra:job.num}") == record("${hydra:job.num}", 4) == record(0)
        assert record("${vars.a}") == record(5) != record(6)
    write_job(tmp_path, record(5))
    assert read_job(tmp_path) == record(5)["config"]
    for users, is_its_own in (({"seed": 1}, True), ({"seed": "${hydra:job.num}"}, False)):
        with opened(conf_dir()):
            found = without_place(OmegaConf.create(users), hydra(3, "/a"))
        assert found[1] is is_its_own


def test_jobs_that_differ_only_in_hooks_have_the_same_hash_without_hooks() -> None:
    one = record_of({"seed": 1, "hooks": {"a": {}}, "tags": ["x"]})
    other = record_of({"seed": 1, "hooks": {}, "vars": {"x": 2}})
    assert one["has_hooks"] and not other["has_hooks"]
    assert one["config"] != other["config"] and one["without_hooks"] == other["without_hooks"]
    assert record_of({"seed": 2})["without_hooks"] != one["without_hooks"]
    assert record_of({"a": 1, "b": 2}) == record_of({"b": 2, "a": 1}), "in whatever order"
