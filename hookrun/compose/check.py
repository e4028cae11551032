"""Why a command line does not compose: every wrong override, with the nearest existing names."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from hookrun.compose.hydra import App, IConfigRepository, options, parse_override
from hookrun.compose.overrides import quoted, several_values, split_at_spaces, unreadable
from hookrun.config.root_keys import ROOT_KEYS
from hookrun.errors import Problem, listed, nearest

# Sections in which users may add keys of their own.
_OPEN = (
    "hooks.",
    "vars.",
    "needs.",
    "model.args",
    "data.args",
    "data.transforms",
    "data.train_transforms",
    "train.optimizer.",
    "train.scheduler.",
    "train.loss.",
)
_SEARCH_PATH = "hydra.searchpath"
# Launchers and sweepers of other packages, and the extra of hookrun that installs each.
_EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "optuna": "optuna"}


@dataclass(frozen=True)
class Composition:
    """The arguments of one composition by Hydra: those of a command line, or of one job of a sweep."""

    app: App
    config_name: str
    overrides: list[str]
    mode: RunMode = RunMode.RUN

    @cached_property
    def repository(self) -> IConfigRepository:
        """The config folders that Hydra searches, including those of `hydra.searchpath`."""
        search = [text for text in self.overrides if text.lstrip("+").startswith(f"{_SEARCH_PATH}=")]
        return self.app.repository(self.config_name, search)


def wrong_overrides(asked: Composition) -> list[Problem]:
    """The problems of the overrides: syntax errors, or if there are none, wrong choices and keys.

    Empty where every override is correct. Raises what Hydra raises where the config files do not compose.
    """
    parsed, problems = _parsed(asked)
    if problems:
        return problems
    single = [each for each in parsed if not each.is_sweep_override()]
    choices = [each for each in single if _is_choice(each, asked)]
    wrong = {id(each): found for each in choices if (found := list(_wrong_choices(each, asked)))}
    groups = {each.key_or_group for each in choices if id(each) in wrong}
    problems = [problem for found in wrong.values() for problem in found]
    if not groups <= _ONE_SECTION_GROUPS:  # the keys cannot be checked without the right choice
        return problems
    single = [each for each in single if each.key_or_group.partition(".")[0] not in groups]
    keys = [each for each in single if each not in choices and each.key_or_group != _SEARCH_PATH]
    others = [
        each for each in parsed if each not in keys and each.key_or_group.partition(".")[0] not in groups
    ]
    return problems + _wrong_keys(keys, others, asked)


_ONE_SECTION_GROUPS = {"model", "data", "train", "compute", "hooks"}
"""The groups whose choice affects the keys of one section only."""


def _parsed(asked: Composition) -> tuple[list[Override], list[Problem]]:
    parsed, problems = list[Override](), list[Problem]()
    words = list(asked.overrides)
    while words:
        if problem := split_at_spaces(words, asked.app):
            problems.append(problem)
            del words[: 1 + problem.where.count(" ")]
            continue
        text = words.pop(0)
        try:
            override = parse_override(text)
        except OverrideParseException as error:
            problems.append(unreadable(error, asked.app))
            continue
        parsed.append(override)
        if not override.key_or_group:
            problems.append(Problem(text, "has no key before the `=`", "for one: experiment=clip_fc"))
        elif override.is_sweep_override() and asked.mode is RunMode.RUN:
            problems.append(several_values(override))
    return parsed, problems


def _is_choice(override: Override, asked: Composition) -> bool:
    """Whether Hydra reads the override as a choice from a config group; it merges a mapping into the keys instead."""
    return asked.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)


def _wrong_choices(override: Override, asked: Composition) -> Iterator[Problem]:
    group, value = override.key_or_group, override.value()
    if override.is_delete():
        return
    if override.is_add() and override.package is None and group in _default_choices(asked):
        yield Problem(group, "`+` adds a config group, and this one is there already", "leave the `+` out")
        return
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str):
            yield _not_a_name(override, options(asked.repository, group))
        elif not asked.repository.config_exists(f"{group}/{name}"):
            yield no_such_config(f"{group}/{name}", asked)


def _default_choices(asked: Composition) -> Collection[str]:
    return asked.app.compose_config(asked.config_name, [], asked.mode).hydra.runtime.choices  # type: ignore[no-any-return]


def _not_a_name(override: Override, names: list[str]) -> Problem:
    """The problem of a choice such as ``3`` or ``nan``, which Hydra reads as a number."""
    typed = override.get_value_string()
    fixed = quoted(f"{override.key_or_group}={typed}") if typed in names else None
    if override.value() is None and "none" in names:
        fixed = f"{override.key_or_group}=none"
        return Problem(override.key_or_group, f"found {typed!r}, expected a name", f"for none write {fixed}")
    hint = f"put the name in quotes of its own: {fixed}" if fixed else nearest(typed, names)
    return Problem(override.key_or_group, f"found {typed!r}, expected a name", hint)


def no_such_config(path: str, asked: Composition) -> Problem:
    """The problem of a config that is not in the config folders, such as ``model/resnet19``."""
    if (asked.config_name or "").startswith("/") and is_config_name(path, asked):
        hint = "give the name of a file in a config folder; --config-dir adds a folder"
        return Problem("--config-name", f"found the path {asked.config_name!r}, expected a name", hint)
    group, _, name = path.rpartition("/")
    top = path.partition("/")[0]
    if top not in ("hydra", path):  # a folder inside the group may be the wrong part
        group, name = top, path.removeprefix(f"{top}/")
    folders = asked.app.folders()
    if top == "hydra":
        hint = f"a {group.removeprefix('hydra/')} of another package must be installed first"
        if name in _EXTRAS:
            hint = f"pip install 'hookrun[{_EXTRAS[name]}]'"
        known = ", ".join(options(asked.repository, group))
        return Problem(group, f"there is no {name!r}; there are: {known}", hint)
    misnamed = next((file for folder in folders if (file := folder / f"{path}.yml").is_file()), None)
    if misnamed is not None:
        return Problem(
            str(misnamed), "configuration files end in .yaml", f"rename it to {misnamed.stem}.yaml"
        )
    roots = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    names = options(asked.repository, group) if group else roots
    near = nearest(name, names)
    alike = [each for each in names if "/" in name or "/" not in each]
    there_are = f"there are: {listed(alike, 40)}; " if near.startswith("did you mean") else ""
    hint = f"{there_are}looked in {', '.join(str(folder / group) for folder in folders)}"
    return Problem(group or "--config-name", f"there is no {name!r}; {near}", hint)


def is_config_name(path: str, asked: Composition) -> bool:
    """Whether `path`, at which Hydra found no config, is the value of ``--config-name``."""
    return path == (asked.config_name or "").lstrip("/")


def without_header(file: str) -> Problem:
    """The problem of an experiment file without the header ``# @package _global_``."""
    if _is_blank(file):
        hint = "a small one: `# @package _global_`, then `hooks: {NAME: {select: fc, hook: forward, action: print}}`"
        return Problem(file, "has no keys, and its first line is not `# @package _global_`", hint)
    what = "its keys land under `experiment`, where nothing reads them"
    return Problem(file, what, "make `# @package _global_` its first line")


