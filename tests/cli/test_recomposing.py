"""The configuration of a job equals what Hydra composes from its files and overrides."""

from __future__ import annotations

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import OmegaConf

from hookrun.cli.hydra import conf_dir, opened
from hookrun.cli.loader import Loader
from hookrun.interpolations import guarded

JOBS = [
    ["experiment=clip_fc", "seed=3", "train.epochs=1", "train.optimizer.lr=1e-4"],
    ["experiment=clip_fc", "train.epochs=7", "train=quick", "hydra.sweep.subdir=z", "seed=3"],
    ["+hooks.x={select: fc, hook: forward, action: clamp, min: 0}", "hooks.x.min=2", "seed=4"],
    ["hooks=none", "experiment=clip_fc", "seed=4", "tags=[a,b]"],
    ["experiment=clip_fc", "~hooks.clip_fc", "seed=5"],
    ["experiment=clip_fc", "hooks.clip_fc={select: fc, hook: grad, action: clamp, min: -1}", "seed=5"],
    ["experiment=clip_fc", "hooks.clip_fc.max=5", "hooks={clip_fc: {max: 0.3}}", "seed=6"],
    ["experiment=clip_fc", "hooks={clip_fc: {max: 0.3}}", "hooks.clip_fc.max=5", "seed=6"],
    ["experiment=clip_fc", "seed=${train.epochs}", "train.optimizer={name: SGD, lr: 1}"],
]


def test_a_job_of_a_sweep_equals_hydra_s_composition() -> None:
    with opened(conf_dir()) as app:
        sweep = app.compose_config("config", ["experiment=clip_fc", "seed=1,2"], RunMode.MULTIRUN)
        loader = app.config_loader
        assert isinstance(loader, Loader)
        for overrides in JOBS:
            with guarded():
                expected = OmegaConf.to_yaml(ConfigLoaderImpl.load_sweep_config(loader, sweep, overrides))
            for _ in range(2):
                found = loader.load_sweep_config(sweep, overrides)
                assert OmegaConf.to_yaml(found) == expected
                found.seed = 77  # a change by one job does not affect the next
        for wrong in (["sed=3"], ["train.epoch=3"], ["train=nothing", "seed=2"]):
            with pytest.raises(ConfigCompositionException):
                loader.load_sweep_config(sweep, wrong)
