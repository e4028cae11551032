"""Hydra's loader of config folders, with checks of every file that is not hookrun's own before the file is used.

Only this file and `hookrun.compose.hydra` import Hydra's private modules.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection
from importlib import resources
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.core_plugins import file_config_source, importlib_resources_config_source
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.compose import hydra_section
from hookrun.config.interpolations import guarded
from hookrun.config.yaml_files import reading
from hookrun.errors import Problem, SpecError

MAX_LOADS = 1_000
"""The most configs that one composition may load; an ordinary composition loads about thirty."""
HYDRAS_DIRS = {
    "run.dir": "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}",
    "sweep.dir": "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}",
}
"""Hydra's own defaults, which are replaced: two runs started in the same second would share a directory."""


def conf_dir() -> Path:
    """The config folder that comes with hookrun: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.parent / "conf"


def _is_inside(config_path: str) -> bool:
    """Whether the path stays in the folder: ``../x`` and ``//x`` in a defaults list would leave it."""
    return config_path in ("", posixpath.normpath(config_path)) and not config_path.startswith(("/", "../"))


def _vetted(text: str, file: str, config_path: str, is_ours: bool) -> DictConfig:
    """The content of a config file; raises SpecError for content that only hookrun's own files may have."""
    content = _parsed(text)
    if is_ours:
        return content
    plain: Any = OmegaConf.to_container(content, resolve=False)
    group = posixpath.dirname(config_path)
    inner = plain
    if hydra_section.is_open(group) and isinstance(plain, dict):  # `_load_single_config` checks `_target_`
        inner = {key: value for key, value in plain.items() if key != "_target_"}
    problems = hydra_section.acting_keys(inner, file)
    if isinstance(plain, dict):
        problems += hydra_section.wrong_choices(plain.get("defaults"), group, file)
    if problems:
        raise SpecError(problems)
    return content


def _parsed(text: str) -> DictConfig:
    content = OmegaConf.load(StringIO(text))
    return cast(DictConfig, content)  # a list is refused when it is merged


def _result(source: ConfigSource, text: str, content: DictConfig) -> ConfigResult:
    header, path = ConfigSource._get_header_dict(text[:512]), f"{source.scheme()}://{source.path}"
    return ConfigResult(config=content, path=path, provider=source.provider, header=header)


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's reader of config folders, with errors that name the file.

    The name is that of Hydra's class: Hydra's registry, which launchers pickle, refuses a reader of another name.
    """

    @property
    def is_ours(self) -> bool:
        """Whether this is the folder that comes with hookrun."""
        return Path(self.path).resolve() == conf_dir().resolve()

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            return super().load_config(config_path)
        file = Path(self.path, self._normalize_file_name(config_path)).resolve()
        if not file.is_relative_to(Path(self.path).resolve()):
            what = f"is a link that leads out of the folder {self.path}, to {file}"
            hint = "copy the file, or name its folder as well: hydra.searchpath=[file:///folder] on the command line"
            raise SpecError([Problem(str(Path(self.path, config_path)), what, hint)])
        with reading(file) as text:
            return _result(self, text, _vetted(text, str(file), config_path, self.is_ours))

    def is_config(self, config_path: str) -> bool:
        return _is_inside(config_path) and super().is_config(config_path)

    def is_group(self, config_path: str) -> bool:
        return _is_inside(config_path) and super().is_group(config_path)

    def available(self) -> bool:
        """True. Raises SpecError if the folder does not exist: Hydra would only warn and skip it."""
        if not super().available():
            what, hint = f"there is no folder {self.path}", "a folder is file:///absolute/path"
            raise SpecError([Problem("hydra.searchpath", what, hint)])
        return True


class ImportlibResourcesConfigSource(importlib_resources_config_source.ImportlibResourcesConfigSource):
    """Hydra's reader of config folders in packages: those of Hydra, of plugins, and of a typed search path."""

    @property
    def is_ours(self) -> bool:
        """Whether the folder belongs to Hydra or an installed plugin."""
        return not self.provider.startswith(("hydra.searchpath", "command-line", "main"))

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            return super().load_config(config_path)
        resource = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        if self.is_ours:
            return _result(self, text := resource.read_text("utf-8"), _parsed(text))
        with resources.as_file(resource) as file, reading(file) as text:
            return _result(self, text, _vetted(text, str(file), config_path, is_ours=False))

    def is_config(self, config_path: str) -> bool:
        return _is_inside(config_path) and super().is_config(config_path)

    def is_group(self, config_path: str) -> bool:
        return _is_inside(config_path) and super().is_group(config_path)


