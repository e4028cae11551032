"""Config files as plain values: each text is parsed once in a process, those that are installed by libyaml."""

from __future__ import annotations

from functools import cache, lru_cache
from io import StringIO
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

_MOST = 2**16
"""Characters of a text that is remembered."""


def content_of(text: str, *, installed: bool) -> DictConfig:
    """What `OmegaConf.load` gives for the text, and raises for a broken one.

    installed: the file came with hookrun, Hydra or a plugin: libyaml reads those as PyYAML does, in a tenth of the
               time. For a file of the user's own it is PyYAML, whose errors are the clearer ones
    """
    plain = _remembered(text, installed) if len(text) <= _MOST else _plain(text, installed)
    return cast(DictConfig, OmegaConf.create() if plain is None else OmegaConf.create(plain))


def _plain(text: str, installed: bool) -> Any:
    found = yaml.load(StringIO(text), Loader=_fast_loader() if installed else get_yaml_loader())
    if found is not None and not isinstance(found, list | dict | str):
        raise OSError(f"Invalid loaded object type: {type(found).__name__}")  # as OmegaConf says it
    return found


_remembered = lru_cache(maxsize=512)(_plain)


@cache
def _fast_loader() -> Any:
    """OmegaConf's loader over libyaml's parser, where PyYAML was built with it."""
    theirs = get_yaml_loader()
    if not hasattr(yaml, "CSafeLoader"):
        return theirs
    parser: Any = yaml.CSafeLoader.__mro__[1]

    class Fast(parser, theirs):  # type: ignore[misc, valid-type]
        def __init__(self, stream: Any) -> None:
            parser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Fast
