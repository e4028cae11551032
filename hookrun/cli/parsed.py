"""Config files as plain values: each text is parsed once in a process, those that are installed by libyaml."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from hookrun.yaml_files import plain

_MOST = 2**16
"""Characters of a text that is remembered."""


def content_of(text: str, *, installed: bool) -> DictConfig:
    """What `OmegaConf.load` gives for the text, and raises for a broken one.

    installed: the file came with hookrun, Hydra or a plugin: libyaml reads those as PyYAML does, in a tenth of the
               time. For a file of the user's own it is PyYAML, whose errors are the clearer ones
    """
    found = _remembered(text, installed) if len(text) <= _MOST else _plain(text, installed)
    return cast(DictConfig, OmegaConf.create() if found is None else OmegaConf.create(found))


def _plain(text: str, installed: bool) -> Any:
    found = plain(text, fast=installed)
    if found is not None and not isinstance(found, list | dict | str):
        raise OSError(f"Invalid loaded object type: {type(found).__name__}")  # as OmegaConf says it
    return found


_remembered = lru_cache(maxsize=512)(_plain)
