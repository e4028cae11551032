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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.compose.errors import explained
from hookrun.compose.flags import existing_folder, read_flags
from hookrun.compose.hydra import App, Composition, argument_parser, conf_dir, opened, parse_override
from hookrun.compose.overrides import Resume, take, take_resume, take_trust
from hookrun.discovery import names_in
from hookrun.errors import Problem, SpecError, spec_error, whole_characters
from hookrun.sweeps.exit_codes import DONE, REFUSED
from hookrun.sweeps.waiting import waiting_for
from hookrun.trust import of_environment, read_once

if TYPE_CHECKING:
    from hookrun.sweeps.stored_sweep import StoredSweep

CONFIG_NAME = "config"
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
        stored = None if resume is None else _stored_sweep(args, resume, overrides)
        main = conf_dir() if args.config_path is None else existing_folder("--config-path", args.config_path)
        folders = [] if args.config_dir is None else [existing_folder("--config-dir", args.config_dir)]
        if args.shell_completion and not folders:
            folders = _completed_folder()
        with opened(main, *folders) as app:
            name = args.config_name or CONFIG_NAME
            if stored is not None:
                groups = app.config_loader.list_groups("")
                name, overrides = stored.command(
                    args.config_name, groups, overrides, has_folder=bool(folders)
                )
            asked = Composition(app, name, overrides)
            if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
                with explained(asked):
                    return _show_information(asked, args)
            # the typed packages are trusted like those of HOOKRUN_TRUST, to the end of the command
            with read_once(trust):
                if resume is not None and stored is None:
                    if fail_fast:
                        raise _one_run()
                    from hookrun.cli.running import resumed

                    return resumed(asked, trust, resume)
                mode = RunMode.RUN if args.run else None
                mode = RunMode.MULTIRUN if args.multirun or stored is not None else mode
                asked, cfg = _composed(replace(asked, overrides=_over_shown_task(overrides)), mode)
                if asked.mode is RunMode.RUN:
                    if fail_fast:
                        raise _one_run()
                    from hookrun.compose.compose import parsed_run

                    experiment = parsed_run(cfg)
                    from hookrun.cli.running import run_once  # after the file was checked, which needs less

                    return run_once(asked, cfg, experiment, trust)
                from hookrun.sweeps.sweep import sweep

                waiting_for("checking the jobs of the sweep")
                anyway = resume is not None and resume.anyway
                with sweep_lines(cfg):
                    return sweep(
                        app,
                        cfg,
                        trust,
                        go_on=stored is not None,
                        anyway=anyway,
                        fail_fast=bool(fail_fast),
                        verbose=args.verbose,
                    )


def _one_run() -> SpecError:
    return SpecError([Problem("fail_fast", "is for a sweep, and this is one run", "put -m first")])


def _stored_sweep(args: argparse.Namespace, resume: Resume, overrides: Sequence[str]) -> StoredSweep | None:
    """The sweep to resume; None if it is a run. It is read if only overrides of `hydra` were typed."""
    from hookrun.sweeps.stored_sweep import StoredSweep, is_sweep, sweep_folder

    if not args.multirun and not is_sweep(resume.name):
        return None
    is_typed = not all(text.lstrip("+~").startswith("hydra") for text in overrides)
    return StoredSweep(sweep_folder(resume.name), is_typed)


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
    words = os.environ.get("COMP_LINE", "").split()
    folder = next((value for flag, value in pairwise(words) if flag in ("--config-dir", "-cd")), None)
    return [] if folder is None or not Path(folder).is_dir() else [Path(folder).absolute()]


def _show_information(asked: Composition, args: argparse.Namespace) -> int:
    app, name, overrides = asked.app, asked.config_name, asked.overrides
    if args.help:
        from hookrun.cli.commands import help_text

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
    if not names or not any(text.startswith("task.") for text in overrides):
        return list(overrides)
    from hookrun.tasks import tasks

    if not any(name in tasks() and tasks()[name].takes_place for name in names):
        return list(overrides)
    return [f"++{text}" if text.startswith("task.") else text for text in overrides]


