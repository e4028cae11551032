"""What is wrong with a command line or a config file that does not compose, with the nearest existing names.

The overrides are checked only after Hydra has refused them, so that a correct command line loses no time. What is not a
common mistake is shown with Hydra's own message.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from hookrun.engine.keys import HOOKS_FROM, ROOT_KEYS, key_of, nested
from hookrun.errors import (
    Fix,
    HookrunError,
    Problem,
    Refusal,
    SpecError,
    listed,
    misnamed,
    nearest,
    renamed,
    slip_of,
)
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
def explained(command: Composition | None = None) -> Iterator[None]:
    """Convert any exception while Hydra composes or resolves a configuration to SpecError.

    No user code runs in the block: every exception is a mistake in the command line or in a file.
    """
    try:
        with guarded():
            yield
    except (HookrunError, BrokenPipeError):
        raise
    except Exception as error:
        problems = list[Problem]()
        cause = error
        if command is not None and isinstance(error, HydraException | ValueError | TypeError):
            try:
                given = command.overrides
                problems = [overwriting_none(problem, given) for problem in wrong_overrides(command)]
            except HookrunError:
                raise
            except Exception as of_files:  # the files do not compose, even without the overrides
                cause = of_files
        raise SpecError(problems or [_problem(cause, command)]) from error


def composed(command: Composition, **options: Any) -> DictConfig:
    """The configuration of a command line; raises SpecError. The options are those of `App.compose_config`."""
    with explained(command):
        return command.app.compose_config(command.config_name, command.overrides, command.mode, **options)


# ---- overrides -----------------------------------------------------------------------------------------------------


def wrong_overrides(command: Composition) -> list[Problem]:
    """The problems of the overrides: syntax errors, or if there are none, wrong choices and keys.

    Empty where every override is correct. Raises what Hydra raises where the config files do not compose.
    """
    parsed, problems = _parsed(command)
    if problems:
        return problems
    keys: list[Override] = []
    others = list[Override]()  # those that decide which files are read, and the swept ones
    wrong_groups = set[str]()
    for override in parsed:
        if override.is_sweep_override() or override.key_or_group in ("hydra.searchpath", HOOKS_FROM):
            others.append(override)
        elif not is_choice(override, command.repository):
            keys.append(override)
        elif wrong := list(_wrong_choices(override, command)):
            problems += wrong
            wrong_groups.add(override.key_or_group)
        else:
            others.append(override)
    if not wrong_groups <= _ONE_SECTION_GROUPS:  # the keys cannot be checked without the right choice
        return problems
    others = [each for each in others if each.key_or_group.partition(".")[0] not in wrong_groups]
    chosen = [str(each.input_line) for each in others]
    cfg = command.app.compose_config(
        command.config_name, chosen, command.mode, validate_sweep_overrides=False
    )
    if lost := lost_keys(cfg):  # an experiment without its header: all its keys are in the wrong place
        return lost
    is_swept = any(each.is_sweep_override() and is_choice(each, command.repository) for each in others)
    for override in keys:
        if override.key_or_group.partition(".")[0] in wrong_groups:
            continue
        for problem in _wrong_key(override, cfg, command):
            if is_swept and problem.what == _NO_KEY and not override.is_delete():
                to_force = f"where only a swept experiment has it: ++{override.input_line}"
                problem = replace(problem, hint=f"{problem.hint}; {to_force}")
            problems.append(problem)
    return problems


def _parsed(command: Composition) -> tuple[list[Override], list[Problem]]:
    """The overrides that can be read, and the problems of the others."""
    parsed: list[Override] = []
    problems: list[Problem] = []
    words = list(command.overrides)
    while words:
        if problem := split_at_spaces(words, command.app):
            problems.append(problem)
            del words[: 1 + problem.where.count(" ")]
            continue
        text = words.pop(0)
        try:
            override = parse_override(text)
        except OverrideParseException as error:
            problems.append(unreadable(error, command.app))
            continue
        parsed.append(override)
        if not override.key_or_group:
            problems.append(Problem(text, "has no key before the `=`", "for example: experiment=clip_fc"))
        elif override.is_sweep_override() and command.mode is RunMode.RUN:
            problems.append(several_values(override))
    return parsed, problems


def _wrong_choices(override: Override, command: Composition) -> Iterator[Problem]:
    """The problems of a choice from a config group: of each name that the group does not have."""
    group = override.key_or_group
    if override.is_delete():
        return
    if override.is_add() and override.package is None:
        cfg = command.app.compose_config(command.config_name, [], command.mode)
        if group in cfg.hydra.runtime.choices:
            what = "`+` adds a config group, and this one is there already"
            yield _corrected(Problem(group, what, "leave the `+` out"), override, group, override.value())
            return
    value = override.value()
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str):
            yield _not_a_name(override, options(command.repository, group))
            return
        if not command.repository.config_exists(f"{group}/{name}"):
            problem = no_such_config(f"{group}/{name}", command)
            if problem.fix is not None:
                fix = Fix(_typed_key(override), problem.fix.value)
                problem = replace(problem, fix=None if isinstance(value, list) else fix)
            yield problem


def _typed_key(override: Override) -> str:
    """The key as it was typed: with its `+` or `++`, and the package of a config group."""
    return str(override.input_line).partition("=")[0]


def _corrected(problem: Problem, override: Override, key: str, value: Any) -> Problem:
    """The problem of an override, with the key and the value that are right; several values are not repeated."""
    if override.is_sweep_override():
        return problem
    return replace(problem, found=override.key_or_group, fix=Fix(key, value))


def _not_a_name(override: Override, names: list[str]) -> Problem:
    """The problem of a choice such as ``3`` or ``nan``, which Hydra reads as a number."""
    typed = override.get_value_string()
    problem = misnamed(override.key_or_group, f"found {typed!r}, expected a name", typed, names)
    if typed in names:
        hint = f"put the name in quotes of its own: {quoted(f'{override.key_or_group}={typed}')}"
        return replace(problem, hint=hint, fix=Fix(_typed_key(override), typed))
    return problem


def no_such_config(path: str, command: Composition) -> Problem:
    """The problem of a config that is not in the config folders, such as ``model/resnet19``."""
    if (command.config_name or "") == f"/{path}":
        return Problem(
            "--config-name",
            f"found the path {command.config_name!r}, expected a name",
            "give the name of a file in a config folder; --config-dir adds a folder",
        )
    if path.startswith("hydra/"):
        return _no_such_plugin(path, command)
    folders = command.app.folders()
    for folder in folders:
        file = folder / f"{path}.yml"
        if file.is_file():
            return Problem(str(file), "configuration files end in .yaml", f"rename it to {file.stem}.yaml")
    group, _, name = path.partition("/")
    if name:  # a folder inside the group may be the wrong part
        names = options(command.repository, group)
    else:
        group = ""
        name = path
        names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    near = nearest(name, names)
    alike = [option for option in names if "/" in name or "/" not in option]
    there_are = f"there are: {listed(alike, 40)}; " if near.startswith("did you mean") else ""
    return misnamed(
        group or "--config-name",
        f"there is no {name!r}; {near}",
        name,
        names,
        f"{there_are}looked in {', '.join(str(folder / group) for folder in folders)}",
    )


def _no_such_plugin(path: str, command: Composition) -> Problem:
    """The problem of a launcher or sweeper that is not installed."""
    group, _, name = path.rpartition("/")
    hint = f"a {group.removeprefix('hydra/')} of another package must be installed first"
    if name in _EXTRAS:
        hint = f"pip install 'hookrun[{_EXTRAS[name]}]'"
    what = f"there is no {name!r}; there are: {', '.join(options(command.repository, group))}"
    return Problem(group, what, hint)


def _wrong_key(override: Override, cfg: DictConfig, command: Composition) -> Iterator[Problem]:
    """The problem of the override of a key. A correct override is applied to `cfg`, as Hydra would."""
    key = override.key_or_group
    if override.package is not None:
        what = f"looks like a config group override, but config group {key!r} does not exist."
        yield Problem("", f"Override {override.input_line} {what}", place=_typed_key(override).lstrip("+"))
        return
    if "/" in key:
        groups = command.app.list_all_config_groups()
        problem = Problem(key, "there is no such config group", nearest(key, groups))
        yield renamed(problem, key, groups, {key: override.value()})
        return
    value = override.value()
    adds = override.is_add() or override.is_force_add()
    try:
        is_there = OmegaConf.select(cfg, key) is not None
        if override.is_delete():
            if not is_there:
                near, hint = _near(key, cfg)
                meant = _meant(key, near)
                fix = None if meant is None else Fix(meant, takes_away=True)
                yield Problem(f"~{key}", _NO_KEY, hint, found=key, near=near, fix=fix)
        elif override.is_add() and is_there and not isinstance(value, dict | list):
            problem = Problem(key, "`+` adds a key, and this one is there already", "leave the `+` out")
            yield _corrected(problem, override, key, value)
        elif not adds and (above := _value_above(key, cfg)) is not None:
            yield _below_a_value(override, above, OmegaConf.select(cfg, above))
        else:
            OmegaConf.update(cfg, key, value, merge=True, force_add=adds)
    except (ConfigKeyError, ConfigAttributeError) as error:
        if command.repository.group_exists(key) and key not in cfg:
            yield _not_a_name(override, options(command.repository, key))
            return
        inside = str(error.full_key or "")  # `key={…}` with an unknown key in the braces
        is_inside = inside.startswith(f"{key}.")
        if is_inside:
            key = inside
        near, hint = _near(key, cfg)
        right = _meant(key, near)
        if key.startswith(_OPEN) or not hint:
            to_add = f"to add it: +{override.input_line}"
            hint = f"{hint}; {to_add}" if hint else to_add
            if not near:
                right = f"+{key}"
        problem = Problem(key, _NO_KEY, hint, found=key, near=near)
        if right is not None and not is_inside:
            problem = _corrected(problem, override, right, value)
        yield problem
    except OmegaConfBaseException as error:
        message = str(error.msg or error).splitlines()[0]
        yield Problem(str(error.full_key or key), message, found=value)


def _value_above(key: str, cfg: DictConfig) -> str | None:
    """The part of `key` that exists and holds a value instead of keys, such as `train.ema` of ``train.ema.decay``."""
    for path in accumulate(key.split(".")[:-1], "{}.{}".format):
        node = OmegaConf.select(cfg, path, default=cfg)  # the default: nothing is there
        if not OmegaConf.is_config(node):
            return path
    return None


def _below_a_value(override: Override, above: str, value: Any) -> Problem:
    """The problem of an override below a key that holds a value."""
    key = override.key_or_group
    problem = Problem(key, _NO_KEY, f"{above} is {value!r}", found=key)
    if value is not None:
        return problem
    if key.startswith(_OPEN):
        problem = replace(problem, hint=f"{above} is null; to add it: +{override.input_line}")
        return _corrected(problem, override, f"+{key}", override.value())
    below = key.removeprefix(f"{above}.")
    whole = shlex.quote(f"{above}={{{below}: {override.get_value_string()}}}")
    problem = replace(problem, hint=f"{above} is null; set it with all the keys that it needs: {whole}")
    return problem if "." in below else _corrected(problem, override, above, {below: override.value()})


def _meant(key: str, near: Sequence[str]) -> str | None:
    """The key path that was meant, one of the nearest; None if that is not certain.

    It has all parts of the key and more, as `train.optimizer.lr` for ``train.lr``, or the key is a slip of it.
    """
    parts = set(key.split("."))
    longer = [path for path in near if parts < set(path.split("."))]
    if longer:
        return longer[0] if is_first_alone(longer) else None
    return slip_of(key, near)


def _near(key: str, cfg: DictConfig) -> tuple[list[str], str]:
    """The nearest keys, and a hint: those of the same name elsewhere, else those like it in its first wrong part.

    Empty for a key that is only not in this configuration.
    """
    groups = [group for group in cfg.hydra.runtime.choices if "/" not in group]
    paths = [*groups, *key_paths(cfg), *ROOT_KEYS]  # `vars` and `needs` are keys also where a file has none
    for name, hook in (cfg.get("hooks") or {}).items():
        hook_type = HOOK_TYPES.get(str(OmegaConf.is_dict(hook) and hook.get("hook")))
        optional = OF_EVERY_HOOK if hook_type is None else OF_EVERY_HOOK | hook_type.takes
        paths += [f"hooks.{name}.{each}" for each in sorted(optional)]
    if key in paths:
        return [], ""
    name = key.rpartition(".")[2]
    near = [path for path in paths if path.endswith(f".{name}") and not path.startswith("hydra.")]
    above = ""
    part, _, rest = key.partition(".")
    while rest and f"{above}{part}" in paths:
        above = f"{above}{part}."
        part, _, rest = rest.partition(".")
    below = [path.removeprefix(above) for path in paths if path.startswith(above)]
    siblings = list(dict.fromkeys(path.partition(".")[0] for path in below))
    if "." in key or not near:
        section = key.partition(".")[0]
        inside = [path for path in near if path.startswith(f"{section}.")]  # train.lr for train.optimizer.lr
        close = [f"{above}{sibling}.{rest}".rstrip(".") for sibling in get_close_matches(part, siblings)]
        near = [path for path in close if path in paths] or close or inside
    if near:
        return near[:3], f"did you mean {' or '.join(map(repr, near[:3]))}?"
    return [], f"{above.rstrip('.') or 'the root'} holds {', '.join(siblings) or 'no keys'}"


def is_first_alone(paths: Sequence[str]) -> bool:
    """Whether the first of these key paths, of which the shortest come first, has fewer parts than all others."""
    return len(paths) == 1 or paths[0].count(".") < paths[1].count(".")


def key_paths(cfg: DictConfig) -> list[str]:
    """Every key path of the configuration, the shortest first."""
    return sorted((path for path, _ in nested(OmegaConf.to_container(cfg))), key=lambda path: path.count("."))


@contextmanager
def nothing_overwritten(cfg: DictConfig) -> Iterator[None]:
    """Take from each problem raised in the block a fix that sets what the command line or the file sets already."""
    try:
        yield
    except SpecError as error:
        given = list(map(str, cfg.hydra.overrides.task))
        file = Path(experiment_file(cfg))
        if file.is_file():
            given += [path for path, _ in nested(OmegaConf.to_container(load(file)))]
        error.errors[:] = [overwriting_none(problem, given) for problem in error.errors]
        raise


def overwriting_none(problem: Problem, given: Iterable[str]) -> Problem:
    """The problem without its fix if that sets another one of the given keys, or what another override sets."""
    fix = problem.fix
    if fix is None or fix.takes_away or key_of(fix.key) in (problem.where, problem.place):
        return problem
    others = {key_of(each) for each in given if each not in problem.where.split()}
    return replace(problem, fix=None) if key_of(fix.key) in others else problem


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
    name = f"experiment/{cfg.hydra.runtime.choices.get('experiment')}.yaml"  # a stored run has not chosen one
    folders = [Path(source.path) for source in cfg.hydra.runtime.config_sources if source.schema == "file"]
    return next((str(folder / name) for folder in folders if (folder / name).is_file()), name)


def _problem(error: Exception, command: Composition | None) -> Problem:
    """The problem that an exception of Hydra or OmegaConf stands for."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None and command:
        path = str(error.missing_cfg_file)
        if error.options is None and path != (command.config_name or "").lstrip("/"):
            hint = "a defaults list holds items like `- override /model: resnet18`"
            return Problem(_named_file(error, command), f"Could not load {path!r}", hint)
        return no_such_config(path, command)
    if isinstance(error, OmegaConfBaseException):
        return _problem_of_value(error)
    if isinstance(error, RecursionError):
        what = "something contains itself, through an alias, an interpolation or a defaults list"
        return Problem("", what, "break the cycle")
    if isinstance(error, OSError) and error.filename is not None:
        return Problem(str(error.filename), error.strerror or str(error))
    if isinstance(error, HydraException | ValueError | OSError):
        return _problem_of_hydra(error, command)
    return Problem("", f"{type(error).__name__}: {error}", "HYDRA_FULL_ERROR=1 shows the traceback")


