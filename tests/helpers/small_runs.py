"""Small runs, in their own folder."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import hookrun
from hookrun import data
from hookrun.cli import main
from hookrun.command.compose.compose import compose_dict
from hookrun.errors import HookrunError, Refusal
from hookrun.run.experiment.prepared import Prepared
from hookrun.run.passes.context import RunContext
from hookrun.run.passes.open_run import run_under_hooks
from hookrun.run.tasks import parse_experiment, prepare
from hookrun.store.format import CONFIG
from hookrun.store.reader import Run
from hookrun.store.run_dir import RunDir

SMALL = ("compute.device=cpu", "compute.threads=1")

SMALL_SECTIONS: Mapping[str, Any] = {
    "model": {"name": "mlp"},
    "data": {"name": "digits", "batch_size": 4},
    "train": {"limit_batches": 3, "log_every": 2},
    "compute": {"device": "cpu", "threads": 1},
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pages: None) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    """Run a command line that must end with `code`, and open its directory."""
    count = itertools.count(1)

    def run(*overrides: str, code: int = 0) -> Run:
        path = tmp_path / f"run{next(count)}"
        assert main([*SMALL, f"hydra.run.dir={path}", *overrides]) == code
        return hookrun.open_run(path)

    return run


def _performed_alone(path: Path, overrides: Sequence[str], *, stops: bool = False) -> Run:
    """Run the task of a command line alone, in a directory that others read as that of a whole run.

    stops: a check ends it
    """
    config = compose_dict([*SMALL, *overrides])
    prepared = prepare(parse_experiment(config))
    run_dir = RunDir.create(path, prepared.settings.compute.capture_buffer * 2**20)
    (path / CONFIG).parent.mkdir()
    (path / CONFIG).write_text(yaml.safe_dump(config))
    try:
        assert (prepared.task.execute(prepared, run_dir) is not None) == stops
    finally:
        run_dir.close()
    run_dir.write_manifest()
    run_dir.set_status("done")
    return hookrun.open_run(path)


@pytest.fixture
def executed(tmp_path: Path) -> Callable[..., Run]:
    """Run the task of a command line alone, without what a run does before and after it, and open its directory."""
    count = itertools.count()

    def executed(*overrides: str, stops: bool = False) -> Run:
        return _performed_alone(tmp_path / f"executed{next(count)}", overrides, stops=stops)

    return executed


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """As `executed`, but the tests of a file that type the same command line share its run, which they only read."""
    folder = tmp_path_factory.mktemp("shared")
    runs = dict[tuple[str, ...], Run]()

    def shared(*overrides: str) -> Run:
        if overrides not in runs:
            runs[overrides] = _performed_alone(folder / f"run{len(runs)}", overrides)
        return runs[overrides]

    return shared


@pytest.fixture
def ready() -> Callable[..., Any]:
    """Prepare what a command line would run, and do not run it."""

    def ready(*overrides: str) -> Any:
        return prepare(parse_experiment(compose_dict([*SMALL, *overrides])))

    return ready


@pytest.fixture
def fails(executed: Callable[..., Run]) -> Callable[..., str]:
    """The error that ends the task of a command line, which could be prepared."""

    def fails(*overrides: str) -> str:
        with pytest.raises(HookrunError) as raised:
            executed(*overrides)
        assert not isinstance(raised.value, Refusal), "it is refused before the run"
        return str(raised.value)

    return fails


def _files(folder: Path) -> set[Path]:
    """All files except the bytecode of packages that were imported from there."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The error output of a command line that is refused and leaves no files."""

    def refused(*overrides: str) -> str:
        before = _files(tmp_path)
        assert main([*SMALL, *overrides]) == 2
        said = capsys.readouterr().err
        assert _files(tmp_path) == before, "no run directory"
        assert "Traceback" not in said and len(said.splitlines()) < 25
        return str(said)

    return refused


@pytest.fixture
def no_data_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("the data was read")

    monkeypatch.setattr(data, "load", read)


@pytest.fixture
def hook() -> Callable[..., str]:
    """Makes an override that adds a hook called `h`."""

    def hook(**keys: Any) -> str:
        body = ", ".join(f"{key}: {value}" for key, value in keys.items())
        return f"+hooks.h={{{body}}}"

    return hook


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes modules of the user's own, `trusted(NAME=SOURCE)`, which are trusted."""
    written = list[str]()

    def trusted(**modules: str) -> None:
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
            sys.modules.pop(name, None)
        written.extend(modules)
        monkeypatch.setenv("HOOKRUN_TRUST", ",".join(written))

    yield trusted
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture
def own_model(trusted: Callable[..., None]) -> Callable[[str], tuple[str, ...]]:
    """Makes the overrides for a network of the user's own from the body of its class; images are [B, 1, 8, 8]."""

    def own_model(body: str) -> tuple[str, ...]:
        head = "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
        trusted(own_models=head + textwrap.indent(textwrap.dedent(body), "    "))
        return "model=python", "model.factory=own_models:Net"

    return own_model


Perform = Callable[[RunContext], None]


@pytest.fixture
def performed(tmp_path: Path) -> Callable[..., str | None]:
    """Prepare a task and run a function in its place, with the hooks installed; returns why a check stopped it."""

    def performed(
        perform: Perform, *, path: str = "run", loggers: tuple[str, ...] = (), **sections: Any
    ) -> str | None:
        config = {
            key: {**SMALL_SECTIONS.get(key, {}), **part} if isinstance(part, dict) else part
            for key, part in sections.items()
        }
        ready = prepare(parse_experiment({"task": {"name": "evaluate"}, **SMALL_SECTIONS, **config}))
        assert isinstance(ready, Prepared)
        run_dir = RunDir.create(tmp_path / path)
        try:
            return run_under_hooks(ready, run_dir, perform, loggers=loggers)
        finally:
            run_dir.close()

    return performed
