"""The text of a configuration in YAML, as `OmegaConf.to_yaml` writes it; what jobs have in common is written once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import Container, OmegaConf
from omegaconf._utils import get_omega_conf_dumper

_MOST = 4096
"""Pieces of text that are remembered."""

_MOST_CHARACTERS = 2**16
"""Of a value whose text is remembered."""

_known = dict[tuple[int, str], str]()


def plain_of(config: Container) -> Any:
    """What `OmegaConf.to_yaml` writes, as plain values; interpolations are left as they are."""
    return OmegaConf.to_container(config, resolve=False, enum_to_str=True)


def text_of(value: Any) -> str:
    """The text that `OmegaConf.to_yaml` makes of what `plain_of` gave."""
    if isinstance(value, dict) and value:
        return _of_mapping(value, 0)
    if isinstance(value, list) and value:
        return "".join(_remembered([each], 0) for each in value)
    return _dumped(value)


def _of_mapping(value: Mapping[Any, Any], depth: int) -> str:
    """The lines of a mapping inside `depth` others. A line depends on its own key and value and on the depth alone."""
    parts = list[str]()
    for key, each in value.items():
        if isinstance(each, dict) and each:
            head = _remembered({key: {"": None}}, depth)
            stands_in = f"{'  ' * (depth + 1)}'': null\n"
            if head.endswith(f":\n{stands_in}"):
                parts.append(head.removesuffix(stands_in))
                parts.append(_of_mapping(each, depth + 1))
            else:  # a long key stands alone behind a question mark
                parts.append(_remembered({key: each}, depth))
        else:
            parts.append(_remembered({key: each}, depth))
    return "".join(parts)


def _remembered(value: Any, depth: int) -> str:
    """The lines of a list or a mapping of one member, inside `depth` mappings.

    It is known by its `repr`, in which the plain values of a configuration differ where their texts do: 1 from True.
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
    lines = _dumped(value).split("\n", depth)  # those of the mappings around it are one each
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
