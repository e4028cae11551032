"""The YAML text of a configuration, as `OmegaConf.to_yaml` writes it; texts that jobs have in common are cached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import Container, OmegaConf
from omegaconf._utils import get_omega_conf_dumper

_MOST = 4096
"""The most cached pieces of text."""

_MOST_CHARACTERS = 2**16
"""The most characters of a cached piece of text."""

_known = dict[tuple[int, str], str]()


def plain_of(config: Container) -> Any:
    """The plain values that `OmegaConf.to_yaml` writes; interpolations are left as they are."""
    return OmegaConf.to_container(config, resolve=False, enum_to_str=True)


def text_of(value: Any) -> str:
    """The text that `OmegaConf.to_yaml` writes for a value from `plain_of`."""
    if isinstance(value, dict) and value:
        return _of_mapping(value, 0)
    if isinstance(value, list) and value:
        lines = [_simple(each) for each in value]
        return "".join(
            f"- {line}\n" if line else _remembered([each], 0) for line, each in zip(lines, value, strict=True)
        )
    return _dumped(value)


def _of_mapping(value: Mapping[Any, Any], depth: int) -> str:
    """The lines of a mapping nested in `depth` others. Each line depends only on its key, its value and the depth."""
    parts = list[str]()
    for key, each in value.items():
        parts.append(_of_member(key, each, depth) or _remembered({key: each}, depth))
    return "".join(parts)


def _of_member(key: Any, value: Any, depth: int) -> str:
    """The lines of a key and its value, where they can be joined without PyYAML; else ``""``."""
    if isinstance(value, dict) and value:
        head = _head(key, depth)
        return head and f"{head}\n{_of_mapping(value, depth + 1)}"
    if isinstance(value, list) and value:
        lines = [_simple(each) for each in value]
        head = _head(key, depth) if all(lines) else ""
        return "\n".join([head, *(f"{'  ' * depth}- {line}" for line in lines), ""]) if head else ""
    text = _simple(value)
    head = text and _head(key, depth)
    return head and f"{head} {text}\n"


def _head(key: Any, depth: int) -> str:
    """The key with its colon, as written before a value; ``""`` for a long key, which YAML writes after ``?``."""
    stands_in = f"\n{'  ' * (depth + 1)}a: null\n"
    text = _remembered({key: {"a": None}}, depth)
    return text.removesuffix(stands_in) if text.endswith(f":{stands_in}") and text.count("\n") == 2 else ""


_PLAIN = re.compile(r"[A-Za-z/](?=[^\n]*[/=])[A-Za-z0-9_/.=,-]*")
"""Texts such as ``seed=3`` and ``/a/folder``: YAML reads them as strings, and writes them on one line unquoted."""


def _simple(value: Any) -> str:
    """The YAML of an integer or of a text that matches `_PLAIN`; ``""`` for other values, which PyYAML writes."""
    if type(value) is int:
        return str(value)
    return value if type(value) is str and _PLAIN.fullmatch(value) else ""


def _remembered(value: Any, depth: int) -> str:
    """The lines of a list or a mapping with one member, nested in `depth` mappings; cached.

    The cache key is the `repr`, which differs wherever the YAML text differs, such as for 1 and True.
    """
    key = depth, repr(value)
    text = _known.get(key)
    if text is None:
        text = _inside(value, depth)
        if len(_known) >= _MOST:
            _known.clear()
        if len(text) <= _MOST_CHARACTERS:
            _known[key] = text
    return text


def _inside(value: Any, depth: int) -> str:
    for _ in range(depth):
        value = {"a": value}
    lines = _dumped(value).split("\n", depth)  # each outer mapping takes one line
    return lines[-1]


def _dumped(value: Any) -> str:
    return str(
        yaml.dump(
            value,
            default_flow_style=False,
            allow_unicode=True,
            sort_keys=False,
            Dumper=get_omega_conf_dumper(),
        )
    )