def _problem_of_value(error: OmegaConfBaseException) -> Problem:
    key = str(error.full_key or "")
    if isinstance(error, MissingMandatoryValue):
        return Problem(key, "has no value yet (???)", f"give it one: {key}=VALUE")
    hint = INTERPOLATION if isinstance(error, GrammarParseError) else ""
    problem = Problem(key, str(error.msg or error).splitlines()[0], hint)
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and OmegaConf.is_dict(error.parent_node):
        return renamed(problem, str(error.key), map(str, error.parent_node), None)
    return problem


def _problem_of_hydra(error: Exception, command: Composition | None) -> Problem:
    """The problem with Hydra's own message, or with that of the OmegaConf error behind it, at the file it names."""
    file = _named_file(error, command)
    below = error.__cause__ or error.__context__
    if isinstance(below, OmegaConfBaseException):
        problem = _problem_of_value(below)
        if not file:
            return problem
        if not problem.where:  # a section that is a list: OmegaConf names no key
            return _list_for_mapping(file) or replace(problem, where=file)
        return replace(problem, where=file, what=f"{problem.what} (at {problem.where})", place=problem.where)
    message = " ".join(str(error).split()) or type(error).__name__
    if twice := _TWICE.match(message):
        group = twice[1] or twice[2]
        what = "is chosen twice, by hookrun's configuration and by a defaults list"
        hint = f"a defaults list that chooses it again needs the word `override`: `- override /{group}: NAME`"
        return Problem(group, what, hint)
    if command is None or not file or not isinstance(error, ConfigCompositionException):
        typed = map(key_of, [] if command is None else command.overrides)
        return Problem(file, message, place=next(filter(message.startswith, typed), ""))
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    if "experiment" in Path(file).parts and not any(line.startswith("# @package") for line in lines):
        return without_header(file)
    groups = command.app.config_loader.list_groups("")
    wrong = _wrong_groups(file, groups)
    hint = "; ".join(nearest(group, groups) for group in wrong)
    problem = Problem(file, message, hint)
    return renamed(problem, wrong[0], groups, None) if len(wrong) == 1 else problem


