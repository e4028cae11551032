"""For the tests of the command line: a config folder of the user's own, and fake tasks that record their calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from hydra.core.plugins import Plugins

from hookrun.errors import CheckFailed, CompileError, Problem
from hookrun.run import tasks
from hookrun.run.experiment.experiment import Experiment
from hookrun.store.run_dir import RunDir

PREPARE = tasks.prepare


@dataclass
class Notes:
    """Fake tasks that compute nothing. The seed of an experiment decides how its run ends.

    1 fails; 2 does not compile; 3 is stopped by a check, 4 ended by one; 130 is interrupted; any other is done.

    mended:  no run fails any more
    went_on: the directories of the runs that went on where one had been
    """

    prepared: list[tuple[Experiment, frozenset[str]]] = field(default_factory=list)
    shown: list[Experiment] = field(default_factory=list)
    ran: list[tuple[int, Path]] = field(default_factory=list)
    went_on: list[Path] = field(default_factory=list)
    mended: bool = False

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: tasks.JobCache | None = None
    ) -> object:
        if cache is not None:  # the jobs of a sweep are really checked before the first of them
            return PREPARE(experiment, trust=trust, cache=cache)
        self.prepared.append((experiment, trust))
        if experiment.settings.seed == 2:
            raise CompileError([Problem("hooks.clip_fc.select", "nothing matches")])
        return experiment

    def show(self, prepared: Experiment) -> None:
        self.shown.append(prepared)
        print(f"the plan of seed {prepared.settings.seed}")

    def execute(self, prepared: Experiment, run_dir: Path, *, resume: bool = False, **_: bool) -> int:
        seed = prepared.settings.seed
        self.ran.append((seed, run_dir))
        self.went_on += [run_dir] if resume else []
        run = RunDir(run_dir) if resume else RunDir.create(run_dir)
        if self.mended:
            run.set_status("done")
            return 0
        if seed == 1:
            run.set_status("failed", "out of luck")
            raise RuntimeError("out of luck")
        if seed == 4:
            run.set_status("failed", "found inf", 3)
            raise CheckFailed("hook nan_hunt at conv1: found inf")
        if seed == 130:
            run.set_status("interrupted")
            raise KeyboardInterrupt
        run.set_status("stopped" if seed == 3 else "done")
        return 3 if seed == 3 else 0

    def objective(self, run_dir: Path) -> float:
        return next(seed for seed, ran in self.ran if ran == run_dir) / 10


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, no_pages: None) -> Notes:
    """Replace the tasks by these fakes, and make no report pages."""
    taken = Notes()
    for name in ("prepare", "show", "objective"):
        monkeypatch.setattr(tasks, name, getattr(taken, name), raising=False)
    monkeypatch.setattr("hookrun.run.execute.execute", taken.execute)
    return taken


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type], None]]:
    """Install a class as one of the package `hydra_plugins`, of which its `__module__` is a part."""
    plugins = Plugins.instance()  # scans for plugins the first time, and must find the real ones
    installed = list[type]()

    def install(kind: type) -> None:
        package = ModuleType("hydra_plugins")
        module = ModuleType(kind.__module__)
        setattr(package, kind.__module__.rpartition(".")[2], module)
        setattr(module, kind.__name__, kind)
        for each in (package, module):
            monkeypatch.setitem(sys.modules, each.__name__, each)
        plugins.register(kind)
        installed.append(kind)

    yield install
    for kind in installed:
        del plugins.class_name_to_class[f"{kind.__module__}.{kind.__name__}"]
        for known in plugins.plugin_type_to_subclass_list.values():
            known[:] = [each for each in known if each is not kind]


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def conf(tmp_path: Path) -> Callable[..., str]:
    """Write files into a user's config folder: ``conf(**{"experiment/mine": text})`` returns its path."""

    def write(**files: str) -> str:
        for name, text in files.items():
            file = tmp_path / "my_conf" / (name if "." in name else f"{name}.yaml")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return str(tmp_path / "my_conf")

    return write
