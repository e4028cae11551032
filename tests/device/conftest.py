"""Tests on a device with a memory of its own, in a process of their own: `pytest tests/device`.

HOOKRUN_TEST_DEVICE names the device: `second` (the default, see tests/helpers/second_device.py), or `cuda` on a machine
that has one. The second device changes torch for the whole process, so tests of other folders do not run beside these:
tests/test_device.py starts two processes for them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import hookrun
from hookrun.cli import main
from hookrun.store.reader import Run

NAME = os.environ.get("HOOKRUN_TEST_DEVICE", "second")
FOLDER = Path(__file__).parent
CHOSEN = pytest.StashKey[bool]()
"""Whether this process runs tests of this folder only."""


def pytest_configure(config: pytest.Config) -> None:
    """Install the second device, unless tests of other folders were chosen too."""
    paths = [Path(arg.split("::")[0]).absolute() for arg in config.args]
    config.stash[CHOSEN] = all(path.is_relative_to(FOLDER) for path in paths)
    if config.stash[CHOSEN] and NAME == "second":
        import second_device

        second_device.install()
    if NAME != "second":  # compute.deterministic warns of an operator that is not
        config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of this folder if others run in this process, and those that count waits where none can."""
    if config.stash[CHOSEN]:
        for item in items if NAME != "second" else ():
            if hasattr(getattr(item, "module", None), "second_device"):
                item.add_marker(pytest.mark.skip(reason=f"waits of {NAME} are not counted"))
        return
    here = [item for item in items if item.path.is_relative_to(FOLDER)]
    items[:] = [item for item in items if not item.path.is_relative_to(FOLDER)]
    config.hook.pytest_deselected(items=here)


@pytest.fixture
def device() -> torch.device:
    """The device under test."""
    return torch.device(NAME)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Each test starts with the same numbers from the device's generator."""
    torch.manual_seed(0)
    yield


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pages: None) -> Callable[..., Run]:
    """Run a command line on a device, by default the one under test, and open its directory."""
    monkeypatch.chdir(tmp_path)
    count = itertools.count(1)

    def run(*overrides: str, on: str = NAME, code: int = 0) -> Run:
        path = tmp_path / f"{on.replace(':', '_')}{next(count)}"
        typed = [f"compute.device={on}", "compute.threads=1", f"hydra.run.dir={path}", *overrides]
        assert main(typed) == code
        return hookrun.open_run(path)

    return run
