"""What is wrong with a command line or a config file that does not compose, with the nearest existing names.

The overrides are checked only after Hydra has refused them, so that a correct command line loses no time. What is not a
common mistake is shown with Hydra's own message.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hookrun.command.compose.hydra import Composition, parse_override
from hookrun.command.compose.loader import is_choice, options
from hookrun.command.compose.overrides import (
    INTERPOLATION,
    quoted,
    several_values,
    split_at_spaces,
    unreadable,
)
from hookrun.engine.hook_types import HOOK_TYPES, OF_EVERY_HOOK
from hookrun.engine.keys import ROOT_KEYS, nested
from hookrun.errors import HookrunError, Problem, Refusal, SpecError, listed, nearest
from hookrun.store.config.interpolations import guarded
from hookrun.store.config.yaml_files import load

MOST_SHOWN = 100
"""Characters of an interpolation that are shown."""
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
_ONE_SECTION_GROUPS = {"model", "data", "train", "compute", "hooks"}
"""The groups whose choice affects the keys of one section only."""
# Launchers and sweepers of other packages, and the extra of hookrun that installs each.
_EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "optuna": "optuna"}
_NO_KEY = "there is no such key"
_TWICE = re.compile(
    r"Multiple values for (\S+)\. To override|(\S+) appears more than once in the final defaults list"
)


@contextmanager
def explained(asked: Composition | None = None) -> Iterator[None]:
    """Convert any exception while Hydra composes or resolves a configuration to SpecError.

    No user code runs in the block: every exception is a mistake in the command line or in a file.
    """
    try:
        with guarded():
            yield
    except (HookrunError, BrokenPipeError):
        raise
    except Exception as error:
        problems, reason = list[Problem](), error
        if asked is not None and isinstance(error, HydraException | ValueError | TypeError):
            try:
                problems = wrong_overrides(asked)
            except HookrunError:
                raise
            except Exception as of_files:  # the files do not compose, even without the overrides
                reason = of_files
        raise SpecError(problems or [_problem(reason, asked)]) from error


def composed(command: Composition, **options: Any) -> DictConfig:
    """The configuration of a command line; raises SpecError. The options are those of `App.compose_config`."""
    with explained(command):
        return command.app.compose_config(command.config_name, command.overrides, command.mode, **options)


# ---- overrides -----------------------------------------------------------------------------------------------------


def wrong_overrides(asked: Composition) -> list[Problem]:
    """The problems of the overrides: syntax errors, or if there are none, wrong choices and keys.

    Empty where every override is correct. Raises what Hydra raises where the config files do not compose.
    """
    parsed, problems = _parsed(asked)
    if problems:
        return problems
    keys, others, wrong_groups = list[Override](), list[Override](), set[str]()
    for override in parsed:
        if override.is_sweep_override() or override.key_or_group == "hydra.searchpath":
            others.append(override)
        elif not is_choice(override, asked.repository):
            keys.append(override)
        elif wrong := _wrong_choices(override, asked):
            problems += wrong
            wrong_groups.add(override.key_or_group)
        else:
            others.append(override)
    if not wrong_groups <= _ONE_SECTION_GROUPS:  # the keys cannot be checked without the right choice
        return problems
    others = [each for each in others if each.key_or_group.partition(".")[0] not in wrong_groups]
    cfg = asked.app.compose_config(
        asked.config_name,
        [str(each.input_line) for each in others],
        asked.mode,
        validate_sweep_overrides=False,
    )
    if lost := lost_keys(cfg):  # an experiment without its header: all its keys are in the wrong place
        return lost
    is_swept = any(each.is_sweep_override() and is_choice(each, asked.repository) for each in others)
    for override in keys:
        if override.key_or_group.partition(".")[0] in wrong_groups:
            continue
        problem = _wrong_key(override, cfg, asked)
        if problem is not None and problem.what == _NO_KEY and is_swept and not override.is_delete():
            hint = f"{problem.hint}; where only a swept experiment has it: ++{override.input_line}"
            problem = replace(problem, hint=hint)
        problems += [] if problem is None else [problem]
    return problems


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
            problems.append(Problem(text, "has no key before the `=`", "for example: experiment=clip_fc"))
        elif override.is_sweep_override() and asked.mode is RunMode.RUN:
            problems.append(several_values(override))
    return parsed, problems


def _wrong_choices(override: Override, asked: Composition) -> list[Problem]:
    group, value = override.key_or_group, override.value()
    if override.is_delete():
        return []
    if override.is_add() and override.package is None:
        cfg = asked.app.compose_config(asked.config_name, [], asked.mode)
        if group in cfg.hydra.runtime.choices:
            return [
                Problem(group, "`+` adds a config group, and this one is there already", "leave the `+` out")
            ]
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        return [_not_a_name(override, options(asked.repository, group))]
    paths = [f"{group}/{name}" for name in names]
    return [no_such_config(path, asked) for path in paths if not asked.repository.config_exists(path)]


def _not_a_name(override: Override, names: list[str]) -> Problem:
    """The problem of a choice such as ``3`` or ``nan``, which Hydra reads as a number."""
    group, typed = override.key_or_group, override.get_value_string()
    hint = nearest(typed, names)
    if override.value() is None and "none" in names:
        hint = f"for none write {group}=none"
    elif typed in names and (fixed := quoted(f"{group}={typed}")):
        hint = f"put the name in quotes of its own: {fixed}"
    return Problem(group, f"found {typed!r}, expected a name", hint)


def no_such_config(path: str, asked: Composition) -> Problem:
    """The problem of a config that is not in the config folders, such as ``model/resnet19``."""
    if (asked.config_name or "").startswith("/") and path == asked.config_name.lstrip("/"):
        return Problem(
            "--config-name",
            f"found the path {asked.config_name!r}, expected a name",
            "give the name of a file in a config folder; --config-dir adds a folder",
        )
    top, _, below = path.partition("/")
    if top == "hydra":
        group, _, name = path.rpartition("/")
        return Problem(
            group,
            f"there is no {name!r}; there are: {', '.join(options(asked.repository, group))}",
            f"pip install 'hookrun[{_EXTRAS[name]}]'"
            if name in _EXTRAS
            else f"a {group.removeprefix('hydra/')} of another package must be installed first",
        )
    folders = asked.app.folders()
    misnamed = next((file for folder in folders if (file := folder / f"{path}.yml").is_file()), None)
    if misnamed is not None:
        return Problem(
            str(misnamed), "configuration files end in .yaml", f"rename it to {misnamed.stem}.yaml"
        )
    group, name = (top, below) if below else ("", path)
    names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    if group:  # a folder inside the group may be the wrong part
        names = options(asked.repository, group)
    near = nearest(name, names)
    alike = [option for option in names if "/" in name or "/" not in option]
    there_are = f"there are: {listed(alike, 40)}; " if near.startswith("did you mean") else ""
    return Problem(
        group or "--config-name",
        f"there is no {name!r}; {near}",
        f"{there_are}looked in {', '.join(str(folder / group) for folder in folders)}",
    )


def _wrong_key(override: Override, cfg: DictConfig, asked: Composition) -> Problem | None:
    """The problem of the override of a key. A correct override is applied to `cfg`, as Hydra would, and gives None."""
    key, value = override.key_or_group, override.value()
    if override.package is not None:  # its config group does not exist: Hydra reports that
        return None
    if "/" in key:
        return Problem(key, "there is no such config group", nearest(key, asked.app.list_all_config_groups()))
    try:
        is_there = OmegaConf.select(cfg, key) is not None
        if override.is_delete():
            return None if is_there else Problem(f"~{key}", _NO_KEY, _near(key, cfg))
        if override.is_add() and is_there and not isinstance(value, dict | list):
            return Problem(key, "`+` adds a key, and this one is there already", "leave the `+` out")
        adds = override.is_add() or override.is_force_add()
        if not adds and (leaf := _leaf_above(key, cfg)) is not None:
            return Problem(key, _NO_KEY, _below_a_leaf(override, leaf, OmegaConf.select(cfg, leaf)))
        OmegaConf.update(cfg, key, value, merge=True, force_add=adds)
    except (ConfigKeyError, ConfigAttributeError) as error:
        if asked.repository.group_exists(key) and key not in cfg:
            return _not_a_name(override, options(asked.repository, key))
        inside = str(error.full_key or "")  # `key={…}` with an unknown key in the braces
        key = inside if inside.startswith(f"{key}.") else key
        near, to_add = _near(key, cfg), f"to add it: +{override.input_line}"
        if keys := _keys_of_hook(key, cfg):
            hook, own = key.split(".")[1:3]
            if own in keys:
                return Problem(key, _NO_KEY, to_add)
            if alike := get_close_matches(own, keys):
                near = f"did you mean {' or '.join(repr(f'hooks.{hook}.{each}') for each in alike)}?"
        hints = [near, to_add] if key.startswith(_OPEN) or not near else [near]
        return Problem(key, _NO_KEY, "; ".join(filter(None, hints)))
    except OmegaConfBaseException as error:
        if isinstance(value, list) and OmegaConf.is_dict(OmegaConf.select(cfg, key)):
            one = "a sweep has one: objective=val/accuracy"
            hint = one if key == "objective" else "name its keys one by one"
            return Problem(key, "found a list, expected a mapping", hint)
        return Problem(str(error.full_key or key), str(error.msg or error).splitlines()[0])
    return None


def _leaf_above(key: str, cfg: DictConfig) -> str | None:
    """The part of `key` that exists and holds a value instead of keys, such as `train.ema` of ``train.ema.decay``."""
    for path in accumulate(key.split(".")[:-1], "{}.{}".format):
        node = OmegaConf.select(cfg, path, default=cfg)  # the default: nothing is there
        if not OmegaConf.is_config(node):
            return path
    return None


def _below_a_leaf(override: Override, leaf: str, value: Any) -> str:
    """The hint for an override below a key that holds a value."""
    if leaf == "train.loss" and isinstance(value, str):
        return f"a loss with arguments is a mapping: train.loss={{name: {value}, ...}}"
    if value is not None:
        return f"{leaf} is {value!r}"
    hint = f"{leaf} is null"
    below = override.key_or_group.removeprefix(f"{leaf}.")
    if override.key_or_group.startswith(_OPEN):
        hint += f"; to add it: +{override.input_line}"
    elif "." not in below:
        whole = shlex.quote(f"{leaf}={{{below}: {override.get_value_string()}}}")
        hint += f"; set it with all the keys that it needs: {whole}"
    return hint


def _keys_of_hook(key: str, cfg: DictConfig) -> set[str]:
    """The keys that the hook with this key may have, by its hook type and action; empty if it is not there.

    Actions, which take a tenth of a second to import, are asked only about keys that are like none of the hook's own.
    """
    section, name, own = [*key.split("."), "", ""][:3]
    body: Any = OmegaConf.select(cfg, f"hooks.{name}") if section == "hooks" and own else None
    if not OmegaConf.is_dict(body):
        return set()
    hook_type, there = HOOK_TYPES.get(str(body.get("hook"))), [*map(str, body)]
    keys = {*there, *OF_EVERY_HOOK, *(hook_type.takes if hook_type is not None else ())}
    if own in keys or get_close_matches(own, there):
        return keys
    from hookrun.engine.actions import actions

    action = actions().get(str(body.get("action")))
    return keys | set(action.model_fields if action is not None else ())


def _near(key: str, cfg: DictConfig) -> str:
    """A hint with the nearest keys: those that end in `key`, else those like it in its first wrong part.

    "" for a key that is only not in this configuration.
    """
    groups = [group for group in cfg.hydra.runtime.choices if "/" not in group]
    paths = [*groups, *key_paths(cfg), *ROOT_KEYS]  # `vars` and `needs` are keys also where a file has none
    if key in paths:
        return ""
    above, part, rest = "", *key.partition(".")[::2]
    near = [path for path in paths if path.endswith(f".{key}") and not path.startswith("hydra.")]
    siblings = dict[str, None]()
    if not near:
        while rest and f"{above}{part}" in paths:
            above, part, rest = f"{above}{part}.", *rest.partition(".")[::2]
        below = (path.removeprefix(above) for path in paths if path.startswith(above))
        siblings = dict.fromkeys(path.partition(".")[0] for path in below)
        whole = [f"{above}{name}.{rest}".rstrip(".") for name in get_close_matches(part, siblings)]
        near = [path for path in whole if path in paths] or whole
    if not near and above:  # train.lr for train.optimizer.lr
        section, leaf = key.partition(".")[0], key.rpartition(".")[2]
        near = [path for path in paths if path.startswith(f"{section}.") and path.endswith(f".{leaf}")]
    if near:
        return f"did you mean {' or '.join(map(repr, near[:3]))}?"
    return f"{above.rstrip('.') or 'the root'} holds {', '.join(siblings) or 'no keys'}"


def key_paths(cfg: DictConfig) -> list[str]:
    """Every key path of the configuration, the shortest first."""
    return sorted((path for path, _ in nested(OmegaConf.to_container(cfg))), key=lambda path: path.count("."))


# ---- files ---------------------------------------------------------------------------------------------------------


def without_header(file: str) -> Problem:
    """The problem of an experiment file without the header ``# @package _global_``."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else ["unknown"]
    if all(not line.strip() or line.lstrip().startswith("#") for line in lines):
        return Problem(
            file,
            "has no keys, and its first line is not `# @package _global_`",
            "a small one: `# @package _global_`, then `hooks: {NAME: {select: fc, hook: forward, action: print}}`",
        )
    return Problem(
        file,
        "its keys land under `experiment`, where nothing reads them",
        "make `# @package _global_` its first line",
    )