SOURCES: tuple[type[ConfigSource], ...] = (FileConfigSource, ImportlibResourcesConfigSource)
HYDRAS_SOURCES: tuple[type[ConfigSource], ...] = (
    file_config_source.FileConfigSource,
    importlib_resources_config_source.ImportlibResourcesConfigSource,
)


def _is_ours(source: ConfigSource) -> bool:
    """Whether its configs come with hookrun, Hydra, an installed plugin or, through ConfigStore, from code."""
    return bool(getattr(source, "is_ours", source.scheme() == "structured"))


def _source(repo: IConfigRepository, config_path: str) -> ConfigSource | None:
    return next((source for source in repo.get_sources() if source.is_config(config_path)), None)


class Loader(ConfigLoaderImpl):
    """Hydra's loader, for the process of hookrun and those of its launchers.

    output: the folder for all outputs whose directory was not typed; None: the current directory
    """

    def __init__(self, config_search_path: ConfigSearchPath, output: str | None = None) -> None:
        super().__init__(config_search_path)
        self._output = output

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The configuration of a job of a sweep."""
        with guarded():  # a launcher calls it in another process
            return super().load_sweep_config(master_config, sweep_overrides)

    def _load_configuration_impl(
        self, config_name: str | None, overrides: list[str], *args: Any, **options: Any
    ) -> DictConfig:
        cfg = super()._load_configuration_impl(config_name, overrides, *args, **options)
        parsed = OverridesParser.create().parse_overrides(overrides)
        if _without_hooks(parsed) and (added := _added_hooks(parsed)):  # only the typed hooks are left
            with open_dict(cfg):
                cfg.hooks = OmegaConf.masked_copy(cfg.hooks, sorted(added & cfg.hooks.keys()))
        if cfg.hydra.job.env_copy:
            what = "would copy values of the environment into files; jobs inherit the environment without it"
            raise SpecError([Problem("hydra.job.env_copy", what, "leave it out")])
        self._place(cfg)
        return cfg

    def _place(self, cfg: DictConfig) -> None:
        """Replace Hydra's default output directories by hookrun's, within `output`, unless a directory was typed."""
        overrides: Any = OmegaConf.to_container(cfg.hydra.overrides.hydra, resolve=False)
        typed = [str(text).lstrip("+") for text in overrides]
        for key, ours in hydra_section.SHIPPED_DIRS.items():
            section, name = key.split(".")
            node = cfg.hydra[section]
            set_now = node._get_node(name)._value()
            if name != "dir" or set_now not in (ours, HYDRAS_DIRS[key]):
                continue
            if any(text.startswith(f"hydra.{key}=") for text in typed):
                continue
            with read_write(node), open_dict(node):
                node[name] = ours if self._output is None else os.path.join(self._output, ours)
        choices = cfg.hydra.runtime.choices
        for group in _LOGGING:  # chosen by a user's root config, such as the stored one of a run
            if choices.get(f"hydra/{group}") == "default" and f"hydra/{group}=default" not in typed:
                with read_write(cfg.hydra), open_dict(cfg.hydra):
                    cfg.hydra[group] = dict(_NO_LOGGING)

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed, repo = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        _limit_loads(repo)
        repo.typed_groups = {each.key_or_group for each in parsed}  # type: ignore[attr-defined]
        repo.without_hooks = _without_hooks(parsed) and not _added_hooks(parsed)  # type: ignore[attr-defined]
        return parsed, repo

    def _process_config_searchpath(
        self, config_name: str | None, parsed_overrides: list[Override], repo: CachingConfigRepository
    ) -> None:
        source = None if config_name is None else _source(repo, config_name)
        if config_name is not None and source is not None and not _is_ours(source):
            loaded = repo.load_config(config_name)
            plain = None if loaded is None else OmegaConf.to_container(loaded.config, resolve=False)
            section = plain.get("hydra") if isinstance(plain, dict) else None
            if isinstance(section, str) or (isinstance(section, dict) and "searchpath" in section):
                where = f"{_file(source, config_name)}: hydra.searchpath"
                hint = "type it: hydra.searchpath=[file:///folder], or --config-dir FOLDER"
                raise SpecError(
                    [Problem(where, "cannot be set in a file: it would read other folders", hint)]
                )
        super()._process_config_searchpath(config_name, parsed_overrides, repo)

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        problems = [problem for each in defaults for problem in _wrong_place(each, repo)]
        if problems:
            raise SpecError(problems)
        cfg = super()._compose_config_from_defaults_list(defaults, repo)
        if getattr(repo, "without_hooks", False):
            with open_dict(cfg):
                cfg.hooked = False
        return cfg

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        loaded = super()._load_single_config(default, repo)
        path = str(default.config_path)
        source = _source(repo, path)
        if source is None or (_is_ours(source) and (_of_hydra(path) or default.primary)):
            return loaded
        plain: Any = OmegaConf.to_container(loaded.config, resolve=False)
        if isinstance(plain, dict) and "hydra" in plain:
            groups = [name for name in repo.get_group_options("", ObjectType.GROUP) if name != "hydra"]
            plugins = _installed() if posixpath.dirname(path) in _typed_groups(repo) else ()
            problems = hydra_section.wrong_settings(plain["hydra"], groups, plugins)
            if problems:
                file = _file(source, path)
                raise SpecError([Problem(f"{file}: {each.where}", each.what, each.hint) for each in problems])
        return loaded


_LOGGING = ("job_logging", "hydra_logging")
_NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}


def _without_hooks(overrides: list[Override]) -> bool:
    """Whether the command line, or a job of a sweep, switches the hooks of files off: ``hooks=none`` or ``~hooks``."""
    chosen = [each for each in overrides if each.key_or_group == "hooks" and not each.is_sweep_override()]
    if not chosen:
        return False
    names = chosen[-1].value()
    return chosen[-1].is_delete() or all(
        name == "none" for name in (names if isinstance(names, list) else [names])
    )


def _added_hooks(overrides: list[Override]) -> set[str]:
    """The names of the hooks that are typed: ``+hooks.NAME=…``."""
    added = (each.key_or_group.split(".") for each in overrides if each.is_add() or each.is_force_add())
    return {path[1] for path in added if path[0] == "hooks" and len(path) > 1}


def _limit_loads(repo: CachingConfigRepository) -> None:
    """Make the repository raise SpecError after MAX_LOADS configs: defaults lists can multiply the number of loads."""
    loads, load = count(1), repo.load_config

    def counted(config_path: str) -> ConfigResult | None:
        if next(loads) > MAX_LOADS:
            what = f"the defaults lists name more than {MAX_LOADS:,} configs"
            raise SpecError([Problem(config_path, what, "name each config once")])
        return load(config_path)

    repo.load_config = counted  # type: ignore[method-assign]


def _wrong_place(default: ResultDefault, repo: IConfigRepository) -> list[Problem]:
    """The problem of a config of Hydra's groups that files may not choose, or that shadows an installed config."""
    path = default.config_path
    if path is None or not _of_hydra(path):
        return []
    source = _source(repo, path)
    if source is not None and not _is_ours(source):
        theirs = [each for each in repo.get_sources() if _is_ours(each) and each.is_config(path)]
        if theirs:
            what = f"has the name of the config {path!r} that is installed"
            return [Problem(_file(source, path), what, "give the file another name")]
    group, name = posixpath.split(posixpath.normpath(path))
    package = str(default.package or "").removesuffix("._global_")
    is_typed = any(group == each or group.startswith(f"{each}/") for each in _typed_groups(repo))
    if is_typed and not hydra_section.is_open(group):
        return []
    if group in _HYDRAS_CHOICES:
        is_fine = default.parent == "hydra/config" and name in _HYDRAS_CHOICES[group]
    elif path == "hydra/config":
        is_fine = package in ("", "hydra")
    else:
        is_fine = hydra_section.is_open(group) and package == group.replace("/", ".")
    if is_fine:
        return []
    what = f"the config {path!r} was chosen for {package or 'the root'!r} by {default.parent!r}"
    return [Problem(group, what, "only the command line chooses it")]


_HYDRAS_CHOICES = {
    "hydra/env": {"default"},
    "hydra/help": {"default", "hookrun"},
    "hydra/hydra_help": {"default"},
    "hydra/hydra_logging": {"default", "none"},
    "hydra/job_logging": {"default", "none"},
    "hydra/output": {"default"},
}
"""The choices that Hydra's and hookrun's own files make."""


def _of_hydra(path: str) -> bool:
    return posixpath.normpath(path).lstrip("/").startswith("hydra/")


def _typed_groups(repo: IConfigRepository) -> Collection[str]:
    """The groups of Hydra from which the command line chooses."""
    typed = getattr(repo, "typed_groups", ())
    return {group for group in typed if group.startswith("hydra/")}


def _file(source: ConfigSource, config_path: str) -> str:
    return (
        str(Path(source.path, f"{config_path}.yaml"))
        if source.scheme() == "file"
        else f"{source}/{config_path}"
    )


def _installed() -> list[str]:
    """The class paths of the installed launchers and sweepers."""
    known = [*Plugins.instance().discover(Launcher), *Plugins.instance().discover(Sweeper)]
    return [f"{each.__module__}.{each.__name__}" for each in known]
