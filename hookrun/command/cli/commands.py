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
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from itertools import groupby, pairwise, takewhile
from pathlib import Path

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.command.compose.errors import composed, explained, key_paths
from hookrun.command.compose.hydra import (
    App,
    Composition,
    argument_parser,
    conf_dir,
    existing_folder,
    opened,
    parse_override,
)
from hookrun.command.compose.overrides import GROUPS, meant, take, take_resume, take_trust
from hookrun.command.sweeps.exit_codes import DONE, REFUSED
from hookrun.engine.discovery import names_in
from hookrun.engine.keys import ROOT_KEYS
from hookrun.engine.trust import of_environment, read_once
from hookrun.errors import Problem, SpecError, printable, refuse, spec_error, whole_characters
from hookrun.terminal import waiting_for

CONFIG_NAME = "config"
_WRITTEN = "settings are written key=value, without dashes"
_TALKS = ("hydra", "hydra_plugins")  # launchers and sweepers, Hydra's own and installed ones


def execute(arguments: Sequence[str]) -> int:
    """Carry out ``hookrun ARGUMENTS``; returns the exit code.

    Raises SpecError, CompileError, and SystemExit for a wrong flag.
    """
    for text in arguments:
        if whole_characters(text) != text:
            raise spec_error(text, "is not UTF-8, in which configurations are written", "name it otherwise")
    with read_once(), loggers_restored():
        args = read_flags(arguments)
        _refuse_flags(args)
        typed, overrides = take_trust(args.overrides)
        trust = typed | of_environment()
        resume, overrides = take_resume(overrides)
        fail_fast, overrides = take("fail_fast", overrides, is_flag=True)
        stored = None
        if resume is not None:
            from hookrun.command.sweeps.resumed import is_sweep, sweep_command, sweep_folder

            if args.multirun or is_sweep(resume.name):
                stored = sweep_folder(resume.name)
        main = conf_dir() if args.config_path is None else existing_folder("--config-path", args.config_path)
        folders = [] if args.config_dir is None else [existing_folder("--config-dir", args.config_dir)]
        if args.shell_completion and not folders:
            folders = _completed_folder()
        with opened(main, *folders) as app:
            name = args.config_name or CONFIG_NAME
            if stored is not None:
                groups = app.config_loader.list_groups("")
                name, overrides = sweep_command(
                    stored, args.config_name, groups, overrides, has_folder=bool(folders)
                )
            asked = Composition(app, name, overrides)
            if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
                with explained(asked):
                    return _show_information(asked, args)
            # the typed packages are trusted like those of HOOKRUN_TRUST, to the end of the command
            with read_once(trust):
                if resume is not None and stored is None:
                    _refuse_fail_fast(fail_fast)
                    from hookrun.command.cli.running import resumed

                    return resumed(asked, trust, resume)
                mode = RunMode.RUN if args.run else None
                mode = RunMode.MULTIRUN if args.multirun or stored is not None else mode
                asked, cfg = _composed(replace(asked, overrides=_over_shown_task(overrides)), mode)
                if asked.mode is RunMode.RUN:
                    _refuse_fail_fast(fail_fast)
                    from hookrun.engine.collector import collector_paused

                    with collector_paused():  # what imports create stays
                        from hookrun.command.compose.compose import parsed_run

                        experiment = parsed_run(cfg)
                    from hookrun.command.cli.running import (
                        run_once,  # after the file was checked, which needs less
                    )

                    return run_once(asked, cfg, experiment, trust)
                from hookrun.command.sweeps.sweep import sweep

                waiting_for("checking the jobs of the sweep")
                show_sweep_lines(cfg)
                return sweep(
                    app,
                    cfg,
                    trust,
                    go_on=stored is not None,
                    anyway=resume is not None and resume.anyway,
                    fail_fast=bool(fail_fast),
                    verbose=args.verbose,
                )


