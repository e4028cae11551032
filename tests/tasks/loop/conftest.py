"""A task's run without the command line: what it does is the test's own function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hookrun.store.run_dir import RunDir
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.execute import run_under_hooks

SMALL: Mapping[str, Any] = {
    "model": {"name": "mlp"},
    "data": {"name": "digits", "batch_size": 4},
    "train": {"limit_batches": 3, "log_every": 2},
    "compute": {"device": "cpu", "threads": 1},
}

Perform = Callable[[RunContext], None]


@pytest.fixture
def performed(tmp_path: Path) -> Callable[..., str | None]:
    """Prepare a task and run a function in its place, with the hooks installed; returns why a check stopped it."""

    def performed(
        perform: Perform, *, path: str = "run", loggers: tuple[str, ...] = (), **sections: Any
    ) -> str | None:
        config = {
            key: {**SMALL.get(key, {}), **part} if isinstance(part, dict) else part
            for key, part in sections.items()
        }
        ready = prepare(parse_experiment({"task": {"name": "evaluate"}, **SMALL, **config}))
        run_dir = RunDir.create(tmp_path / path)
        try:
            return run_under_hooks(ready, run_dir, perform, loggers=loggers)
        finally:
            run_dir.close()

    return performed
