"""The bridge to Hydra: with `hookrun.command.compose.loader` the only file that imports Hydra's private modules.

`hydra.main` composes, makes the run directory and calls the task in one go, exits with 1 for every mistake,
and cannot list the jobs of a sweep before they run. hookrun checks the configuration between these steps, so that a
refused configuration leaves nothing on disk. It therefore calls the classes that `hydra.main` calls, which are the
same in Hydra 1.3 and 1.4.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, cast

import hydra
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository as IConfigRepository
from hydra._internal.core_plugins.basic_launcher import BasicLauncher as BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobRuntime, configure_log
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode, TaskFunction
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.command.compose.loader import SOURCES, Loader
from hookrun.command.compose.loader import conf_dir as conf_dir
from hookrun.errors import spec_error
from hookrun.store.config.interpolations import guarded
from hookrun.version import __version__

OUTPUT = "HOOKRUN_OUTPUT"
"""As in store/format.py, which help and completion do not import."""

BASIC_SWEEPER = f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"
BASIC_LAUNCHER = f"{BasicLauncher.__module__}.{BasicLauncher.__name__}"
MAX_JOBS = 10_000


class App(Hydra):
    """A Hydra application that runs the checked configuration instead of composing it again.

    A second composition could differ from the first, for example in `${now:…}`.

    place: completes the configuration of each job of a sweep
    """

    _checked: DictConfig | None = None
    place: Callable[[DictConfig], None] = staticmethod(lambda cfg: None)

    def compose_config(self, *args: Any, **options: Any) -> DictConfig:
        """The configuration that `run_checked` or `sweep_checked` is running, else a new composition."""
        if self._checked is None:
            with guarded():
                return super().compose_config(*args, **options)
        if options.get("with_log_configuration"):
            configure_log(self._checked.hydra.hydra_logging, self._checked.hydra.verbose)
        return self._checked

    def run_checked(self, cfg: DictConfig, task: TaskFunction) -> JobReturn:
        """Create the run directory of `cfg` and call `task` in it."""
        with self._checking(cfg, cfg.hydra.run.dir):
            return self.run(cfg.hydra.job.config_name, task, [])

    def sweep_checked(self, cfg: DictConfig, task: TaskFunction, over: Callable[[Launcher], Launcher]) -> Any:
        """Let the sweeper and the launcher of `cfg` call `task` once per job; returns the sweeper's return value.

        over: wraps the launcher that `cfg` names; the sweeper gets the result
        """
        with self._checking(cfg, cfg.hydra.sweep.dir), _in_sweepers(over):
            return self.multirun(cfg.hydra.job.config_name, task, [])

    @contextmanager
    def _checking(self, cfg: DictConfig, folder: str) -> Iterator[None]:
        """Use `cfg` instead of a new composition.

        folder: the directory of the run or sweep

        Raises StoreError if Hydra's files cannot be written there; the system names no file if the disk is full.
        """
        self._checked = cfg
        try:
            yield
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            from hookrun.store.files import StoreError, os_reason

            raise StoreError(f"cannot write Hydra's files in {folder}: {os_reason(error)}") from error
        finally:
            self._checked = None

    def jobs(self, cfg: DictConfig) -> list[list[str]] | None:
        """The overrides of each job of a sweep; None where the sweeper chooses its jobs while it runs.

        Raises SpecError for more than MAX_JOBS jobs; counting stops there, even in a range of a billion.
        """
        if cfg.hydra.sweeper.get("_target_") != BASIC_SWEEPER:
            return None
        overrides = self.swept(cfg)
        number = 1
        for override in overrides:
            if override.is_sweep_override() and override.is_discrete_sweep():
                value = override.value()
                # Of a range that is shuffled, the sweep's iterator would first make a list.
                values = value.range() if isinstance(value, RangeSweep) else override.sweep_iterator()
                number *= max(1, sum(1 for _ in islice(values, MAX_JOBS + 1)))
            if number > MAX_JOBS:
                raise spec_error(
                    override.key_or_group,
                    f"the sweep has more than {MAX_JOBS:,} jobs",
                    "sweep over fewer values",
                )
        return [
            job for batch in BasicSweeper.split_arguments(overrides, max_batch_size=None) for job in batch
        ]

    def swept(self, cfg: DictConfig) -> list[Override]:
        """The overrides of a sweep, those of `hydra.sweeper.params` first."""
        lines = [f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items()]
        lines += cast(list[str], OmegaConf.to_container(cfg.hydra.overrides.task))
        return OverridesParser.create(config_loader=self.config_loader).parse_overrides(lines)

    def job_config(self, cfg: DictConfig, overrides: Sequence[str], number: int) -> DictConfig:
        """The configuration of one job of the sweep `cfg`, as the launcher will compose it."""
        with guarded():
            job = numbered(self.config_loader.load_sweep_config(cfg, list(overrides)), number)
        self.place(job)
        return job

    def list_all_config_groups(self, parent: str = "") -> Sequence[str]:
        """The config groups down to the second level: symbolic links in a user's folder may form a cycle."""
        return [] if "/" in parent else super().list_all_config_groups(parent)

    def options(self, group: str) -> list[str]:
        """The names in a config group, including those of its subgroups."""
        return self.config_loader.get_group_options(group)

    def folders(self) -> list[Path]:
        """The config folders on disk, in the order in which they are searched."""
        return [Path(source.path) for source in self.config_loader.get_sources() if source.scheme() == "file"]


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
        with guarded():
            loader = cast(ConfigLoaderImpl, self.app.config_loader)
            return loader._parse_overrides_and_create_caching_repo(self.config_name, self.search)[1]

    @property
    def search(self) -> list[str]:
        """The overrides of `hydra.searchpath`."""
        return [text for text in self.overrides if text.lstrip("+").startswith("hydra.searchpath=")]


