"""What all tests share: quick runs without pages, less work for the garbage collector."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from by_torch import statistics_by_torch
from quick_collector import quick_collector
from quick_coverage import quick_coverage
from quick_hydra import quick_hydra
from quick_torch import quick_torch
from readable_ids import readable_id
from warm_processes import WarmProcesses, WarmServer

# Before torch is imported, for this process and those that tests start. The models are small, and threads that compete
# for cores are many times slower; and loops by hand must round as runs with compute.threads=1 do.
os.environ["OMP_NUM_THREADS"] = "1"

SERVER = pytest.StashKey[WarmServer]()
"""What forks processes for the tests: one for all workers of xdist."""

FROZEN = pytest.StashKey[int]()
"""How many modules had been imported when the collector last set its objects aside."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks. The width of output is set by the tests themselves: xdist sets COLUMNS."""
    os.environ.pop("COLUMNS", None)
    quick_collector()
    if hasattr(os, "fork") and not hasattr(config, "workerinput"):
        config.stash[SERVER] = WarmServer()
    config.addinivalue_line(
        "markers",
        "before_compilers: runs before all other tests. After a compilation that failed, torch leaves Python with one "
        "more reference in each call, and hookrun overwrites no output then",
    )
    config.addinivalue_line(
        "markers", "takes_long: runs early, so that at the end no process of xdist has to wait for it"
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    """Once pytest-cov has started, if it is asked to."""
    quick_coverage()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests marked `before_compilers` are the first ones, then those that take long; others keep their order."""
    items.sort(key=lambda item: item.get_closest_marker("takes_long") is None)
    items.sort(key=lambda item: item.get_closest_marker("before_compilers") is None)


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Ids by which `-k` finds a test, in place of `keys0`, `keys1`, ..."""
    return readable_id(val)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist where the server listens."""
    if server := node.config.stash.get(SERVER, None):
        node.workerinput["warm_server"] = server.address


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set aside what imports made: each run of a command ends with a collection, which would go through all of it."""
    modules = len(sys.modules)
    if modules > item.config.stash.get(FROZEN, 0) + 20:
        item.config.stash[FROZEN] = modules
        gc.collect()
        gc.freeze()
        if "torch" in sys.modules:
            quick_torch()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Undo `gc.freeze` after a last collection of pytest, so that the process ends as any other."""
    gc.unfreeze()
    if server := config.stash.get(SERVER, None):
        server.close()


@pytest.fixture(scope="session")
def warm(pytestconfig: pytest.Config) -> WarmProcesses:
    """Starts processes that have imported torch and hookrun."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    if server := pytestconfig.stash.get(SERVER, None):
        return WarmProcesses(server.address)
    return WarmProcesses(pytestconfig.workerinput["warm_server"])  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def _quick_hydra() -> Iterator[None]:
    """Most of a small run's time is Hydra's; processes that a test starts use plain Hydra."""
    with quick_hydra():
        yield


@pytest.fixture
def no_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and sweeps draw no page, which takes a fifth of a small run's time, unless the test asks for `pages`."""
    if "pages" in request.fixturenames:
        return
    from hookrun.command.sweeps import jobs, sweep

    for module in (jobs, sweep):
        monkeypatch.setattr(module, "make_page", lambda folder, says=True: None)


@pytest.fixture(scope="session")
def by_torch() -> Callable[[Any], dict[str, float]]:
    """Every statistic of a tensor, computed by torch in float64."""
    return statistics_by_torch


@pytest.fixture
def pages() -> None:
    """For a test that reads a page, or messages about it, in a folder whose tests draw none."""
