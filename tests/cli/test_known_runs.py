"""The runs that an experiment names other than by their directory."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from hookrun.errors import SpecError
from hookrun.sweeps.jobs import SweepJob, keep_found_runs
from hookrun.tasks import parse_experiment


def test_an_experiment_gets_the_runs_that_were_found_when_the_sweep_began() -> None:
    needs = {"clean": {"experiment": "clean", "overrides": ["seed=1"]}}
    experiment = parse_experiment({"model": {"name": "mlp"}, "data": {"name": "digits"}, "needs": needs})
    need = experiment.settings.needs["clean"]
    sent = SweepJob(frozenset(), needs={need: "/runs/clean"}, previous="/runs/before")
    job = pickle.loads(pickle.dumps(sent))
    runs = experiment.with_runs(job.needs, job.previous).runs
    assert runs == {"clean": "/runs/clean", "previous": "/runs/before"}
    assert experiment.with_runs({need: None}).runs == {"clean": None}, "it is still to be run"
    with pytest.raises(SpecError, match=r"experiment clean seed=1 was not known when the sweep began"):
        experiment.with_runs({})


def test_the_stored_configuration_has_the_directory_that_a_name_stood_for(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"task": {"run": "outputs/latest"}, "hooks": {"a": {"run": "clean"}}})
    stored = tmp_path / ".hydra/config.yaml"
    stored.parent.mkdir()
    OmegaConf.save(cfg, stored)
    found = str(tmp_path / "found")
    runs = [
        SimpleNamespace(where="task.run", run="outputs/latest", path=found, need=False),
        SimpleNamespace(where="hooks.a.run", run="clean", path=found, need=True),
    ]
    prepared: Any = SimpleNamespace(
        runs=runs, settings=SimpleNamespace(model=SimpleNamespace(own_weights=None))
    )
    keep_found_runs(tmp_path, cfg, prepared)
    assert OmegaConf.load(stored) == {"task": {"run": found}, "hooks": {"a": {"run": "clean"}}}
    assert cfg.task.run == "outputs/latest"
