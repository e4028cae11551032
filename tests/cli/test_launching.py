"""The jobs of a sweep: composed once, known by a hash, started under the right numbers, and how they ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from hookrun.cli import main
from hookrun.compose.hydra import conf_dir, numbered, opened, parse_override
from hookrun.compose.loader import Loader
from hookrun.errors import SpecError
from hookrun.store.files import write_json
from hookrun.store.run_dir import RunDir
from hookrun.sweeps import composed_jobs
from hookrun.sweeps.composed_jobs import ComposedJob, hash_of
from hookrun.sweeps.jobs import SweepJob
from hookrun.sweeps.launching import SweepRun, interrupted
from hookrun.sweeps.resumed import JobDirectories

SWEPT = ["seed=1,2,3", "+hooks.x={}", "train.epochs=5"]


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    """Hydra's state, which is restored afterwards."""
    with opened(conf_dir()):
        yield


class Sweep:
    """A sweep in `folder`, whose launcher, of other processes, takes notes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.subdir = folder, "${hydra.job.num}"
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
        cfg = OmegaConf.create({"hydra": {"runtime": {"output_dir": run_dir}}})
        return JobReturn(hydra_cfg=cfg, status=JobStatus.COMPLETED, _return_value=0)

    def began(self, name: str, seed: int, status: str, code: int | None = None) -> None:
        """A job that was started before."""
        run = RunDir.create(self.folder / name)
        write_json(run.path / "job.json", {"config": hash_of(OmegaConf.create({"seed": str(seed)}))})
        run.set_status(status, *([] if code is None else ["", code]))
        run.close()

    def start(
        self, *, go_on: bool = False, added: Sequence[list[str]] | None = None, most: int = 100
    ) -> SweepRun:
        section = {"overrides": {"hydra": []}, "job": {"config_name": "config"}}
        cfg = OmegaConf.create({"hydra": {**section, "sweeper": {"max_batch_size": most}}})
        known = JobDirectories(self.folder) if go_on else None
        app: Any = self
        jobs = None
        if added is not None:
            jobs = [ComposedJob(app, cfg, each, number=number) for number, each in enumerate(added)]
        return SweepRun(app, cfg, self.folder, SweepJob(frozenset()), known, jobs)


def seeds(*each: int) -> list[list[str]]:
    return [[f"seed={seed}"] for seed in each]


def values(found: Sequence[JobReturn]) -> list[Any]:
    return [each._return_value for each in found]


def test_known_jobs_run_instead_of_what_the_sweeper_lists(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    run = sweep.start(added=seeds(0, 2, 3, 4), most=3)
    assert values(run.around(sweep).launch(seeds(2, 3, 3), 0)) == [0] * 4
    assert run.around(sweep).launch(seeds(4, 4), 3) == []
    assert sweep.calls == [(0, seeds(0, 2, 3)), (3, seeds(4))], "0 was added, and 3 and 4 are not repeated"


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


def test_of_an_interrupted_sweep_without_any_job_that_is_told(tmp_path: Path) -> None:
    said = interrupted(KeyboardInterrupt(), tmp_path, [])
    assert said == f"sweep: interrupted: no job started, in {tmp_path}"


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
