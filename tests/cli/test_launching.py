"""The jobs of a sweep: composed once, known by a hash, started under the right numbers, and how they ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from hookrun.cli import main
from hookrun.compose.hydra import conf_dir, numbered, opened, parse_override
from hookrun.compose.loader import Loader
from hookrun.errors import CheckFailed, SpecError
from hookrun.spec.objective import Goal
from hookrun.store.files import make_folder, write_json
from hookrun.store.run_dir import RunDir
from hookrun.sweeps import composed_jobs
from hookrun.sweeps.composed_jobs import ComposedJob, hash_of
from hookrun.sweeps.jobs import NOT_STARTED, SweepJob
from hookrun.sweeps.launching import SweepRun, SweepStopped, interrupted
from hookrun.sweeps.resumed import JobDirectories

SWEPT = ["seed=1,2,3", "+hooks.x={}", "train.epochs=5"]


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    """Hydra's state, which is restored afterwards."""
    with opened(conf_dir()):
        yield


class Sweep:
    """A sweep in `folder`; its launcher takes notes, and a job ends as the table says of its seed, else with 0."""

    def __init__(self, folder: Path, ends: Mapping[str, Any] | None = None) -> None:
        self.folder, self.ends, self.subdir = folder, ends or {}, "${hydra.job.num}"
        self.calls = list[tuple[int, list[list[str]]]]()

    def swept(self, cfg: DictConfig) -> list[Any]:
        return [parse_override(text) for text in SWEPT]

    def job_config(self, cfg: DictConfig, overrides: Sequence[str], number: int) -> DictConfig:
        users = dict(text.split("=", 1) for text in overrides)
        hydra = {"job": {"num": number, "id": str(number)}, "sweep": {"subdir": self.subdir}, "runtime": {}}
        return numbered(OmegaConf.create({**users, "hydra": hydra}), number)

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

    def began(self, name: str, seed: int, status: str, code: int | None = None) -> None:
        """A job that was started before."""
        job(self.folder, name, hash_of(OmegaConf.create({"seed": str(seed)})), status, code)

    def start(
        self,
        *,
        go_on: bool = False,
        added: Sequence[list[str]] | None = None,
        most: int = 100,
        **options: Any,
    ) -> SweepRun:
        section = {"overrides": {"hydra": []}, "job": {"config_name": "config"}}
        cfg = OmegaConf.create({"hydra": {**section, "sweeper": {"max_batch_size": most}}})
        known = JobDirectories(self.folder) if go_on else None
        app: Any = self
        jobs = None
        if added is not None:
            jobs = [ComposedJob(app, cfg, each, number=number) for number, each in enumerate(added)]
        return SweepRun(app, cfg, self.folder, SweepJob(frozenset(), **options), known, jobs)


def seeds(*each: int) -> list[list[str]]:
    return [[f"seed={seed}"] for seed in each]


def values(found: Sequence[JobReturn]) -> list[Any]:
    return [each._return_value for each in found]


def test_jobs_run_at_once_in_the_typed_order(tmp_path: Path) -> None:
    failed = CheckFailed("found inf")
    sweep = Sweep(tmp_path, {"2": 3, "3": failed, "4": NOT_STARTED})
    run = sweep.start()
    found = run.around(sweep).launch([["train.epochs=5", "+hooks.x.a=1", "+hooks.x={}", "seed=2"]], 0)
    assert values(found) == [3]
    assert values(run.around(sweep).launch(seeds(3, 4), 0)) == [failed, NOT_STARTED]
    typed = [["seed=2", "+hooks.x={}", "train.epochs=5", "+hooks.x.a=1"]]
    assert sweep.calls == [(0, typed), (1, seeds(3, 4))]
    assert run.codes == {str(tmp_path / name): code for name, code in (("0", 3), ("1", 3))}
    assert run.again == 0


