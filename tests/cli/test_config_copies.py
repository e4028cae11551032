"""Copies of configurations equal those of `copy.deepcopy`."""

from __future__ import annotations

import copy
from typing import Any

from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from hookrun.cli.config_copies import copied, users_part
from hookrun.cli.hydra import conf_dir, opened


def test_a_copy_equals_that_of_deepcopy() -> None:
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
    """The class, metadata and value of each node, except for caches."""
    own = {key: value for key, value in vars(node).items() if key not in ("_parent", "_flags_cache")}
    content = own.get("_content")
    if isinstance(content, dict):
        own["_content"] = {key: _described(each) for key, each in content.items()}
    elif isinstance(content, list):
        own["_content"] = [_described(each) for each in content]
    return type(node), own