def _list_for_mapping(file: str) -> Problem | None:
    """The problem of the first section of the file that is a list; every section of a configuration is a mapping."""
    content = load(Path(file))
    for key in content if OmegaConf.is_dict(content) else ():
        if key != "defaults" and OmegaConf.is_list(content[key]):
            hint = "write key: value"
            if key == "hooks":
                hint = "each hook has a name: NAME: {select: …, hook: …, action: …}"
            return Problem(f"{file}: {key}", "found a list, expected a mapping", hint, place=str(key))
    return None


def _named_file(error: Exception, command: Composition | None) -> str:
    """The path of the first config file that Hydra's message names, such as ``'experiment/mine'``; else empty."""
    folders = command.app.folders() if command is not None else []
    for word in str(error).split():
        if "/" not in word:
            continue
        name = word.strip("'\":,.;")
        for folder in folders:
            file = folder / f"{name}.yaml"
            if file.is_file():
                return str(file)
    return ""


def _wrong_groups(file: str, groups: Collection[str]) -> list[str]:
    """Each group that the file's defaults list overrides and that does not exist."""
    wrong: list[str] = []
    for item in OmegaConf.select(load(Path(file)), "defaults") or []:
        for key in item if OmegaConf.is_dict(item) else ():
            group = str(key).split()[-1].removeprefix("/").partition("@")[0]  # `override /model@x`
            if str(key).split()[-1].startswith("/") and group.partition("/")[0] not in groups:
                wrong.append(group)
    return wrong


# ---- interpolations ------------------------------------------------------------------------------------------------


@contextmanager
def origins_told(cfg: DictConfig) -> Iterator[None]:
    """Add to each problem raised in the block the interpolation of `cfg` from which the wrong value came."""
    try:
        yield
    except Refusal as error:
        origins: dict[str, str] = {}
        for path, text in nested(OmegaConf.to_container(cfg, resolve=False)):
            if isinstance(text, str) and "${" in text:
                origins[path] = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
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