def test_known_jobs_run_instead_of_what_the_sweeper_lists(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    run = sweep.start(added=seeds(0, 2, 3, 4), most=3)
    assert values(run.around(sweep).launch(seeds(2, 3, 3), 0)) == [0] * 4
    assert run.around(sweep).launch(seeds(4, 4), 3) == []
    assert sweep.calls == [(0, seeds(0, 2, 3)), (3, seeds(4))], "0 was added, and 3 and 4 are not repeated"


def test_with_fail_fast_no_job_starts_after_a_failed_one(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, {"6": 1})
    run = sweep.start(stop=tmp_path / ".stop")
    with pytest.raises(SweepStopped, match=r"at the first failed job .*: job 1") as stopped:
        run.around(sweep).launch(seeds(5, 6, 7), 0)
    assert stopped.value.exit_code == 1
    assert [len(jobs) for _, jobs in sweep.calls] == [3]
    assert run.codes[str(tmp_path / "1")] == 1


def test_of_a_resumed_sweep_only_unfinished_jobs_run(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    sweep.began("0", 5, "stopped", 3)
    sweep.began("1", 6, "interrupted")
    sweep.began("3", 9, "done", 0)
    run = sweep.start(go_on=True)
    found = run.around(sweep).launch(seeds(6, 7, 5, 8), 0)
    assert values(found) == [0, 0, 3, 0]
    ((first, jobs),) = sweep.calls
    expected = [[f"seed={seed}", f"hydra.sweep.subdir='{name}'"] for seed, name in ((6, 1), (7, 2), (8, 4))]
    assert first == 1 and jobs == expected
    assert run.again == 1
    assert run.known is not None and run.known.left == 1
    assert run.codes == {str(tmp_path / name): 3 if name == "0" else 0 for name in "0124"}


def test_numbers_have_no_gaps_in_one_call_where_a_job_depends_on_its_own(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    sweep.began("1", 6, "done", 0)
    jobs = [["seed=5", "tags=[${hydra:job.num}]"], *seeds(6, 7)]
    sweep.start(go_on=True).around(sweep).launch(jobs, 0)
    assert [first for first, _ in sweep.calls] == [0, 2]


def test_a_directory_that_does_not_follow_the_number_is_refused_where_it_is_taken(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    sweep.subdir = "same"
    sweep.began("same", 6, "done", 0)
    with pytest.raises(SpecError, match="same is the directory of a job with another configuration"):
        sweep.start(go_on=True).around(sweep).launch(seeds(7), 0)
    assert sweep.calls == []


def test_a_sweeper_with_an_objective_gets_finished_values(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hookrun.tasks.objective", lambda run_dir: 0.25)
    sweep = Sweep(tmp_path, {"5": 0.5, "7": CheckFailed("found inf")})
    sweep.began("0", 6, "done", 0)
    sweep.began("1", 8, "stopped", 3)
    run = sweep.start(go_on=True, goal=Goal("val/loss", "minimize", "best"))
    found = run.around(sweep).launch([["seed=5", "train.epochs=5"], *seeds(6, 7, 8)], 0)
    assert values(found)[:2] == [0.5, 0.25]
    assert [each.status for each in found] == [JobStatus.COMPLETED] * 2 + [JobStatus.FAILED] * 2
    assert run.codes[str(tmp_path / "3")] == 0, "an objective is not an exit code"
    assert run.codes[str(tmp_path / "1")] == 3


JOBS = [[f"seed={seed}", "train.epochs=3"] for seed in (5, 6, 7, 8)]


def test_the_message_has_the_statuses_of_jobs_and_names_those_not_started(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    assert interrupted(KeyboardInterrupt(), sweep, []) == f"sweep: interrupted: no job started, in {sweep}"
    (sweep).mkdir()
    (sweep / "multirun.yaml").touch()
    job(sweep, "0", SAME, "done")
    job(sweep, "2", SAME, "interrupted")
    jobs = [started(number, each, sweep / str(number)) for number, each in enumerate(JOBS)]
    said = interrupted(KeyboardInterrupt("by SIGTERM"), sweep, jobs)
    first, second = said.splitlines()
    assert first.startswith("sweep: by SIGTERM: ") and first.endswith(f", in {sweep}")
    assert "1 done" in first and "1 interrupted" in first and "2 not started" in first
    assert second == "  not started: #1 (seed=6), #3 (seed=8)", "what all jobs share is not repeated"
    jobs[3].exit_code = 0
    assert interrupted(KeyboardInterrupt(), sweep, jobs).endswith("not started: #1 (seed=6)"), "3 was over"


def started(number: int, overrides: list[str], run_dir: Path) -> ComposedJob:
    app: Any = None
    return ComposedJob(app, OmegaConf.create(), overrides, number=number, run_dir=run_dir)


SAME, OTHER = "a" * 64, "b" * 64


def job(folder: Path, name: str, config: str, status: str, code: int | None = None) -> None:
    run = RunDir.create(folder / name)
    write_json(folder / name / "job.json", {"config": config})
    run.set_status(status, *([] if code is None else ["", code]))
    run.close()


def test_each_job_is_taken_once_and_equal_hashes_in_order(tmp_path: Path) -> None:
    make_folder(tmp_path)
    job(tmp_path, "0", SAME, "done")
    job(tmp_path, "1", OTHER, "stopped", 3)
    job(tmp_path, "2", OTHER, "failed", 1)
    job(tmp_path, "10", SAME, "interrupted")
    known = JobDirectories(tmp_path)
    assert known.found.keys() == {"0", "1", "2", "10"} and known.left == 4
    app: Any = Sweep(tmp_path)
    cfg = app.job_config(OmegaConf.create(), [], 0)
    jobs = [ComposedJob(app, cfg, [], cfg, config) for config in (SAME, SAME, SAME, OTHER)]
    known.place(jobs)
    placed = [(each.name, each.number, each.exit_code) for each in jobs]
    assert placed == [("0", 0, 0), ("10", 10, None), ("3", 3, None), ("1", 1, 3)] and known.left == 1


def test_a_job_without_a_readable_hash_is_refused(tmp_path: Path) -> None:
    job(tmp_path, "0", SAME, "done")
    for content, said in (("[]", "job.json"), (json.dumps({"config": "x"}), "job.json"), (None, "which job")):
        (tmp_path / "0/job.json").unlink()
        if content is not None:
            (tmp_path / "0/job.json").write_text(content)
        with pytest.raises(SpecError, match=said):
            JobDirectories(tmp_path)


def test_the_hash_is_of_what_is_written_in_any_order() -> None:
    def hashed(**users: object) -> str:
        return hash_of(OmegaConf.create(users))

    assert hashed(a=1, b=2) == hashed(b=2, a=1) != hashed(a=1, b=3)
    assert hashed(a=1, hooked=True) == hashed(a=1) != hashed(a=1, hooked=False)
    assert hashed(a="${hydra:job.num}", hydra={"job": 3}) == hashed(a="${hydra:job.num}", hydra={"job": 4})


@pytest.mark.parametrize("kept", [1_000, 1])
def test_each_job_is_composed_once(kept: int, notes, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = list[Any]()
    load = Loader.load_sweep_config

    def noted(self: Loader, master: Any, overrides: list[str]) -> Any:
        composed.append(overrides[-1])
        return load(self, master, overrides)

    monkeypatch.setattr(Loader, "load_sweep_config", noted)
    monkeypatch.setattr(composed_jobs, "MOST_KEPT", kept)
    assert main(["-m", "experiment=clip_fc", "seed=5,6,7"]) == 0
    again = [] if kept > 2 else ["seed=6", "seed=7"] * 2  # to validate it, and to run it
    assert sorted(composed) == sorted(["seed=5", "seed=6", "seed=7", *again])
    assert [seed for seed, _ in notes.ran] == [5, 6, 7]
