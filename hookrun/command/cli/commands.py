"""Execute one command line: show help, the configuration or completions, or start a run.

The modules that a run needs are imported only for a run, so that help and completion stay fast."""

from __future__ import annotations

import argparse
import logging
import os
import re
import string
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from itertools import groupby, pairwise, takewhile
from pathlib import Path

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.command.compose.errors import composed, explained, is_first_alone, key_paths, overwriting_none
from hookrun.command.compose.hydra import (
    App,
    Composition,
    argument_parser,
    conf_dir,
    existing_folder,
    opened,
    parse_override,
)
from hookrun.command.compose.overrides import (
    GROUPS,
    PLAN,
    Resume,
    fix_of,
    meant,
    take,
    take_resume,
    take_trust,
)
from hookrun.command.outcome import Outcome
from hookrun.command.sweeps.exit_codes import DONE, REFUSED
from hookrun.engine.discovery import EXTENSIONS, names_in
from hookrun.engine.keys import ROOT_KEYS
from hookrun.engine.trust import of_environment, read_once
from hookrun.errors import (
    Fix,
    Problem,
    SpecError,
    misnamed,
    printable,
    refuse,
    slip_of,
    spec_error,
    whole_characters,
)
from hookrun.run.experiment.given import Given
from hookrun.terminal import waiting_for

CONFIG_NAME = "config"
_WRITTEN = "settings are written key=value, without dashes"
_TALKS = ("hydra", "hydra_plugins")  # launchers and sweepers, Hydra's own and installed ones


def execute(arguments: Sequence[str], outcome: Outcome | None = None, given: Given | None = None) -> int:
    """Carry out ``hookrun ARGUMENTS``; returns the exit code.

    outcome: is filled with what was done
    given:   a model or data from Python, in place of what the configuration names

    Raises SpecError, CompileError, and SystemExit for a wrong flag.
    """
    for text in arguments:
        if whole_characters(text) != text:
            raise spec_error(text, "is not UTF-8, in which configurations are written", "name it otherwise")
    outcome = outcome or Outcome()
    given = given or Given()
    with read_once(), loggers_restored():
        flags = read_flags(arguments)
        _refuse_flags(flags)
        trust, overrides = take_trust(flags.overrides)
        resume, overrides = take_resume(overrides)
        fail_fast, overrides = take("fail_fast", overrides, is_flag=True)
        with opened(*_config_folders(flags)) as app:
            command = Composition(app, flags.config_name or CONFIG_NAME, overrides)
            stored_sweep = None if resume is None else _stored_sweep(command, flags, resume, given)
            command = stored_sweep or command
            for flag, show in _SHOWN.items():
                if getattr(flags, flag):
                    with explained(command):
                        return show(command, flags)
            # the typed packages are trusted like those of HOOKRUN_TRUST, to the end of the command
            trust |= of_environment()
            with read_once(trust):
                if resume is not None and stored_sweep is None:
                    _refuse_fail_fast(fail_fast)
                    from hookrun.command.cli.running import resumed

                    with given.lent(resumes=True):
                        return resumed(command, trust, resume, outcome, given)
                overrides = [text for text in command.overrides if text not in PLAN]
                is_plan = len(overrides) < len(command.overrides)
                mode = RunMode.RUN if flags.run else None
                mode = RunMode.MULTIRUN if flags.multirun or stored_sweep else mode
                command, cfg = _composed(replace(command, overrides=overrides), mode)
                if given.names:
                    from hookrun.command.compose.given import place_given

                    place_given(cfg, given)
                    app.place = partial(place_given, given=given)
                if command.mode is RunMode.RUN:
                    _refuse_fail_fast(fail_fast)
                    with given.lent():
                        return _run(command, cfg, trust, is_plan, outcome)
                from hookrun.command.sweeps.sweep import SweepCommand, sweep

                waiting_for("checking the jobs of the sweep")
                show_sweep_lines(cfg)
                typed = SweepCommand(
                    app, cfg, trust, is_plan, resume, bool(fail_fast), flags.verbose, outcome
                )
                with given.lent(copies=True):
                    return sweep(typed)


