"""Runs of the models in `tests/helpers/strangers`, by the command line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from strangers_by_hand import Stranger

import hookrun
from hookrun.cli import main
from hookrun.store.reader import Run


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pages: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOOKRUN_TRUST", "strangers")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    """Run a stranger by the command line, and open its directory."""
    count = itertools.count(1)

    def run(stranger: Stranger, *overrides: str) -> Run:
        path = tmp_path / f"run{next(count)}"
        assert main([*stranger.overrides, f"hydra.run.dir={path}", *overrides]) == 0
        return hookrun.open_run(path)

    return run
