"""Hydra's loader of config folders, with checks of every file that is not hookrun's own before the file is used.

Only this file and `hookrun.command.compose.hydra` import Hydra's private modules.
"""

from __future__ import annotations

import copy
import os
import posixpath
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from importlib import resources
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
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
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.command.compose import hydra_section
from hookrun.engine.keys import HOOKS_FROM, root_of
from hookrun.errors import Problem, refuse, spec_error
from hookrun.store.config.interpolations import guarded
from hookrun.store.config.yaml_files import parsed, reading

if TYPE_CHECKING:
    from hookrun.store.bundles import Bundle

MAX_LOADS = 1_000
"""The most configs that one composition may load; an ordinary composition loads about thirty."""
MOST_SHARED = 64
"""The most compositions of config files that are kept for the jobs of a sweep."""
HYDRAS_DIRS = {
    "run.dir": "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}",
    "sweep.dir": "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}",
}
"""Hydra's own defaults, which are replaced: two runs started in the same second would share a directory."""


def conf_dir() -> Path:
    """The config folder that comes with hookrun: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.parent / "conf"


def _is_inside(config_path: str) -> bool:
    """Whether the path stays in the folder: ``../x`` and ``//x`` in a defaults list would leave it."""
    return config_path in ("", posixpath.normpath(config_path)) and not config_path.startswith(("/", "../"))


def _read(source: ConfigSource, file: Path, config_path: str) -> ConfigResult:
    """The content of a config file; raises SpecError for content that only hookrun's own files may have."""
    with reading(file) as text:
        header = ConfigSource._get_header_dict(text[:512])
        content = cast(DictConfig, parsed(text))  # a list is refused when it is merged
        if not _is_ours(source):
            plain: Any = OmegaConf.to_container(content, resolve=False)
            refuse(_acting_content(plain, file, posixpath.dirname(config_path)))
    path = f"{source.scheme()}://{source.path}"
    return ConfigResult(config=content, path=path, provider=source.provider, header=header)


def _acting_content(plain: Any, file: Path, group: str) -> Iterator[Problem]:
    """The problem of each part of a user's file that would have an effect before the configuration is checked."""
    keys = plain if isinstance(plain, dict) else {}
    inner = plain
    if keys and hydra_section.is_open(group):  # `_load_single_config` checks `_target_`
        inner = {key: value for key, value in keys.items() if key != "_target_"}
    yield from hydra_section.acting_keys(inner, str(file))
    yield from hydra_section.wrong_choices(keys.get("defaults"), group, str(file))
    section = keys.get("hydra")
    if isinstance(section, str) or (isinstance(section, dict) and "searchpath" in section):
        yield Problem(
            f"{file}: hydra.searchpath",
            "cannot be set in a file: it would read other folders",
            "type it: hydra.searchpath=[file:///folder], or --config-dir FOLDER",
            place="hydra.searchpath",
        )


class _Inside(ConfigSource):
    """A reader that finds nothing outside its folder."""

    def is_config(self, config_path: str) -> bool:
        return _is_inside(config_path) and super().is_config(config_path)  # type: ignore[safe-super]

    def is_group(self, config_path: str) -> bool:
        return _is_inside(config_path) and super().is_group(config_path)  # type: ignore[safe-super]


class FileConfigSource(_Inside, file_config_source.FileConfigSource):
    """Hydra's reader of config folders, with errors that name the file.

    The name is that of Hydra's class: Hydra's registry, which launchers pickle, refuses a reader of another name.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            return super().load_config(config_path)
        file = Path(self.path, self._normalize_file_name(config_path)).resolve()
        if not file.is_relative_to(Path(self.path).resolve()):
            raise spec_error(
                str(Path(self.path, config_path)),
                f"is a link that leads out of the folder {self.path}, to {file}",
                "copy the file, or name its folder as well: hydra.searchpath=[file:///folder] on the command line",
            )
        return _read(self, file, config_path)

    def available(self) -> bool:
        """True. Raises SpecError if the folder does not exist: Hydra would only warn and skip it."""
        if not super().available():
            raise spec_error(
                "hydra.searchpath", f"there is no folder {self.path}", "a folder is file:///absolute/path"
            )
        return True


class ImportlibResourcesConfigSource(
    _Inside, importlib_resources_config_source.ImportlibResourcesConfigSource
):
    """Hydra's reader of config folders in packages: those of Hydra, of plugins, and of a typed search path."""

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            return super().load_config(config_path)
        resource = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        with resources.as_file(resource) as file:
            return _read(self, file, config_path)