def _stored_sweep(
    command: Composition, flags: argparse.Namespace, resume: Resume, given: Given
) -> Composition | None:
    """The command with which the sweep that `resume` names goes on; None if it names a single run."""
    from hookrun.command.compose.given import require_given
    from hookrun.command.sweeps.resumed import is_sweep, sweep_command, sweep_folder
    from hookrun.store.config.stored import read_yaml
    from hookrun.store.files import StoreError
    from hookrun.store.format import MULTIRUN

    if not flags.multirun and not is_sweep(resume.name):
        return None
    folder = sweep_folder(resume.name)
    with suppress(StoreError):  # what cannot be read is refused later, where it is needed
        require_given(read_yaml(folder / MULTIRUN, folder), given, folder)
    groups = command.app.config_loader.list_groups("")
    has_folder = flags.config_dir is not None
    name, overrides = sweep_command(
        folder, flags.config_name, groups, command.overrides, has_folder=has_folder
    )
    return replace(command, config_name=name, overrides=overrides)


def _run(
    command: Composition, cfg: DictConfig, trust: frozenset[str], is_plan: bool, outcome: Outcome
) -> int:
    """Check the configuration of a single run, which needs few modules; then show it or run it."""
    from hookrun.engine.collector import collector_paused

    with collector_paused():  # what imports create stays
        from hookrun.command.compose.compose import parsed_run

        experiment = parsed_run(cfg, is_plan=is_plan)
    from hookrun.command.cli.running import RunCommand, run_once

    return run_once(RunCommand(command, cfg, experiment, trust, is_plan, outcome=outcome))


def _refuse_fail_fast(fail_fast: bool | None) -> None:
    if fail_fast:
        raise spec_error("fail_fast", "is for a sweep, and this is one run", "put -m first")


