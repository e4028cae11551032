"""The launchers and the sweeper that hookrun's extras install, used as in the README."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hookrun
from hookrun.cli import main

SHORT = ["model=mlp", "train.limit_batches=1", "train.epochs=1", "compute.device=cpu", "compute.threads=1"]
CHECK = "+hooks.c={select: fc, hook: forward, action: check, max: 1}"


def statuses(sweep: Path) -> dict[str, str]:
    found = {path.parent.name: json.loads(path.read_text())["status"] for path in sweep.glob("*/status.json")}
    return dict(sorted(found.items()))


@pytest.mark.parametrize(
    ("name", "plugin", "settings"),
    [
        ("joblib", "hydra_joblib_launcher", ["hydra.launcher.n_jobs=2"]),
        ("submitit_local", "hydra_submitit_launcher", ["hydra.launcher.timeout_min=5"]),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the plugins
def test_jobs_in_other_processes_fail_fast_and_can_be_resumed(
    name: str, plugin: str, settings: list[str], cwd: Path
) -> None:
    extra = name.partition("_")[0]
    pytest.importorskip(f"hydra_plugins.{plugin}", reason=f"pip install 'hookrun[{extra}]'")
    launcher = [f"hydra/launcher={name}", *settings]
    jobs = [CHECK, "hooks.c.max=-1e9,1e9,1e8", "task=evaluate", *SHORT]
    assert main(["-m", *launcher, *jobs, "hydra.sweep.dir=mine", "fail_fast=true"]) == 3
    assert json.loads((cwd / "mine/sweep.json").read_text())["stopped_by"] == "0"
    shutil.rmtree(cwd / "mine/1", ignore_errors=True)
    assert main(["-m", "resume=mine"]) == 3
    assert statuses(cwd / "mine") == {"0": "failed", "1": "done", "2": "done"}
    kept = [hookrun.open_run(cwd / f"mine/{job}").config["hooks"]["c"]["max"] for job in range(3)]
    assert kept == [-1e9, 1e9, 1e8]


@pytest.mark.filterwarnings("ignore")  # of the plugin, which is written for an older optuna
def test_a_resumed_optuna_sweep_chooses_the_same_trials(cwd: Path, capsys) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install 'hookrun[optuna]'")
    command = [
        "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "experiment=clip_fc,add_bias", *SHORT[1:],
        "+hooks.x={select: fc, hook: forward, action: scale, factor: 1}", "hooks.x.factor=interval(0.5,2)",
    ]  # fmt: skip
    assert main([*command, "hydra.sweeper.n_trials=4", "hydra.sweep.dir=whole"]) == 0
    assert main([*command, "hydra.sweeper.n_trials=2", "hydra.sweep.dir=cut"]) == 0
    shutil.rmtree(cwd / "cut/1")
    capsys.readouterr()
    assert main(["-m", "resume=cut", "hydra.sweeper.n_trials=4"]) == 0
    assert "sweep: 4 of 4 jobs done, 1 of them before" in capsys.readouterr().out
    chosen = [
        [hookrun.open_run(cwd / f"{sweep}/{n}").config["hooks"]["x"]["factor"] for n in range(4)]
        for sweep in ("cut", "whole")
    ]
    assert chosen[0] == chosen[1]
