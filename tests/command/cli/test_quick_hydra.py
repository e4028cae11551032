"""The caches of `quick_hydra` give the same results as plain Hydra."""

from __future__ import annotations

from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf
from quick_hydra import plain_hydra

from hookrun.cli import main

BESIDE_A_FOLDER = [
    ["--cfg", "all", "experiment=mine", "own=cnn", "model=mlp", "train.epochs=4", "hydra/launcher=basic"],
    ["--cfg", "all", "experiment=mine", "model=mlp", "hooks=none", "~hooks.clip_fc"],
    ["experiment=mine", "model=mlp", "train.epochs=-1"],
]


def test_a_second_composition_equals_the_first(conf, monkeypatch) -> None:
    beside = ["--config-dir", conf(**OWN)]
    for argv in [*LINES, *([*beside, *each] for each in BESIDE_A_FOLDER)]:
        with plain_hydra():
            wanted = composed(argv, monkeypatch)
        assert wanted, argv
        for _ in range(2):
            assert composed(argv, monkeypatch) == wanted, argv


def test_a_user_s_file_is_read_each_time(conf, capsys) -> None:
    for seed in (1, 2):
        folder = conf(**{"experiment/mine": f"# @package _global_\nseed: {seed}\n"})
        assert main(["--config-dir", folder, "experiment=mine", "--cfg", "job"]) == 0
        assert f"seed: {seed}\n" in capsys.readouterr().out


LINES = [
    ["--cfg", "all"],
    ["--cfg", "all", "experiment=clip_fc", "train.epochs=3", "+model.args.x='two words, a comma'"],
    [
        "--cfg",
        "all",
        "experiment=clip_fc",
        "hooks=none",
        "+hooks.h={select: fc, hook: forward, action: stats, of: [mean, std]}",
    ],
    ["-m", "train.epochs=choice(-1,-2)", "seed=1,2"],  # refused after composing
    ["--cfg", "hydra", "experiment=lm/head_ablation", "compute=cpu", "hydra.job.name=mine"],
    ["--cfg", "all", "hooks=[clamp,capture]", "model=mlp", "~objective"],
]


def composed(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each configuration that Hydra composes for a command line."""
    found: list[Any] = []
    load = ConfigLoaderImpl.load_configuration

    def noted(self: ConfigLoaderImpl, *args: Any, **options: Any) -> Any:
        cfg = load(self, *args, **options)
        found.append(OmegaConf.to_yaml(cfg))
        return cfg

    with monkeypatch.context() as patch:
        patch.setattr(ConfigLoaderImpl, "load_configuration", noted)
        main(argv)
    return found


OWN = {
    "experiment/mine": """# @package _global_
defaults: [clip_fc, /own: mlp, /own@too: "${own}", override /train: quick]
train: {epochs: 2, optimizer: {lr: 3}}
hydra: {mode: MULTIRUN, sweeper: {params: {seed: "1,2"}}}
""",
    "own/mlp": "of: mlp\n",
    "own/cnn": "of: cnn\n",
}