def _config_folders(flags: argparse.Namespace) -> list[Path]:
    """The main config folder, and the one that is searched before it if there is one."""
    main = conf_dir()
    if flags.config_path is not None:
        main = existing_folder("--config-path", flags.config_path)
    if flags.config_dir is not None:
        return [main, existing_folder("--config-dir", flags.config_dir)]
    if flags.shell_completion:  # the folder in the command line that is being completed
        words = os.environ.get("COMP_LINE", "").split()
        for flag, value in pairwise(words):
            if flag in ("--config-dir", "-cd"):
                folder = Path(value).absolute()
                return [main, folder] if folder.is_dir() else [main]
    return [main]


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags and the overrides. Raises SpecError, and SystemExit after ``--version``."""
    parser = argument_parser()
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    flags = takewhile(lambda pair: pair[1] != "--", enumerate(arguments))
    if unknown := [place for place, word in flags if _is_unknown(word, actions)]:
        with opened(conf_dir()) as app:
            problems = [_not_a_flag(arguments[place:], actions, app) for place in unknown]
        raise SpecError([overwriting_none(problem, arguments) for problem in problems])
    try:
        args, others = parser.parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        flag = (error.argument_name or "").partition("/")[0]
        raise SpecError([_wrong_use(flag, actions.get(flag), error.message, arguments)]) from None
    refuse(Problem(text, "is not a flag", _WRITTEN) for text in others)
    return args


def _is_unknown(word: str, actions: Mapping[str, argparse.Action]) -> bool:
    if word[:1] != "-" or word == "-" or word.partition("=")[0] in actions:
        return False
    with_choice = actions.get(word[:2])  # a short flag with its choice attached: -cjob
    return with_choice is None or word[2:] not in (with_choice.choices or ())


def _wrong_use(flag: str, action: argparse.Action | None, what: str, arguments: Sequence[str]) -> Problem:
    """The problem of a flag that was used wrongly."""
    for word, following in pairwise([*arguments, ""]):
        typed, equals, value = word.partition("=")
        if action is None or typed not in action.option_strings:
            continue
        if action.choices:
            hint = f"it takes {', '.join(action.choices)}"
            return misnamed(flag, what, value if equals else following, action.choices, hint)
        if action.nargs == 0:
            return Problem(flag, what, f"put a space there: {word.replace('=', ' ', 1)}", found=value)
    return Problem(flag, what, "--help shows some uses")


def _not_a_flag(words: Sequence[str], actions: Mapping[str, argparse.Action], app: App) -> Problem:
    """The problem of the first word, of which the second may be the value: ``--experiment clip_fc``."""
    flag, equals, value = words[0].partition("=")
    where = words[0]
    if not equals and len(words) > 1 and "=" not in words[1] and words[1][:1] != "-":
        value = words[1]
        where = f"{flag} {value}"
    return _meant_by_flag(Problem(where, "is not a flag", found=flag), flag, value, actions, app)


def _meant_by_flag(
    problem: Problem, flag: str, value: str, actions: Mapping[str, argparse.Action], app: App
) -> Problem:
    """The problem of a word with dashes that is not a flag, and what was meant; `value` is empty if it has none."""
    key = flag.lstrip("-")
    if key.partition(".")[0] in (*ROOT_KEYS, "experiment"):
        written = f"{_WRITTEN}: {key}={value or ('NAME' if key in GROUPS else 'VALUE')}"
        return replace(problem, hint=written, near=[key], fix=fix_of(f"{key}={value}") if value else None)
    if not value and (override := meant(key, app)):
        return replace(problem, hint=f"{_WRITTEN}: {override}", near=[override], fix=fix_of(override))
    if close := get_close_matches(f"--{key.replace('_', '-')}", actions, n=1, cutoff=0.75):
        hint = f"did you mean {close[0]}?"
        return replace(problem, hint=hint, near=close, fix=_fix_of_flag(flag, value, actions))
    paths = key_paths(app.compose_config("config", [], RunMode.RUN))
    near = [path for path in paths if path.endswith(f".{key.replace('-', '_')}")]
    if near:
        fix = fix_of(f"{near[0]}={value}") if value and is_first_alone(near) else None
        written = f"{_WRITTEN}: {near[0]}={value or 'VALUE'}"
        return replace(problem, hint=written, near=near[:_MOST_NEAR], fix=fix)
    return replace(problem, hint=f"{_WRITTEN}; --help shows some uses")


_MOST_NEAR = 3


def _fix_of_flag(flag: str, value: str, actions: Mapping[str, argparse.Action]) -> Fix | None:
    """The flag that was meant, with its value, where it takes one and has one, or takes none and has none."""
    right = slip_of(flag, actions)
    if right is None:
        return None
    takes_value = actions[right].nargs != 0
    return Fix(right, value or True) if takes_value == bool(value) else None


def _refuse_flags(flags: argparse.Namespace) -> None:
    """Raise SpecError for flags that do not go together."""
    given = [f"--{name.replace('_', '-')}" for name in ("run", "multirun", *_SHOWN) if getattr(flags, name)]
    commands = [flag for flag in given if flag not in ("--help", "--hydra-help")]
    if len(commands) > 1:
        raise spec_error(" ".join(commands), "are different commands", "give one of them")
    if flags.resolve and flags.cfg is None and not flags.help:
        raise spec_error("--resolve", "goes with --cfg or --help", "for example: --cfg job --resolve")
    if flags.package is not None and flags.cfg is None:
        raise spec_error("--package", "goes with --cfg", f"for example: --cfg job --package {flags.package}")
    if flags.experimental_rerun is not None:
        raise spec_error(
            "--experimental-rerun",
            "reads a pickle, which could run any code",
            "every run keeps its configuration as text: --config-dir RUN/.hydra --config-name config runs it again",
        )


def _show_help(command: Composition, flags: argparse.Namespace) -> int:
    cfg = command.app.compose_config(command.config_name, command.overrides, RunMode.RUN)
    print(help_text(command.app, cfg, flags.resolve))
    return DONE


def _show_hydras_help(command: Composition, flags: argparse.Namespace) -> int:
    command.app.hydra_help(config_name=command.config_name, args_parser=argument_parser(), args=flags)
    return DONE


def _show_configuration(command: Composition, flags: argparse.Namespace) -> int:
    try:
        command.app.show_cfg(command.config_name, command.overrides, flags.cfg, flags.package, flags.resolve)
    except SystemExit:  # Hydra has printed that there is no such package
        return REFUSED
    return DONE


def _show_information(command: Composition, flags: argparse.Namespace) -> int:
    command.app.show_info(flags.info, config_name=command.config_name, overrides=command.overrides)
    return DONE


def _show_completion(command: Composition, flags: argparse.Namespace) -> int:
    command.app.shell_completion(config_name=command.config_name, overrides=command.overrides)
    return DONE


_SHOWN: Mapping[str, Callable[[Composition, argparse.Namespace], int]] = {
    "help": _show_help,
    "hydra_help": _show_hydras_help,
    "cfg": _show_configuration,
    "info": _show_information,
    "shell_completion": _show_completion,
}
"""Flag -> what it shows."""


def _composed(command: Composition, typed: RunMode | None) -> tuple[Composition, DictConfig]:
    """The configuration, and the composition that gave it, with its mode: the typed one, or else that of a file."""
    mode = typed or RunMode.RUN
    # a file may set `hydra.mode: MULTIRUN`, beside which several values are right
    cfg = composed(replace(command, mode=mode), validate_sweep_overrides=typed is not None)
    configured = cfg.hydra.mode
    overrides = command.overrides
    if typed is None:
        is_swept = any(parse_override(text).is_sweep_override() for text in overrides)
        if is_swept or configured not in (None, mode):
            mode = configured or mode
            cfg = composed(replace(command, mode=mode))
    if configured != mode:
        last = f"hydra.mode={mode.name}"
        overrides = [*overrides, last]
        with read_write(cfg.hydra), open_dict(cfg.hydra):
            cfg.hydra.mode = mode
            cfg.hydra.overrides.hydra.append(last)
    return replace(command, overrides=overrides, mode=mode), cfg


@contextmanager
def loggers_restored() -> Iterator[None]:
    """Undo what Hydra's logging configuration and `show_sweep_lines` do to handlers, levels and loggers."""
    root = logging.getLogger()
    before = [
        (log, log.level, log.handlers[:], log.propagate, log.disabled)
        for log in (root, *map(logging.getLogger, _TALKS), *root.manager.loggerDict.values())
        if isinstance(log, logging.Logger)
    ]
    try:
        yield
    finally:
        for log, level, handlers, propagate, disabled in before:
            if log.level != level:  # setting a level empties the caches of all loggers
                log.setLevel(level)
            for added in [each for each in log.handlers if each not in handlers]:
                added.close()
            log.handlers[:] = handlers
            log.propagate = propagate
            log.disabled = disabled


