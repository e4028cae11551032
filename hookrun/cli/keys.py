"""Overrides of keys that are not there: all of them at once, each with the nearest key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import OmegaConf

from hookrun.cli.hydra_core import App
from hookrun.errors import Problem, nearest

# Where a person may add keys of their own.
_OPEN = ("hooks.", "model.args", "data.args", "data.transforms", "data.train_transforms")
_CLASSES = re.compile(r"train\.(optimizer|scheduler)\.")  # and the arguments of its class
_UNKNOWN = re.compile(r"Could not override '.*'\.\s+To append to your config use \+(.*)", re.DOTALL)


def unknown_keys(app: App, config_name: str, overrides: list[str], mode: RunMode) -> list[Problem]:
    """A problem for each override of a key that the rest of the command line does not compose."""
    unknown, keys = _without_unknown(app, config_name, overrides, mode)
    return [_unknown_key(text, key, keys, mode) for text, key in unknown.items()]


def undeletable_key(app: App, config_name: str, overrides: list[str], mode: RunMode, key: str) -> Problem:
    """The problem of ``~key`` where there is no such key."""
    others = [text for text in overrides if text.removeprefix("~").partition("=")[0] != key]
    _, keys = _without_unknown(app, config_name, others, mode)
    return Problem(f"~{key}", "there is no such key", _near(key, keys))


def _without_unknown(
    app: App, config_name: str, overrides: list[str], mode: RunMode
) -> tuple[dict[str, str], dict[str, None]]:
    """The overrides of unknown keys with the key, and the keys that the other overrides compose."""
    rest, unknown = list(overrides), dict[str, str]()
    groups = dict.fromkeys(app.config_loader.list_groups(""))
    while True:
        try:
            composed = OmegaConf.to_container(app.compose_config(config_name, rest, mode))
            return unknown, groups | dict.fromkeys(_paths(composed))
        except ConfigCompositionException as error:
            found = _UNKNOWN.fullmatch(str(error))
            if found is None or found[1] not in rest:  # another mistake, which shows when this one is gone
                return unknown, groups
            rest.remove(found[1])
            key = found[1].partition("=")[0]
            inside = str(
                getattr(error.__cause__, "full_key", "")
            )  # `key={…}` with an unknown key in the braces
            unknown[found[1]] = inside if inside.startswith(f"{key}.") else key


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.")


def _unknown_key(text: str, key: str, keys: Mapping[str, None], mode: RunMode) -> Problem:
    hints = [near] if (near := _near(key, keys)) else []
    if key.startswith(_OPEN) or _CLASSES.match(key):
        hints.append(f"to add it: +{text}")
    if mode is RunMode.MULTIRUN:
        hints.append(f"where only a swept experiment has it: ++{text}")
    return Problem(key, "there is no such key", "; ".join(hints))


def _near(key: str, keys: Mapping[str, None]) -> str:
    """The nearest of `keys`: those that end in `key`, else those that differ in the one part that is wrong."""
    endings = [path for path in keys if path.endswith(f".{key}") and not path.startswith("hydra.")]
    if endings:
        return f"did you mean {' or '.join(repr(path) for path in endings[:3])}?"
    parts = key.split(".")
    known = next(n for n in range(len(parts)) if n + 1 == len(parts) or ".".join(parts[: n + 1]) not in keys)
    above = ".".join(parts[:known])
    siblings = {path.rpartition(".")[2]: path for path in keys if path.rpartition(".")[0] == above}
    near = nearest(parts[known], siblings)
    if not near.startswith("did you mean"):
        return f"{above or 'the root'} holds {', '.join(siblings) or 'no keys'}"
    whole = [".".join([path, *parts[known + 1 :]]) for name, path in siblings.items() if repr(name) in near]
    found = [path for path in whole if path in keys] or whole
    return f"did you mean {' or '.join(repr(path) for path in found)}?"