def _composed(asked: Composition, typed: RunMode | None) -> tuple[Composition, DictConfig]:
    """The configuration, and the composition that gave it, with its mode: the typed one, or else that of a file."""
    app, name, overrides = asked.app, asked.config_name, asked.overrides
    mode = typed or RunMode.RUN
    with explained(replace(asked, mode=mode)):
        # a file may set `hydra.mode: MULTIRUN`, beside which several values are right
        cfg = app.compose_config(name, overrides, mode, validate_sweep_overrides=typed is not None)
    configured = cfg.hydra.mode
    is_swept = typed is None and any(parse_override(text).is_sweep_override() for text in overrides)
    if is_swept or (typed is None and configured not in (None, mode)):
        mode = configured or mode
        with explained(replace(asked, mode=mode)):
            cfg = app.compose_config(name, overrides, mode)
    if configured != mode:
        last = f"hydra.mode={mode.name}"
        overrides = [*overrides, last]
        with read_write(cfg.hydra), open_dict(cfg.hydra):
            cfg.hydra.mode = mode
            cfg.hydra.overrides.hydra.append(last)
    return Composition(app, name, overrides, mode), cfg


@contextmanager
def loggers_restored() -> Iterator[None]:
    """Undo what Hydra's logging configuration does to handlers, levels and loggers."""
    root = logging.getLogger()
    known = [root, *(item for item in root.manager.loggerDict.values() if isinstance(item, logging.Logger))]
    before = [(log, log.level, log.handlers[:], log.propagate, log.disabled) for log in known]
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


@contextmanager
def sweep_lines(cfg: DictConfig) -> Iterator[None]:
    """Show what launchers and sweepers log, as Hydra's own logging configuration would.

    Hydra's configuration adds its handler to the root logger, so that lines of every library would look like Hydra's.
    `config.yaml` therefore turns it off. Any other choice of `hydra/hydra_logging` is used as it is.
    """
    if cfg.hydra.hydra_logging.get("root") is not None:
        yield
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[%(asctime)s][HYDRA] %(message)s"))
    level = logging.DEBUG if cfg.hydra.verbose is True else logging.INFO
    talkers = [logging.getLogger(name) for name in _TALKS]
    for talker in talkers:
        talker.addHandler(handler)
        talker.setLevel(level)
    try:
        yield
    finally:
        for talker in talkers:
            talker.removeHandler(handler)
            talker.setLevel(logging.NOTSET)


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
    if names := names_in("hookrun.actions", "action_name"):
        return names
    from hookrun.actions import actions  # hookrun is installed without its sources

    return list(actions())


def _listed(names: list[str]) -> str:
    indent = "  "
    text = ", ".join(names) or "none"
    return textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _described(app: App, group: str) -> str:
    """One line for each name of a group, with its summary. The width of the name column is set per subfolder."""
    lines = list[str]()
    for _, folder in groupby(app.options(group), key=lambda name: name.rpartition("/")[0]):
        names = list(folder)
        width = max(map(len, names))
        for name in names:
            said = textwrap.shorten(_summary(app.folders(), group, name), LINE - width - 4, placeholder=" …")
            lines.append(f"  {name:{width}}  {said}".rstrip())
    return "\n".join(lines)


def _summary(folders: list[Path], group: str, name: str) -> str:
    """The first sentence of the comment at the top of a config file, without Hydra's header."""
    file = next((path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None)
    if file is None:
        return ""
    lines = (line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    top = takewhile(lambda line: not line or line.startswith("#"), lines)
    comments = [line.lstrip("# ") for line in top if not line.startswith("# @")]
    sentence = re.split(r"(?<=[.?]) ", " ".join(comments).strip())[0]
    return sentence.removesuffix(".")