def lost_keys(cfg: DictConfig) -> list[Problem]:
    """The problem of the chosen experiment if its keys landed under `experiment`."""
    landed = cfg.hydra.runtime.choices.get("experiment") is not None and "experiment" in cfg
    return [without_header(experiment_file(cfg))] if landed else []


def experiment_file(cfg: DictConfig) -> str:
    """The file of the chosen experiment."""
    name = f"experiment/{cfg.hydra.runtime.choices.experiment}.yaml"
    folders = [Path(source.path) for source in cfg.hydra.runtime.config_sources if source.schema == "file"]
    return next((str(folder / name) for folder in folders if (folder / name).is_file()), name)


def _problem(error: Exception, asked: Composition | None) -> Problem:
    match error:
        case MissingConfigException(missing_cfg_file=str(path)) if asked:
            if error.options is None and path != (asked.config_name or "").lstrip("/"):
                return Problem(
                    _named_file(error, asked),
                    f"Could not load {path!r}",
                    "a defaults list holds items like `- override /model: resnet18`",
                )
            return no_such_config(path, asked)
        case OmegaConfBaseException():
            return _of_value(error)
        case RecursionError():
            return Problem(
                "",
                "something contains itself, through an alias, an interpolation or a defaults list",
                "break the cycle",
            )
        case OSError(filename=str(file)):
            return Problem(file, error.strerror or str(error))
        case HydraException() | ValueError() | OSError():
            return _of_hydra(error, asked)
    return Problem("", f"{type(error).__name__}: {error}", "HYDRA_FULL_ERROR=1 shows the traceback")