def _is_blank(file: str) -> bool:
    """Whether the file has only spaces and comments."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines())


def lost_keys(cfg: DictConfig) -> list[Problem]:
    """The problem of the chosen experiment if its keys landed under `experiment`."""
    landed = cfg.hydra.runtime.choices.get("experiment") is not None and "experiment" in cfg
    return [without_header(experiment_file(cfg))] if landed else []


def experiment_file(cfg: DictConfig) -> str:
    """The file of the chosen experiment."""
    name = f"experiment/{cfg.hydra.runtime.choices.experiment}.yaml"
    folders = [Path(source.path) for source in cfg.hydra.runtime.config_sources if source.schema == "file"]
    return next((str(folder / name) for folder in folders if (folder / name).is_file()), name)


def _wrong_keys(keys: list[Override], others: list[Override], asked: Composition) -> list[Problem]:
    """The problems of the overrides `keys` in the configuration that the `others` compose.

    An experiment file without its header is the only problem: its keys are in the wrong place.
    """
    texts = [str(each.input_line) for each in others]
    cfg = asked.app.compose_config(asked.config_name, texts, asked.mode, validate_sweep_overrides=False)
    if problems := lost_keys(cfg):
        return problems
    is_swept = any(each.is_sweep_override() and _is_choice(each, asked) for each in others)
    wrong = (_wrong_key(each, cfg, asked, is_swept) for each in keys)
    return [problem for problem in wrong if problem is not None]


def _wrong_key(override: Override, cfg: DictConfig, asked: Composition, is_swept: bool) -> Problem | None:
    """The problem of the override of a key. A correct override is applied to `cfg`, as Hydra would, and gives None."""
    key, value = override.key_or_group, override.value()
    if override.package is not None:  # its config group does not exist: Hydra reports that
        return None
    if "/" in key:
        hint = nearest(key, asked.app.list_all_config_groups())
        return Problem(key, "there is no such config group", hint)
    try:
        if override.is_delete():
            is_known = OmegaConf.select(cfg, key) is not None
            return None if is_known else Problem(f"~{key}", "there is no such key", _near(key, cfg))
        is_value = not isinstance(value, dict | list)
        if override.is_add() and is_value and OmegaConf.select(cfg, key) is not None:
            return Problem(key, "`+` adds a key, and this one is there already", "leave the `+` out")
        adds = override.is_add() or override.is_force_add()
        if not adds and (leaf := _leaf_above(key, cfg)) is not None:
            return _below_a_leaf(override, leaf, cfg, is_swept)
        OmegaConf.update(cfg, key, value, merge=True, force_add=adds)
    except (ConfigKeyError, ConfigAttributeError) as error:
        if asked.repository.group_exists(key) and key not in cfg:
            return _not_a_name(override, options(asked.repository, key))
        inside = str(error.full_key or "")  # `key={…}` with an unknown key in the braces
        return _unknown_key(override, inside if inside.startswith(f"{key}.") else key, cfg, is_swept)
    except OmegaConfBaseException as error:
        if isinstance(value, list) and OmegaConf.is_dict(OmegaConf.select(cfg, key)):
            hint = (
                "a sweep has one: objective=val/accuracy"
                if key == "objective"
                else "name its keys one by one"
            )
            return Problem(key, "found a list, expected a mapping", hint)
        return Problem(str(error.full_key or key), str(error.msg or error).splitlines()[0])
    return None


def _unknown_key(override: Override, key: str, cfg: DictConfig, is_swept: bool) -> Problem:
    hints = [_near(key, cfg)]
    if key.startswith(_OPEN):
        hints.append(f"to add it: +{override.input_line}")
    if is_swept:
        hints.append(f"where only a swept experiment has it: ++{override.input_line}")
    return Problem(key, "there is no such key", "; ".join(hints))


def _leaf_above(key: str, cfg: DictConfig) -> str | None:
    """The part of `key` that exists and holds a value instead of keys, such as `train.ema` of ``train.ema.decay``."""
    node, above = cfg, ""
    for part in key.split(".")[:-1]:
        if not OmegaConf.is_dict(node) or part not in node:
            return None
        node, above = node[part], f"{above}.{part}" if above else part
        if not OmegaConf.is_config(node):
            return above
    return None


def _below_a_leaf(override: Override, leaf: str, cfg: DictConfig, is_swept: bool) -> Problem:
    key, value = override.key_or_group, OmegaConf.select(cfg, leaf)
    below = key.removeprefix(f"{leaf}.")
    if leaf == "train.loss" and isinstance(value, str):
        hint = f"a loss with arguments is a mapping: train.loss={{name: {value}, ...}}"
    elif value is None and key.startswith(_OPEN):
        hint = f"{leaf} is null; to add it: +{override.input_line}"
    elif value is None and "." not in below:
        whole = f"{leaf}={{{below}: {override.get_value_string()}}}"
        hint = f"{leaf} is null; set it with all the keys that it needs: {shlex.quote(whole)}"
    else:
        hint = f"{leaf} is {'null' if value is None else repr(value)}"
    if is_swept:
        hint += f"; where only a swept experiment has it: ++{override.input_line}"
    return Problem(key, "there is no such key", hint)


def _near(key: str, cfg: DictConfig) -> str:
    """A hint with the nearest keys: those that end in `key`, else those like it in its first wrong part."""
    found, above, siblings = _nearest_keys(key, cfg)
    if found:
        return f"did you mean {' or '.join(map(repr, found))}?"
    return f"{above.rstrip('.') or 'the root'} holds {', '.join(siblings) or 'no keys'}"


def nearest_key(key: str, cfg: DictConfig) -> str | None:
    """The existing key that is most like `key`; None if no key is like it."""
    return next(iter(_nearest_keys(key, cfg)[0]), None)


def _nearest_keys(key: str, cfg: DictConfig) -> tuple[list[str], str, Collection[str]]:
    """The keys that are like `key`; the part of `key` that exists, and the names under that part."""
    groups = [group for group in cfg.hydra.runtime.choices if "/" not in group]
    paths = [*groups, *_paths(OmegaConf.to_container(cfg))]
    if endings := [path for path in paths if path.endswith(f".{key}") and not path.startswith("hydra.")]:
        return endings[:3], "", ()
    above, part, rest = "", *key.partition(".")[::2]
    while rest and f"{above}{part}" in paths:
        above, part, rest = f"{above}{part}.", *rest.partition(".")[::2]
    siblings = dict.fromkeys(
        path.removeprefix(above).partition(".")[0] for path in paths if path.startswith(above)
    )
    if not above:
        siblings |= dict.fromkeys(ROOT_KEYS)
    close = [f"{above}{name}" for name in get_close_matches(part, siblings)]
    if not close and above:  # train.lr for train.optimizer.lr
        section, leaf = key.partition(".")[0], key.rpartition(".")[2]
        close = [path for path in paths if path.startswith(f"{section}.") and path.endswith(f".{leaf}")]
        return close[:3], above, siblings
    whole = [f"{path}.{rest}" if rest else path for path in close]
    return [path for path in whole if path in paths] or whole, above, siblings


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.")
