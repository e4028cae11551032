"""The text of `--help`: the template of `hydra.help`, filled in from config folders and registries."""

from __future__ import annotations

import re
import string
import textwrap
from collections.abc import Callable
from itertools import groupby, takewhile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from hookrun.compose.hydra import App, argument_parser
from hookrun.discovery import names_in

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
