"""A command pauses Python's garbage collector while it imports, and leaves it as it was found."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from hookrun import tasks
from hookrun.cli import main
from hookrun.cli.garbage import collector_of_command, collector_of_jobs, release_memory

SMALL = ["compute.threads=1", "train.epochs=1", "train.limit_batches=1", "train.checkpoint.save=none"]


@pytest.fixture
def fresh() -> Iterator[Callable[[], None]]:
    """Call it to have no object left out of collection, as in a new process."""
    yield gc.unfreeze
    gc.enable()
    gc.unfreeze()


def test_a_run_collects_its_garbage_but_not_the_modules(cwd, fresh, monkeypatch, no_pages) -> None:
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


def test_a_caller_who_has_switched_it_off_or_frozen_objects_finds_that_again(cwd, fresh, no_pages) -> None:
    fresh()
    gc.disable()
    assert main(SMALL) == 0
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    assert main(SMALL) == 0
    assert gc.isenabled() and 0 < gc.get_freeze_count() <= frozen


def test_what_the_first_job_leaves_is_not_examined_again_and_what_the_second_leaves_is(fresh) -> None:
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
