"""Between a sweeper and its launcher: which jobs run, under which numbers, and what is kept of how they ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from hookrun.cli.hydra import BASIC_LAUNCHER, numbered, parse_override
from hookrun.cli.job_directories import JobDirectories
from hookrun.cli.jobs import NOT_STARTED
from hookrun.cli.launching import Launching, SweepStopped
from hookrun.errors import CheckFailed, SpecError
from hookrun.spec.objective import Goal
from hookrun.store.files import write_json
from hookrun.store.run_dir import RunDir

SWEPT = ["seed=1,2,3", "+hooks.x={}", "train.epochs=5"]
OTHER = "another.Launcher"


class Sweep:
    """A sweep in `folder`; its launcher takes notes, and a job ends as the table says of its seed, else with 0."""

    def __init__(self, folder: Path, ends: Mapping[str, Any] | None = None) -> None:
        self.folder, self.ends, self.subdir = folder, ends or {}, "${hydra.job.num}"
        self.calls = list[tuple[int, list[list[str]]]]()

    def swept(self, cfg: DictConfig) -> list[Any]:
        return [parse_override(text) for text in SWEPT]

    def job_config(self, cfg: DictConfig, overrides: Sequence[str], number: int) -> DictConfig:
        users = dict(text.split("=", 1) for text in overrides)
        hydra = {"job": {"num": number, "id": str(number)}, "sweep": {"subdir": self.subdir}}
        return numbered(OmegaConf.create({**users, "hydra": hydra}), number)

    def of(self, overrides: Sequence[str]) -> str:
        return hashlib.sha256(" ".join(sorted(overrides)).encode()).hexdigest()

    def launch(self, job_overrides: Sequence[list[str]], first: int) -> list[JobReturn]:
        self.calls.append((first, [list(each) for each in job_overrides]))
        return [self._ended(first + place, each) for place, each in enumerate(job_overrides)]

    def _ended(self, number: int, overrides: list[str]) -> JobReturn:
        name = next((text for text in overrides if text.startswith("hydra.sweep.subdir=")), f"={number}")
        run_dir = str(self.folder / name.partition("=")[2].strip("'"))
        value = self.ends.get(next(text[5:] for text in overrides if text.startswith("seed=")), 0)
        job = JobReturn(hydra_cfg=OmegaConf.create({"hydra": {"runtime": {"output_dir": run_dir}}}))
        job.status = JobStatus.FAILED if isinstance(value, Exception) else JobStatus.COMPLETED
        job.return_value = value
        return job

    def over(self, name: str, seed: int, status: str, code: int | None = None) -> None:
        """A job that was started before."""
        run = RunDir.create(self.folder / name)
        write_json(run.path / "job.json", {"config": self.of([f"seed={seed}"])})
        run.set_status(status, *([] if code is None else ["", code]))
        run.close()

    def launching(self, *, go_on: bool = False, launcher: str = BASIC_LAUNCHER, **options: Any) -> Launching:
        cfg = OmegaConf.create({"hydra": {"launcher": {"_target_": launcher}}})
        known = JobDirectories(self.folder) if go_on else None
        app: Any = self
        usual: dict[str, Any] = {"goal": None, "fail_fast": False}
        return Launching(app, cfg, self.folder, known, app, **{**usual, **options})


def seeds(*each: int) -> list[list[str]]:
    return [[f"seed={seed}"] for seed in each]


def values(found: Sequence[JobReturn]) -> list[Any]:
    return [each._return_value for each in found]


def test_jobs_run_at_once_in_the_typed_order_after_those_that_are_added(tmp_path: Path) -> None:
    failed = CheckFailed("found inf")
    sweep = Sweep(tmp_path, {"2": 3, "3": failed, "4": NOT_STARTED})
    launching = sweep.launching(added=[["seed=0", "hooks=none"]])
    found = launching.launched(sweep, [["train.epochs=5", "+hooks.x.a=1", "+hooks.x={}", "seed=2"]], 0)
    assert values(found) == [3], "the sweeper did not ask for what was added"
    found = launching.launched(sweep, seeds(3, 4), 1)
    assert values(found) == [failed, NOT_STARTED]
    of_both = [["seed=0", "hooks=none"], ["seed=2", "+hooks.x={}", "train.epochs=5", "+hooks.x.a=1"]]
    assert sweep.calls == [(0, of_both), (2, seeds(3, 4))]
    assert launching.codes == {str(tmp_path / name): code for name, code in (("0", 0), ("1", 3), ("2", 3))}
    assert (launching.left, launching.again, launching.names) == (0, 0, {})


@pytest.mark.parametrize(("launcher", "calls"), [(BASIC_LAUNCHER, [1, 1]), (OTHER, [3])])
def test_with_fail_fast_no_job_starts_after_a_failed_one(
    launcher: str, calls: list[int], tmp_path: Path
) -> None:
    sweep = Sweep(tmp_path, {"6": 1})
    launching = sweep.launching(launcher=launcher, fail_fast=True)
    with pytest.raises(SweepStopped, match=r"at the first failed job .*: job 1") as stopped:
        launching.over(sweep).launch(seeds(5, 6, 7), 0)  # type: ignore[arg-type]
    assert stopped.value.exit_code == 1
    assert [len(jobs) for _, jobs in sweep.calls] == calls
    assert launching.codes[str(tmp_path / "1")] == 1


def test_of_a_resumed_sweep_only_jobs_run_that_are_not_over_each_in_its_directory(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    for name, seed, status, code in (
        ("0", 5, "stopped", 3),
        ("1", 6, "interrupted", None),
        ("3", 9, "done", 0),
    ):
        sweep.over(name, seed, status, code)
    launching = sweep.launching(go_on=True, launcher=OTHER)
    found = launching.launched(sweep, seeds(6, 7, 5, 8), 0)
    assert values(found) == [0, 0, 3, 0]
    ((first, jobs),) = sweep.calls
    assert first == 1 and jobs == [
        ["seed=6", "hydra.sweep.subdir='1'"],
        ["seed=7", "hydra.sweep.subdir='2'"],
        ["seed=8", "hydra.sweep.subdir='4'"],
    ]
    assert launching.names == {0: "1", 1: "2", 2: "0", 3: "4"} and (launching.again, launching.left) == (1, 1)
    assert launching.codes == {
        str(tmp_path / name): code for name, code in (("0", 3), ("1", 0), ("2", 0), ("4", 0))
    }


def test_numbers_have_no_gaps_in_one_call_where_a_job_depends_on_its_own(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    sweep.over("1", 6, "done", 0)
    jobs = [["seed=5", "tags=[${hydra:job.num}]"], *seeds(6, 7)]
    sweep.launching(go_on=True, launcher=OTHER).launched(sweep, jobs, 0)
    assert [first for first, _ in sweep.calls] == [0, 2]


def test_a_directory_that_does_not_follow_the_number_is_refused_where_it_is_taken(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    sweep.subdir = "same"
    sweep.over("same", 6, "done", 0)
    with pytest.raises(SpecError, match="same is the directory of a job with another configuration"):
        sweep.launching(go_on=True).launched(sweep, seeds(7), 0)
    assert sweep.calls == []


def test_a_sweeper_that_chooses_by_an_objective_gets_values_of_what_is_over_and_has_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookrun.tasks.objective", lambda run_dir: 0.25)
    sweep = Sweep(tmp_path, {"5": 0.5, "7": CheckFailed("found inf")})
    sweep.over("0", 6, "done", 0)
    sweep.over("1", 8, "stopped", 3)
    launching = sweep.launching(go_on=True, goal=Goal("val/loss", "minimize", "best"))
    found = launching.launched(sweep, [["seed=5", "train.epochs=5"], *seeds(6, 7, 8)], 0)
    assert values(found)[:2] == [0.5, 0.25]
    assert [each.status for each in found] == [JobStatus.COMPLETED] * 2 + [JobStatus.FAILED] * 2
    assert launching.codes[str(tmp_path / "3")] == 0, "an objective is not an exit code"
    assert launching.codes[str(tmp_path / "1")] == 3
    lines = [json.loads(line) for line in (tmp_path / "study.jsonl").read_text().splitlines()]
    assert [(line["job"], line["params"], line["value"]) for line in lines] == [
        ("3", {"seed": "5"}, 0.5),
        ("0", {"seed": "6"}, 0.25),
        ("2", {"seed": "7"}, None),
        ("1", {"seed": "8"}, None),
    ]