SOURCES: tuple[type[ConfigSource], ...] = (FileConfigSource, ImportlibResourcesConfigSource)


def _is_ours(source: ConfigSource) -> bool:
    """Whether its configs come with hookrun, Hydra, an installed plugin or, through ConfigStore, from code."""
    if source.scheme() == "file":
        return Path(source.path).resolve() == conf_dir().resolve()
    if source.scheme() == "pkg":
        return not source.provider.startswith(("hydra.searchpath", "command-line", "main"))
    return source.scheme() == "structured"


_DEEPEST = 2
"""The most folders between a config group and the configs that count as its own."""


def options(repo: IConfigRepository, group: str) -> list[str]:
    """The names in a config group, including those of its subgroups."""
    names = list(repo.get_group_options(group, ObjectType.CONFIG))
    if group.count("/") > _DEEPEST:  # a folder may hold a link to itself
        return names
    for folder in repo.get_group_options(group, ObjectType.GROUP):
        names += [f"{folder}/{name}" for name in options(repo, f"{group}/{folder}")]
    return names


def is_choice(override: Override, repo: IConfigRepository) -> bool:
    """Whether Hydra reads the override as a choice from a config group; it merges a mapping into the keys instead."""
    return repo.group_exists(override.key_or_group) and not isinstance(override.value(), dict)


