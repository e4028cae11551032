"""An optimizing sweeper gets the direction of the objective, unless another one was set."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hookrun.cli import main
from hookrun.errors import SpecError
from hookrun.spec.objective import Goal
from hookrun.sweeps.jobs import require_goal
from hookrun.sweeps.optimizing import prepare_sweeper, set_direction
from hookrun.tasks import parse_experiment

ACCURACY = Goal("val/accuracy", "maximize")


class Default(Enum):
    """The default as the sweeper for optuna has it."""

    minimize = 1


def config(*typed: str, **sweeper: Any) -> DictConfig:
    cfg = OmegaConf.create(
        {"hydra": {"sweeper": sweeper, "overrides": {"hydra": list(typed)}}}, flags={"allow_objects": True}
    )
    OmegaConf.set_struct(cfg, True)
    return cfg


def test_an_unset_direction_is_set() -> None:
    cfg = config(direction=Default.minimize, max_failure_rate=0.0)
    assert set_direction(cfg, ACCURACY) == "objective: maximize val/accuracy (best epoch of a run)"
    assert cfg.hydra.sweeper.direction == "maximize"
    ax = config(ax_config={"experiment": {"minimize": True}})
    set_direction(ax, ACCURACY)
    assert ax.hydra.sweeper.ax_config.experiment.minimize is False


def test_a_set_direction_is_kept_and_a_contradiction_is_refused() -> None:
    set_direction(config(direction="maximize"), ACCURACY)
    for cfg in (
        config(direction="minimize"),
        config("hydra.sweeper.optim.maximize=false", optim={"maximize": False}),
    ):
        with pytest.raises(SpecError) as refused:
            set_direction(cfg, ACCURACY)
        assert "objective.direction=minimize" in str(refused.value)
        assert [each.where for each in refused.value.errors][1] == "objective.direction"
    with pytest.raises(SpecError, match="a run has one objective, val/accuracy"):
        set_direction(config(direction=["minimize", "maximize"]), ACCURACY)


def test_a_sweep_goes_on_after_failed_jobs_unless_a_rate_was_typed(tmp_path: Path) -> None:
    for typed, rate in (((), 1.0), (("hydra.sweeper.max_failure_rate=0",), 0.0)):
        cfg = config(*typed, max_failure_rate=0.0)
        prepare_sweeper(cfg, tmp_path, 7)
        assert cfg.hydra.sweeper.max_failure_rate == rate


@pytest.mark.parametrize(("given", "expected"), [(None, 7), (3, 3)])
def test_a_sampler_without_a_seed_gets_the_one_of_the_experiment(
    given: int | None, expected: int, tmp_path: Path
) -> None:
    cfg = config(sampler={"seed": given})
    prepare_sweeper(cfg, tmp_path, 2**32 + 7)
    assert cfg.hydra.sweeper.sampler.seed == expected
    stored = OmegaConf.load(tmp_path / "multirun.yaml")
    assert stored.hydra.sweeper.sampler.seed == given, "as it was typed"


def test_a_job_with_another_objective_is_refused() -> None:
    plain = {"model": {"name": "mlp"}, "data": {"name": "digits"}}
    require_goal(parse_experiment({**plain, "task": {"name": "train"}}), ACCURACY)
    with pytest.raises(
        SpecError, match=r"this job is to maximize train/accuracy .* the sweep is to maximize val/"
    ):
        require_goal(parse_experiment({**plain, "task": {"name": "evaluate", "split": "train"}}), ACCURACY)


def test_a_sweeper_without_a_known_direction_setting_gives_a_note() -> None:
    said = set_direction(config(_target_="hydra_plugins.climber.Climber"), ACCURACY)
    assert "NOTE: Climber has no setting that says which direction is better" in said


@pytest.mark.filterwarnings("ignore")  # of the plugin, which is written for an older optuna
def test_optuna_finds_the_good_learning_rate_and_continues_after_one_that_diverges(cwd: Path, capsys) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install 'hookrun[optuna]'")
    command = [
        "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.n_trials=3",
        "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=9", "hydra.sweep.dir=found", "compute.device=cpu",
        "train.optimizer.lr=1e-08,0.003,1e+30", "model=mlp", "compute.threads=1", "objective=val/loss",
    ]  # fmt: skip
    assert main([*command, "hydra.sweeper.direction=maximize"]) == 2
    assert "the objective is to minimize val/loss" in capsys.readouterr().err and not any(cwd.iterdir())
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "val/loss has no finite value" in out and "sweep: 3 of 3 jobs done" in out
    assert "best: job 0 (train.optimizer.lr=0.003), val/loss" in out
    found = OmegaConf.load(cwd / "found/optimization_results.yaml")
    assert found.best_params["train.optimizer.lr"] == 0.003
    again = [
        *command[:-1],
        "objective=val/accuracy",
        "hydra.sweep.dir=again",
        "train.optimizer.lr=1e-08,0.003",
    ]
    assert main(again) == 0
    found = OmegaConf.load(cwd / "again/optimization_results.yaml")
    assert found.best_params["train.optimizer.lr"] == 0.003 and found.best_value > 0.5, (
        "the accuracy is maximized"
    )
