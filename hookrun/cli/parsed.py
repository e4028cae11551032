"""Config files as plain values: each text is parsed once per process, and installed files by libyaml."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from hookrun.yaml_files import plain

_MOST = 2**16
"""The most characters of a text whose content is cached."""


def content_of(text: str, *, installed: bool) -> DictConfig:
    """The content of the text, and the exceptions for broken YAML, of `OmegaConf.load`.

    installed: whether the file came with hookrun, Hydra or a plugin: libyaml reads these in a tenth of the time. A
               user's files are read by PyYAML, whose errors are clearer
    """
    found = _remembered(text, installed) if len(text) <= _MOST else _plain(text, installed)
    return cast(DictConfig, OmegaConf.create() if found is None else OmegaConf.create(found))


def _plain(text: str, installed: bool) -> Any:
    found = plain(text, fast=installed)
    if found is not None and not isinstance(found, list | dict | str):
        raise OSError(f"Invalid loaded object type: {type(found).__name__}")  # as OmegaConf says it
    return found


_remembered = lru_cache(maxsize=512)(_plain)
