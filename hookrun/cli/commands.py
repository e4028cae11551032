"""Execute one command line: show help, the configuration or completions, or start a run.

The modules that a run needs are imported only for a run, so that help and completion stay fast.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from hookrun.compose.errors import explained
from hookrun.compose.flags import existing_folder, read_flags
from hookrun.compose.hydra import Composition, argument_parser, conf_dir, opened, parse_override
from hookrun.compose.overrides import Resume, take, take_resume, take_trust
from hookrun.errors import Problem, SpecError
from hookrun.sweeps.exit_codes import DONE, REFUSED
from hookrun.trust.packages import of_environment, read_once

if TYPE_CHECKING:
    from hookrun.sweeps.stored_sweep import StoredSweep

CONFIG_NAME = "config"


def execute(arguments: Sequence[str]) -> int:
    """Carry out ``hookrun ARGUMENTS``; returns the exit code.

    Raises SpecError, CompileError, and SystemExit for a wrong flag.
    """
    args = read_flags(arguments)
    _refuse_flags(args)
    typed, overrides = take_trust(args.overrides)
    trust = typed | of_environment()
    resume, overrides = take_resume(overrides)
    fail_fast, overrides = take("fail_fast", overrides, is_flag=True)
    sweep_dir, stored = _stored_sweep(args, resume, overrides)
    main = conf_dir() if args.config_path is None else existing_folder("--config-path", args.config_path)
    name = args.config_name or (CONFIG_NAME if stored is None else stored.config_name)
    folders = _config_dirs(args)
    if stored is not None and not folders:
        stored.refuse_config_dir()
    with opened(main, *folders) as app:
        if stored is not None:
            overrides = [*stored.overrides(app.config_loader.list_groups(""), overrides), *overrides]
        if sweep_dir is not None:
            from hookrun.sweeps.stored_sweep import in_folder

            overrides = [*overrides, in_folder(sweep_dir, overrides)]
        asked = Composition(app, name, overrides)
        if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
            with explained(asked):
                return _show_information(asked, args)
        # the typed packages are trusted like those of HOOKRUN_TRUST, to the end of the command
        with read_once(trust):
            if resume is not None and sweep_dir is None:
                from hookrun.cli.running import resumed

                if fail_fast:
                    raise _one_run()
                return resumed(asked, trust, resume)
            anyway = resume is not None and resume.anyway
            mode = RunMode.MULTIRUN if sweep_dir is not None else _typed_mode(args)
            asked, cfg = _composed(replace(asked, overrides=_over_shown_task(overrides)), mode)
            if asked.mode is RunMode.RUN:
                from hookrun.compose.compose import parsed_run

                if fail_fast:
                    raise _one_run()
                experiment = parsed_run(cfg)
                from hookrun.cli.running import run_once  # after the file was checked, which needs less

                return run_once(asked, cfg, experiment, trust)
            from hookrun.cli.running import SweepMode, run_sweep

            return run_sweep(asked, cfg, trust, SweepMode(sweep_dir is not None, anyway, fail_fast))


def _stored_sweep(
    args: argparse.Namespace, resume: Resume | None, overrides: Sequence[str]
) -> tuple[Path | None, StoredSweep | None]:
    """The directory of the sweep to resume, and the stored sweep if only overrides of `hydra` were typed.

    (None, None) where no sweep is resumed.
    """
    if resume is None:
        return None, None
    from hookrun.sweeps.stored_sweep import is_sweep, stored_sweep, sweep_folder

    if not args.multirun and not is_sweep(resume.name):
        return None, None
    folder = sweep_folder(resume.name)
    return folder, stored_sweep(folder) if all(map(_is_hydras, overrides)) else None


def _is_hydras(override: str) -> bool:
    """Whether the override is of Hydra's own section: it sets how a sweep runs, not what is swept."""
    return override.lstrip("+~").startswith("hydra")


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
        raise SpecError([Problem(" ".join(given), "are different commands", "give one of them")])
    if args.resolve and args.cfg is None and not args.help:
        raise SpecError([Problem("--resolve", "goes with --cfg or --help", "for one: --cfg job --resolve")])
    if args.package is not None and args.cfg is None:
        raise SpecError(
            [Problem("--package", "goes with --cfg", f"for one: --cfg job --package {args.package}")]
        )
    if args.experimental_rerun is not None:
        hint = "every run keeps its configuration as text: --config-dir RUN/.hydra --config-name config runs it again"
        raise SpecError([Problem("--experimental-rerun", "reads a pickle, which could run any code", hint)])


def _config_dirs(args: argparse.Namespace) -> list[Path]:
    folder = args.config_dir
    if folder is None and args.shell_completion:  # use the folder named in the command line being completed
        words = os.environ.get("COMP_LINE", "").split()
        folder = next((value for flag, value in pairwise(words) if flag in ("--config-dir", "-cd")), None)
        return [] if folder is None or not Path(folder).is_dir() else [Path(folder).absolute()]
    return [] if folder is None else [existing_folder("--config-dir", folder)]


def _show_information(asked: Composition, args: argparse.Namespace) -> int:
    app, name, overrides = asked.app, asked.config_name, asked.overrides
    if args.help:
        from hookrun.cli.help import help_text

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


def _typed_mode(args: argparse.Namespace) -> RunMode | None:
    return RunMode.MULTIRUN if args.multirun else RunMode.RUN if args.run else None


def _one_run() -> SpecError:
    return SpecError([Problem("fail_fast", "is for a sweep, and this is one run", "put -m first")])


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
    if typed is None and any(
        map(_has_several_values, overrides)
    ):  # right where a file sets `hydra.mode: MULTIRUN`
        mode = app.configured_mode(name, overrides) or mode
    with explained(replace(asked, mode=mode)):
        cfg = app.compose_config(name, overrides, mode)
        configured = cfg.hydra.mode
        if typed is None and configured not in (None, mode):
            mode = configured
            cfg = app.compose_config(name, overrides, mode)
    if configured != mode:
        last = f"hydra.mode={mode.name}"
        overrides = [*overrides, last]
        with read_write(cfg.hydra), open_dict(cfg.hydra):
            cfg.hydra.mode = mode
            cfg.hydra.overrides.hydra.append(last)
    return Composition(app, name, overrides, mode), cfg


def _has_several_values(override: str) -> bool:
    try:
        return parse_override(override).is_sweep_override()
    except OverrideParseException:  # which the composition reports
        return False