def _refuse_fail_fast(fail_fast: bool | None) -> None:
    if fail_fast:
        raise spec_error("fail_fast", "is for a sweep, and this is one run", "put -m first")


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags and the overrides. Raises SpecError, and SystemExit after ``--version``."""
    parser = argument_parser()
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    flags = takewhile(lambda pair: pair[1] != "--", enumerate(arguments))
    if unknown := [place for place, word in flags if _is_unknown(word, known)]:
        with opened(conf_dir()) as app:
            raise SpecError([_not_a_flag(arguments[place:], known, app) for place in unknown])
    try:
        args, others = parser.parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        flag, hint = (error.argument_name or "").partition("/")[0], "--help shows some uses"
        joined = [word for word in arguments if word.startswith(f"{flag}=")]
        if flag in known and known[flag].choices:
            hint = f"it takes {', '.join(known[flag].choices or ())}"
        elif flag in known and known[flag].nargs == 0 and joined:
            hint = f"put a space there: {joined[0].replace('=', ' ', 1)}"
        raise spec_error(flag, error.message, hint) from None
    refuse(Problem(text, "is not a flag", _WRITTEN) for text in others)
    return args


def _is_unknown(word: str, known: Mapping[str, argparse.Action]) -> bool:
    if word[:1] != "-" or word == "-" or word.partition("=")[0] in known:
        return False
    with_choice = known.get(word[:2])  # a short flag with its choice attached: -cjob
    return with_choice is None or word[2:] not in (with_choice.choices or ())


def _not_a_flag(words: Sequence[str], known: Mapping[str, argparse.Action], app: App) -> Problem:
    """The problem of the first word, of which the second may be the value: ``--experiment clip_fc``."""
    name, equals, value = words[0].partition("=")
    where = words[0]
    if not equals and len(words) > 1 and "=" not in words[1] and words[1][:1] != "-":
        where, equals, value = f"{name} {words[1]}", " ", words[1]
    return Problem(where, "is not a flag", _hint(name, value if equals else None, known, app))


def _hint(name: str, value: str | None, known: Mapping[str, argparse.Action], app: App) -> str:
    key = name.lstrip("-")
    if key.partition(".")[0] in (*ROOT_KEYS, "experiment"):
        return f"{_WRITTEN}: {key}={value or ('NAME' if key in GROUPS else 'VALUE')}"
    if value is None and (override := meant(key, app)):
        return f"{_WRITTEN}: {override}"
    if f"--{key}" in known:
        return f"did you mean --{key}?"
    key = key.replace("-", "_")
    paths = key_paths(app.compose_config("config", [], RunMode.RUN))
    if path := next((path for path in paths if path.endswith(f".{key}")), None):
        return f"{_WRITTEN}: {path}={value or 'VALUE'}"
    if close := get_close_matches(f"--{name.lstrip('-').replace('_', '-')}", known, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    return f"{_WRITTEN}; --help shows some uses"


def _refuse_flags(args: argparse.Namespace) -> None:
    commands = {
        "--run": args.run,
        "--multirun": args.multirun,
        "--cfg": args.cfg is not None,
        "--info": args.info is not None,
        "--shell-completion": args.shell_completion,
    }
    given = [flag for flag, is_given in commands.items() if is_given]
    if len(given) > 1:
        raise spec_error(" ".join(given), "are different commands", "give one of them")
    if args.resolve and args.cfg is None and not args.help:
        raise spec_error("--resolve", "goes with --cfg or --help", "for example: --cfg job --resolve")
    if args.package is not None and args.cfg is None:
        raise spec_error("--package", "goes with --cfg", f"for example: --cfg job --package {args.package}")
    if args.experimental_rerun is not None:
        raise spec_error(
            "--experimental-rerun",
            "reads a pickle, which could run any code",
            "every run keeps its configuration as text: --config-dir RUN/.hydra --config-name config runs it again",
        )


def _completed_folder() -> list[Path]:
    """The config folder named in the command line that is being completed."""
    pairs = pairwise(os.environ.get("COMP_LINE", "").split())
    folders = [Path(value).absolute() for flag, value in pairs if flag in ("--config-dir", "-cd")]
    return [folder for folder in folders[:1] if folder.is_dir()]


def _show_information(asked: Composition, args: argparse.Namespace) -> int:
    app, name, overrides = asked.app, asked.config_name, asked.overrides
    if args.help:
        print(help_text(app, app.compose_config(name, overrides, RunMode.RUN), args.resolve))
    elif args.hydra_help:
        app.hydra_help(config_name=name, args_parser=argument_parser(), args=args)
    elif args.cfg:
        try:
            app.show_cfg(name, overrides, args.cfg, args.package, args.resolve)
        except SystemExit:  # Hydra has printed that there is no such package
            return REFUSED
    elif args.info:
        app.show_info(args.info, config_name=name, overrides=overrides)
    else:
        app.shell_completion(config_name=name, overrides=overrides)
    return DONE


def _over_shown_task(overrides: Sequence[str]) -> list[str]:
    """Beside ``task=plan``, which has no such keys, ``task.KEY=VALUE`` becomes ``++task.KEY=VALUE``."""
    names = [text.removeprefix("task=") for text in overrides if text.startswith("task=")]
    if names and any(text.startswith("task.") for text in overrides):
        from hookrun.run.tasks import tasks

        if any(name in tasks() and tasks()[name].takes_place for name in names):
            return [f"++{text}" if text.startswith("task.") else text for text in overrides]
    return list(overrides)


def _composed(asked: Composition, typed: RunMode | None) -> tuple[Composition, DictConfig]:
    """The configuration, and the composition that gave it, with its mode: the typed one, or else that of a file."""
    mode = typed or RunMode.RUN
    # a file may set `hydra.mode: MULTIRUN`, beside which several values are right
    cfg = composed(replace(asked, mode=mode), validate_sweep_overrides=typed is not None)
    configured, overrides = cfg.hydra.mode, asked.overrides
    is_swept = typed is None and any(parse_override(text).is_sweep_override() for text in overrides)
    if is_swept or (typed is None and configured not in (None, mode)):
        mode = configured or mode
        cfg = composed(replace(asked, mode=mode))
    if configured != mode:
        last = f"hydra.mode={mode.name}"
        overrides = [*overrides, last]
        with read_write(cfg.hydra), open_dict(cfg.hydra):
            cfg.hydra.mode = mode
            cfg.hydra.overrides.hydra.append(last)
    return replace(asked, overrides=overrides, mode=mode), cfg


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
            log.propagate, log.disabled = propagate, disabled


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
    users = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    template = string.Template(cfg.hydra.help.template)
    return template.safe_substitute(
        {name: parts[name]() for name in template.get_identifiers() if name in parts}
    )


def _is_hydras(group: str) -> bool:
    return group.partition("/")[0] == "hydra"


def _actions() -> list[str]:
    if names := names_in("hookrun.engine.actions", "action_name"):
        return names
    from hookrun.engine.actions import actions  # hookrun is installed without its sources

    return list(actions())


def _listed(names: list[str]) -> str:
    names = list(map(printable, names))
    return textwrap.indent(textwrap.fill(", ".join(names) or "none", 94, break_on_hyphens=False), "  ")


def _described(app: App, group: str) -> str:
    """One line for each name of a group, with its summary. The width of the name column is set per subfolder."""
    lines = list[str]()
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
    file = next((path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None)
    if file is None:
        return ""
    lines = map(str.strip, file.read_text(encoding="utf-8", errors="replace").splitlines())
    top = takewhile(lambda line: not line or line.startswith("#"), lines)
    comments = [line.lstrip("# ") for line in top if not line.startswith("# @")]
    return re.split(r"(?<=[.?]) ", " ".join(comments).strip())[0].removesuffix(".")