class Loader(ConfigLoaderImpl):
    """Hydra's loader, for the process of hookrun and those of its launchers.

    output: the folder for all outputs whose directory was not typed; None: the current directory

    Before overrides are applied, it adds the hooks of the bundle that `hooks_from` names, so that overrides may change
    them as those of a file.

    adds_bundle: False for configurations that have these hooks already, such as the stored one of a run
    """

    adds_bundle = True

    def __init__(self, config_search_path: ConfigSearchPath, output: str | None = None) -> None:
        super().__init__(config_search_path)
        self._output = output
        self._typed_groups = frozenset[str]()  # the groups of Hydra from which the command line chooses
        self._typed = list[Override]()
        self._shared = dict[tuple[str, ...], DictConfig]()  # of jobs of a sweep that choose the same configs

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_shared": {}}  # a launcher pickles the loader for each job

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """The names in a config group: of configs with those of its subgroups, so that ``glob(lm/*)`` finds them.

        For completion, which alone gives overrides, a group that holds both files and folders has no subgroups: it
        would not offer the files.
        """
        _, repo = self._parse_overrides_and_create_caching_repo(config_name, overrides or [])
        if results_filter is ObjectType.CONFIG:
            return options(repo, group_name)
        if overrides is not None and group_name and repo.get_group_options(group_name, ObjectType.CONFIG):
            return []
        return repo.get_group_options(group_name, results_filter)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The configuration of a job of a sweep. Jobs that choose the same configs share the composition of these."""
        name = master_config.hydra.job.config_name
        common: Any = OmegaConf.to_container(master_config.hydra.overrides.hydra)
        with guarded():  # a launcher calls it in another process
            parsed, repo = self._parse_overrides_and_create_caching_repo(name, common + sweep_overrides)
            own = [each for each in parsed if not each.is_hydra_override()]
            keys = [each for each in own if not is_choice(each, repo) and each.key_or_group != HOOKS_FROM]
            shared = tuple(str(each.input_line) for each in parsed if each not in keys)
            if shared not in self._shared:
                if len(self._shared) >= MOST_SHARED:
                    self._shared.clear()
                self._shared[shared] = super()._load_configuration_impl(name, list(shared), RunMode.RUN)
            cfg = copy.deepcopy(self._shared[shared])
            self._apply_overrides_to_config(keys, cfg)
            cfg.hydra.overrides.task = [each.input_line for each in own]
            cfg.hydra.job.override_dirname = get_overrides_dirname(
                own, **cfg.hydra.job.config.override_dirname
            )
            self._finish(cfg, parsed)
            OmegaConf.copy_cache(from_config=master_config, to_config=cfg)
        return cfg

    def _load_configuration_impl(
        self, config_name: str | None, overrides: list[str], *args: Any, **options: Any
    ) -> DictConfig:
        cfg = super()._load_configuration_impl(config_name, overrides, *args, **options)
        self._finish(cfg, OverridesParser.create().parse_overrides(overrides))
        return cfg

    def _finish(self, cfg: DictConfig, overrides: list[Override]) -> None:
        """What hookrun adds to a configuration that Hydra has composed."""
        added = _added_hooks(overrides)
        typed = set(map(root_of, added))
        bundle = self._bundle(cfg, overrides)
        if bundle is not None:
            bundle.refuse_names(added)
            if _naming_bundles(overrides):
                typed |= bundle.hooks.keys()
        _switch_hooks_off(cfg, overrides, typed)
        if cfg.hydra.job.env_copy:
            raise spec_error(
                "hydra.job.env_copy",
                "would copy values of the environment into files; jobs inherit the environment without it",
                "leave it out",
            )
        self._replace_hydras_defaults(cfg)

    def _replace_hydras_defaults(self, cfg: DictConfig) -> None:
        """Unless typed, Hydra's default directories become hookrun's, within `output`, and it logs nothing."""
        overrides: Any = OmegaConf.to_container(cfg.hydra.overrides.hydra, resolve=False)
        typed = {str(text).lstrip("+").partition("=")[0]: text for text in overrides}
        with read_write(cfg.hydra), open_dict(cfg.hydra):
            for key, hydras in HYDRAS_DIRS.items():
                section = cfg.hydra[key.partition(".")[0]]
                ours = hydra_section.SHIPPED_DIRS[key]
                if f"hydra.{key}" not in typed and section._get_node("dir")._value() in (ours, hydras):
                    section.dir = ours if self._output is None else os.path.join(self._output, ours)
            choices = cfg.hydra.runtime.choices
            for group in ("job_logging", "hydra_logging"):  # as in the stored configuration of a run
                if choices.get(f"hydra/{group}") == "default" and f"hydra/{group}" not in typed:
                    cfg.hydra[group] = {"version": 1, "root": None, "disable_existing_loggers": False}

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed, repo = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        typed = {override.key_or_group for override in parsed}
        self._typed = parsed
        self._typed_groups = frozenset(group for group in typed if group.startswith("hydra/"))
        loads = count(1)
        load = repo.load_config

        def counted(config_path: str) -> ConfigResult | None:
            if next(loads) > MAX_LOADS:  # defaults lists can multiply the number of loads
                raise spec_error(
                    config_path,
                    f"the defaults lists name more than {MAX_LOADS:,} configs",
                    "name each config once",
                )
            return load(config_path)

        repo.load_config = counted  # type: ignore[method-assign]
        return parsed, repo

    def _compose_config_from_defaults_list(self, *args: Any, **options: Any) -> DictConfig:
        cfg = super()._compose_config_from_defaults_list(*args, **options)
        for section in ("model", "data"):  # the arguments of a factory of one's own may have any names
            if OmegaConf.select(cfg, f"{section}.name") == "python":
                OmegaConf.set_struct(cfg[section].get("args"), False)
        bundle = self._bundle(cfg, self._typed)
        with open_dict(cfg):
            if _naming_bundles(self._typed):
                cfg.setdefault(HOOKS_FROM, None)  # typed, it needs no `+`
            if bundle is not None:
                hooks = cfg.get("hooks") or {}
                bundle.refuse_names(hooks)
                cfg.hooks = OmegaConf.merge(bundle.hooks, hooks)
        return cfg

    def _bundle(self, cfg: DictConfig, overrides: Sequence[Override]) -> Bundle | None:
        """The bundle that `hooks_from` names, in one of the overrides or in a file."""
        folder = _hooks_from(cfg, overrides)
        if not self.adds_bundle or not isinstance(
            folder, str
        ):  # another value is refused when all are checked
            return None
        from hookrun.store.bundles import read_bundle

        return read_bundle(folder, HOOKS_FROM)

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        path = str(default.config_path)
        source = next((each for each in repo.get_sources() if each.is_config(path)), None)
        is_hydras = posixpath.normpath(path).lstrip("/").startswith("hydra/")
        if is_hydras:
            self._refuse_place(default, source, repo)
        loaded = super()._load_single_config(default, repo)
        if source is None or (_is_ours(source) and (is_hydras or default.primary)):
            return loaded
        plain: Any = OmegaConf.to_container(loaded.config, resolve=False)
        if isinstance(plain, dict) and "hydra" in plain:
            groups = [name for name in repo.get_group_options("", ObjectType.GROUP) if name != "hydra"]
            plugins = list[str]()
            if posixpath.dirname(path) in self._typed_groups:
                installed = [*Plugins.instance().discover(Launcher), *Plugins.instance().discover(Sweeper)]
                plugins = [f"{plugin.__module__}.{plugin.__name__}" for plugin in installed]
            refuse(
                replace(each, where=f"{_file(source, path)}: {each.where}", place=each.where)
                for each in hydra_section.wrong_settings(plain["hydra"], groups, plugins)
            )
        return loaded

    def _refuse_place(
        self, default: ResultDefault, source: ConfigSource | None, repo: IConfigRepository
    ) -> None:
        """Raise SpecError for a config of Hydra's that files may not choose, or that shadows an installed one."""
        path = str(default.config_path)
        if source is not None and not _is_ours(source):
            for other in repo.get_sources():
                if _is_ours(other) and other.is_config(path):
                    what = f"has the name of the config {path!r} that is installed"
                    raise spec_error(_file(source, path), what, "give the file another name")
        group, name = posixpath.split(posixpath.normpath(path))
        package = str(default.package or "").removesuffix("._global_")
        is_typed = any(group == typed or group.startswith(f"{typed}/") for typed in self._typed_groups)
        if is_typed and not hydra_section.is_open(group):
            return
        if group in _HYDRAS_CHOICES:
            is_fine = default.parent == "hydra/config" and name in _HYDRAS_CHOICES[group]
        elif path == "hydra/config":
            is_fine = package in ("", "hydra")
        else:
            is_fine = hydra_section.is_open(group) and package == group.replace("/", ".")
        if not is_fine:
            what = f"the config {path!r} was chosen for {package or 'the root'!r} by {default.parent!r}"
            raise spec_error(group, what, "only the command line chooses it")