def _of_value(error: OmegaConfBaseException) -> Problem:
    key, what = str(error.full_key or ""), str(error.msg or error).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        return Problem(key, "has no value yet (???)", f"give it one: {key}=VALUE")
    return Problem(key, what, INTERPOLATION if isinstance(error, GrammarParseError) else "")


def _of_hydra(error: Exception, asked: Composition | None) -> Problem:
    """The problem with Hydra's own message, or with that of the OmegaConf error behind it, at the file it names."""
    file = _named_file(error, asked)
    below = error.__cause__ or error.__context__
    if isinstance(below, OmegaConfBaseException):
        problem = _of_value(below)
        if file and not problem.where:  # a section that is a list: OmegaConf names no key
            return _list_for_mapping(file) or replace(problem, where=file)
        return replace(problem, where=file, what=f"{problem.what} (at {problem.where})") if file else problem
    message = " ".join(str(error).split()) or type(error).__name__
    if twice := _TWICE.match(message):
        group = twice[1] or twice[2]
        return Problem(
            group,
            "is chosen twice, by hookrun's configuration and by a defaults list",
            f"a defaults list that chooses it again needs the word `override`: `- override /{group}: NAME`",
        )
    if asked is None or not file or not isinstance(error, ConfigCompositionException):
        return Problem(file, message)
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    if "experiment" in Path(file).parts and not any(line.startswith("# @package") for line in lines):
        return without_header(file)
    return Problem(file, message, _near_groups(file, asked))


