"""The configuration of a job is what Hydra composes from its files and overrides, however it was come by."""

from __future__ import annotations

import copy
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from hookrun.cli.config_copies import copied, users_part
from hookrun.cli.hydra import conf_dir, opened
from hookrun.cli.loader import Loader
from hookrun.cli.parsed import content_of
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


def test_a_job_of_a_sweep_is_as_hydra_composes_it() -> None:
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
                found.seed = 77  # a change of one job is not seen by the next
        for wrong in (["sed=3"], ["train.epoch=3"], ["train=nothing", "seed=2"]):
            with pytest.raises(ConfigCompositionException):
                loader.load_sweep_config(sweep, wrong)


def test_files_that_are_installed_are_read_as_omegaconf_reads_them() -> None:
    files = [*conf_dir().rglob("*.yaml"), *Path(str(resources.files("hydra"))).rglob("conf/**/*.yaml")]
    assert len(files) > 100
    for file in files:
        text = file.read_text(encoding="utf-8")
        expected = OmegaConf.load(file)
        for _ in range(2):
            found = content_of(text, installed=True)
            assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected), file
            assert OmegaConf.to_container(found) == OmegaConf.to_container(expected)


def test_a_copy_is_what_deepcopy_gives() -> None:
    with opened(conf_dir()) as app:
        cfg = app.compose_config("config", ["experiment=clip_fc"], RunMode.RUN)
        OmegaConf.set_readonly(cfg.hydra, True)
        made, expected = copied(cfg), copy.deepcopy(cfg)
        assert _described(made) == _described(expected)
        assert OmegaConf.is_readonly(made.hydra)
        assert made.hydra._get_parent() is made
        made.seed, made.hooks.clip_fc.max = 77, 5
        assert _described(cfg) == _described(expected)
        users = users_part(cfg)
        assert "hydra" not in users
        with open_dict(expected):
            del expected["hydra"]
        assert _described(users) == _described(expected)
        assert users.hooks._get_parent() is users


def _described(node: Any) -> Any:
    """The class of each node, what is known of it, and its value, but for caches."""
    own = {key: value for key, value in vars(node).items() if key not in ("_parent", "_flags_cache")}
    content = own.get("_content")
    if isinstance(content, dict):
        own["_content"] = {key: _described(each) for key, each in content.items()}
    elif isinstance(content, list):
        own["_content"] = [_described(each) for each in content]
    return type(node), own
