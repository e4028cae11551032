"""A command pauses Python's garbage collector while it imports modules, and restores its state at the end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from hookrun import tasks
from hookrun.cli import garbage, main
from hookrun.cli.garbage import collector_of_command, collector_of_jobs, release_memory

SMALL = ["compute.threads=1", "train.epochs=1", "train.limit_batches=1", "train.checkpoint.save=none"]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that unfreezes all objects, as in a new process; they are frozen again for later tests."""
    monkeypatch.setattr(garbage, "_is_frozen", lambda: gc.get_freeze_count() > 0)
    yield gc.unfreeze
    gc.enable()
    gc.collect()
    gc.freeze()


def test_a_run_collects_its_own_garbage_but_skips_the_modules(cwd, fresh, monkeypatch, no_pages) -> None:
    fresh()
    seen = list[tuple[bool, bool]]()
    run = tasks.run

    def watched(*args, **options) -> int:
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        return run(*args, **options)

    monkeypatch.setattr(tasks, "run", watched)
    for typed in ([], ["-m", "seed=0,1"]):
        assert main([*typed, *SMALL]) == 0
        assert gc.isenabled() and not gc.get_freeze_count(), "as before the command"
    assert seen == [(True, True)] * 3
    assert main(["experiment=clip_fx"]) == 2
    assert main(["--cfg", "job"]) == 0
    assert gc.isenabled() and not gc.get_freeze_count()


def test_the_collector_state_of_the_caller_is_restored(cwd, fresh, no_pages) -> None:
    fresh()
    gc.disable()
    assert main(SMALL) == 0
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    assert main(SMALL) == 0
    assert gc.isenabled() and 0 < gc.get_freeze_count() <= frozen


def test_objects_that_the_first_job_leaves_are_skipped_later_and_those_of_the_second_are_not(fresh) -> None:
    fresh()
    counts = list[int]()
    with collector_of_command(), collector_of_jobs():
        for _ in range(3):
            counts.append(gc.get_freeze_count())
            kept = [[number] for number in range(1000)]
            release_memory()
    first, second, third = counts
    assert second >= first + 1000 > 1000
    assert third <= second, len(kept)