def _list_for_mapping(file: str) -> Problem | None:
    """The problem of the first section of the file that is a list; every section of a configuration is a mapping."""
    content = load(Path(file))
    for key in content if OmegaConf.is_dict(content) else ():
        if key != "defaults" and OmegaConf.is_list(content[key]):
            named = "each hook has a name: NAME: {select: …, hook: …, action: …}"
            hint = named if key == "hooks" else "write key: value"
            return Problem(f"{file}: {key}", "found a list, expected a mapping", hint)
    return None


def _named_file(error: Exception, asked: Composition | None) -> str:
    """The path of the first config file that Hydra's message names, such as ``'experiment/mine'``; else empty."""
    words = (word.strip("'\":,.;") for word in str(error).split() if "/" in word)
    files = (folder / f"{word}.yaml" for word in words for folder in (asked.app.folders() if asked else ()))
    return next((str(file) for file in files if file.is_file()), "")


def _near_groups(file: str, asked: Composition) -> str:
    """The nearest names for each group that the file's defaults list overrides and that does not exist."""
    groups = asked.app.config_loader.list_groups("")
    defaults = OmegaConf.select(load(Path(file)), "defaults") or []
    named = [str(key).split()[-1] for item in defaults if OmegaConf.is_dict(item) for key in item]
    absolute = [name[1:].partition("@")[0] for name in named if name.startswith("/")]
    return "; ".join(nearest(group, groups) for group in absolute if group.partition("/")[0] not in groups)


# ---- interpolations ------------------------------------------------------------------------------------------------


@contextmanager
def origins_told(cfg: DictConfig) -> Iterator[None]:
    """Add to each problem raised in the block the interpolation of `cfg` from which the wrong value came."""
    try:
        yield
    except Refusal as error:
        origins = {
            path: text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
            for path, text in nested(OmegaConf.to_container(cfg, resolve=False))
            if isinstance(text, str) and "${" in text
        }
        if not origins:
            raise
        raise type(error)([_told(each, origins) for each in error.errors], error.notes) from error


def _told(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """The problem with the interpolation at its key path added, or at the nearest key path above it."""
    place = problem.where
    while place and place not in origins:
        place = place.rpartition(".")[0]
    if not place:
        return problem
    if place != problem.where:
        return replace(problem, what=f"{problem.what} ({place} is {origins[place]})")
    found = re.match("found .*?(?=: )|found .*?(?=, )", problem.what)
    end = found.end() if found else len(problem.what)
    return replace(problem, what=f"{problem.what[:end]} (from {origins[place]}){problem.what[end:]}")