def _naming_bundles(overrides: Sequence[Override]) -> list[Override]:
    return [each for each in overrides if each.key_or_group == HOOKS_FROM]


def _hooks_from(cfg: DictConfig, overrides: Sequence[Override]) -> Any:
    """The value of the last override of `hooks_from`, of a sweep that of its first job; else the value in a file."""
    naming = _naming_bundles(overrides)
    if not naming:
        node = cfg._get_node(HOOKS_FROM, validate_access=False)
        return None if node is None else node._value()
    last = naming[-1]
    if last.is_sweep_override():
        text = f"{HOOKS_FROM}={next(last.sweep_string_iterator())}"
        last = OverridesParser.create().parse_override(text)
    return None if last.is_delete() else last.value()


def _added_hooks(overrides: Sequence[Override]) -> list[str]:
    """``NAME``, or ``NAME.KEY``, of each override that adds a hook, or a key to one."""
    adding = [each.key_or_group for each in overrides if each.is_add() or each.is_force_add()]
    return [key.removeprefix("hooks.") for key in adding if key.startswith("hooks.")]


def _switch_hooks_off(cfg: DictConfig, overrides: list[Override], typed: Set[str]) -> None:
    """Carry out ``hooks=none`` and ``~hooks`` of the command line, or of a job of a sweep.

    The hooks of files are stored and not installed; beside typed hooks they are left out.

    typed: the names of hooks of the command line, ``+hooks.NAME=…``, and of the bundle that it names
    """
    choices = [each for each in overrides if each.key_or_group == "hooks" and not each.is_sweep_override()]
    if not choices:
        return
    choice = choices[-1]
    value = choice.value()
    names = value if isinstance(value, list) else [value]
    if not choice.is_delete() and any(name != "none" for name in names):
        return
    with open_dict(cfg):
        if typed:
            cfg.hooks = OmegaConf.masked_copy(cfg.hooks, sorted(typed & cfg.hooks.keys()))
        elif all(each.key_or_group != "hooked" for each in overrides):
            cfg.hooked = False


_HYDRAS_CHOICES = {
    "hydra/env": {"default"},
    "hydra/help": {"default", "hookrun"},
    "hydra/hydra_help": {"default"},
    "hydra/hydra_logging": {"default", "none"},
    "hydra/job_logging": {"default", "none"},
    "hydra/output": {"default"},
}
"""The choices that Hydra's and hookrun's own files make."""


def _file(source: ConfigSource, config_path: str) -> str:
    if source.scheme() == "file":
        return str(Path(source.path, f"{config_path}.yaml"))
    return f"{source}/{config_path}"
