"""Caches for Hydra, so that the tests compose faster: the shipped configuration is read and merged once per process.

A small run spends most of its time in Hydra, which composes twice and each time reads and merges the same twenty
files, in about a thousand runs. Here the results of Hydra's pure functions are cached as pickles, so that a run cannot
change the cached objects. hookrun's own readers and checks are not cached. Cached are:

- the content of config files in the folders of hookrun and Hydra, but not of files that tests write
- the defaults list, if there are no other config folders, and the merged content of its files

tests/command/cli/test_quick_hydra.py compares it with plain Hydra.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

from hookrun.command.compose.loader import _is_ours

Original = Callable[..., Any]
_memory: dict[tuple[object, ...], bytes] = {}


def _remembered(key: tuple[object, ...], make: Callable[[], Any]) -> Any:
    if key not in _memory:
        made = make()
        with suppress(pickle.PicklingError):  # for a class that a scan for plugins has created a second time
            _memory[key] = pickle.dumps(made)
        return made
    return pickle.loads(_memory[key])


def _place(source: ConfigSource) -> tuple[str, ...]:
    return type(source).__name__, source.provider, source.path


def _load_config(original: Original) -> Original:
    @wraps(original)
    def load_config(self: ConfigRepository, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or not _is_ours(source):
            return original(self, config_path)
        key = "file", *_place(source), config_path
        return _remembered(key, lambda: original(self, config_path))

    return load_config


def _create_defaults_list(original: Original) -> Original:
    @wraps(original)
    def create_defaults_list(
        repo: IConfigRepository, config_name: str | None, overrides_list: list[Override], **how: bool
    ) -> DefaultsList:
        if not all(map(_is_ours, repo.get_sources())):
            return original(repo, config_name, overrides_list, **how)
        typed = [each for each in overrides_list if not each.is_sweep_override()]
        is_choice = [
            repo.group_exists(each.key_or_group) and not isinstance(each.value(), dict) for each in typed
        ]
        choices = [each for each, chosen in zip(typed, is_choice, strict=True) if chosen]
        lines = [each.input_line for each in choices]
        places = [_place(each) for each in repo.get_sources()]
        key = "defaults", *places, config_name, *how.items(), *lines
        made: DefaultsList = _remembered(key, lambda: original(repo, config_name, choices, **how))
        made.config_overrides = [each for each, chosen in zip(typed, is_choice, strict=True) if not chosen]
        return made

    return create_defaults_list


def _compose(original: Original) -> Original:
    @wraps(original)
    def compose(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        if not all(map(_is_ours, repo.get_sources())):
            return original(self, defaults, repo)
        places = [_place(each) for each in repo.get_sources()]
        key = "merged", *places, *(tuple(vars(each).values()) for each in defaults)
        return _remembered(key, lambda: original(self, defaults, repo))

    return compose


REMEMBERING: list[tuple[object, str, Callable[[Original], Original]]] = [
    (ConfigRepository, "load_config", _load_config),
    (config_loader_impl, "create_defaults_list", _create_defaults_list),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list", _compose),
]
"""(owner, name) of each function, with the decorator that makes the cached version."""


@contextmanager
def quick_hydra() -> Iterator[None]:
    """Use the caches inside the block."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for owner, name, remembering in REMEMBERING:
            monkeypatch.setattr(owner, name, remembering(getattr(owner, name)))
        yield


@contextmanager
def plain_hydra() -> Iterator[None]:
    """Use plain Hydra inside the block, which is inside a `quick_hydra` block."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for owner, name, _ in REMEMBERING:
            monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
        yield