def numbered(cfg: DictConfig, number: int) -> DictConfig:
    """Set the number of the job in `cfg`; returns `cfg`."""
    with read_write(cfg.hydra.job), open_dict(cfg.hydra.job):
        cfg.hydra.job.id = str(number)
        cfg.hydra.job.num = number
    return cfg


@contextmanager
def _in_sweepers(over: Callable[[Launcher], Launcher]) -> Iterator[None]:
    """In the block, sweepers get ``over(launcher)`` for their launcher, and Hydra's own does not compose every job.

    Sweepers have no hook for either. The methods are replaced on the classes, since launchers pickle the instances.
    Other sweepers, which choose their jobs while they run, keep their check of each job.
    """
    instantiate = Plugins.instantiate_launcher
    validate = Sweeper.validate_batch_is_legal

    def instantiate_launcher(self: Plugins, *args: Any, **options: Any) -> Launcher:
        return over(instantiate(self, *args, **options))

    def validate_batch_is_legal(self: Sweeper, batch: Sequence[Sequence[str]]) -> None:
        if f"{type(self).__module__}.{type(self).__name__}" != BASIC_SWEEPER:
            validate(self, batch)

    Plugins.instantiate_launcher = instantiate_launcher  # type: ignore[method-assign]
    Sweeper.validate_batch_is_legal = validate_batch_is_legal  # type: ignore[method-assign]
    try:
        yield
    finally:
        Plugins.instantiate_launcher = instantiate  # type: ignore[method-assign]
        Sweeper.validate_batch_is_legal = validate  # type: ignore[method-assign]


def argument_parser() -> argparse.ArgumentParser:
    """The parser of Hydra's flags, without abbreviations; it raises argparse.ArgumentError for a wrong flag."""
    parser = get_args_parser()
    parser.prog = "hookrun"
    parser.allow_abbrev = False  # `--experiment` would be short for `--experimental-rerun`
    parser.exit_on_error = False
    parser.add_argument(
        "--verbose", "-v", action="store_true", help="a sweep prints everything of each job, not one line"
    )
    version_flag = parser._option_string_actions["--version"]
    vars(version_flag)["version"] = f"hookrun {__version__}, Hydra {hydra.__version__}"
    return parser


def parse_override(text: str) -> Override:
    """Parse one override of the command line; raises OverrideParseException."""
    return OverridesParser.create().parse_overrides([text])[0]


def existing_folder(where: str, folder: str | Path) -> Path:
    """The absolute path of a folder; raises SpecError where it does not exist."""
    path = Path(folder).absolute()
    if not path.is_dir():
        raise spec_error(
            where, f"there is no folder {path}", "give the folder that holds experiment/ or hooks/"
        )
    return path


@contextmanager
def opened(main: Path, *extra: Path) -> Iterator[App]:
    """Hydra for the config folder `main`; the folders `extra` are searched before it.

    An application's own Hydra state is restored afterwards. Raises SpecError where HOOKRUN_OUTPUT names a folder that a
    configuration cannot hold.
    """
    output = os.environ.get(OUTPUT) or None
    if output is not None and ("${" in output or "\\" in output):
        raise spec_error(
            OUTPUT,
            f"found {output!r}: a folder with a backslash or `${{` in its name cannot be written in a configuration",
            "name another folder",
        )
    path = create_config_search_path(str(main))
    for folder in extra:
        path.prepend("command-line", f"file://{folder}", anchor=SearchPathQuery(provider="main"))
    sources = {**SourcesRegistry.instance().types, **{source.scheme(): source for source in SOURCES}}
    state = (GlobalHydra, HydraConfig, JobRuntime, SourcesRegistry, VersionBase)
    outer = Singleton._instances
    Singleton._instances = {cls: instance for cls, instance in outer.items() if cls not in state}
    try:
        if hydra.__version__.startswith("1.3"):  # later versions have this behaviour only
            version.setbase("1.3")
        SourcesRegistry.instance().types = sources
        app = App(task_name="hookrun", config_loader=Loader(path, output and os.path.expanduser(output)))
        GlobalHydra.instance().initialize(app)
        yield app
    finally:
        Singleton._instances = outer