def show_sweep_lines(cfg: DictConfig) -> None:
    """Show what launchers and sweepers log, as Hydra's own logging configuration would.

    Hydra's configuration adds its handler to the root logger, so that lines of every library would look like Hydra's.
    `config.yaml` therefore turns it off. Any other choice of `hydra/hydra_logging` is used as it is.
    """
    if cfg.hydra.hydra_logging.get("root") is None:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s][HYDRA] %(message)s"))
        for talker in map(logging.getLogger, _TALKS):
            talker.addHandler(handler)
            talker.setLevel(logging.DEBUG if cfg.hydra.verbose is True else logging.INFO)


LINE = 110
"""Longest line, in characters."""


def help_text(app: App, cfg: DictConfig, resolve: bool = False) -> str:
    """The help for the composed configuration `cfg`. Imports no torch."""
    users = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    parts: dict[str, Callable[[], str]] = {
        "EXPERIMENTS": lambda: _described(app, "experiment"),
        "TASKS": lambda: _described(app, "task"),
        "MODELS": lambda: _listed(app.options("model")),
        "DATA": lambda: _listed(app.options("data")),
        "HOOKS": lambda: _listed(app.options("hooks")),
        "ACTIONS": lambda: _listed(_actions()),
        # Hydra's own placeholders, for a `hydra/help` other than hookrun's
        "FLAGS_HELP": lambda: app.format_args_help(argument_parser()),
        "APP_CONFIG_GROUPS": lambda: app.format_config_groups(lambda group: not _is_hydras(group)),
        "HYDRA_CONFIG_GROUPS": lambda: app.format_config_groups(_is_hydras),
        "CONFIG": lambda: OmegaConf.to_yaml(users, resolve=resolve),
    }
    template = string.Template(cfg.hydra.help.template)
    named = [name for name in template.get_identifiers() if name in parts]
    return template.safe_substitute({name: parts[name]() for name in named})


def _is_hydras(group: str) -> bool:
    return group.partition("/")[0] == "hydra"


def _actions() -> list[str]:
    names = names_in("hookrun.engine.actions", "action_name")
    if names and not entry_points(group=EXTENSIONS):
        return names
    from hookrun.engine.actions import actions  # hookrun is installed without its sources, or extended

    return list(actions())


def _listed(names: list[str]) -> str:
    names = list(map(printable, names))
    return textwrap.indent(textwrap.fill(", ".join(names) or "none", 94, break_on_hyphens=False), "  ")


def _described(app: App, group: str) -> str:
    """One line for each name of a group, with its summary. The width of the name column is set per subfolder."""
    lines: list[str] = []
    for _, folder in groupby(app.options(group), key=lambda name: name.rpartition("/")[0]):
        names = list(folder)
        width = min(max(len(printable(name)) for name in names), LINE // 2)
        for name in names:
            summary = printable(_summary(app.folders(), group, name))
            said = textwrap.shorten(summary, LINE - width - 4, placeholder=" …")
            lines.append(f"  {printable(name):{width}}  {said}".rstrip())
    return "\n".join(lines)


def _summary(folders: list[Path], group: str, name: str) -> str:
    """The first sentence of the comment at the top of a config file, without Hydra's header."""
    files = [folder / group / f"{name}.yaml" for folder in folders]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        return ""
    comments: list[str] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            break
        if not line.startswith("# @"):
            comments.append(line.lstrip("# "))
    return re.split(r"(?<=[.?]) ", " ".join(comments).strip())[0].removesuffix(".")
