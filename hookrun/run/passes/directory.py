"""The directory of a run on each rank: new, or an unfinished one, reset to its newest state."""

from __future__ import annotations

import sys
from pathlib import Path

from hookrun.errors import first_lines, spec_error
from hookrun.run.experiment.task import Ready
from hookrun.run.passes.agreement import require_shared_disk
from hookrun.run.passes.resuming import require_same
from hookrun.run.ranks import Ranks
from hookrun.store.files import StoreError
from hookrun.store.run_dir import RunDir
from hookrun.store.states.files import SavedState, newest_state, read_state, remove_unfinished


def create(ready: Ready, path: Path) -> RunDir:
    """The directory of a new run."""
    return RunDir.create(path, _buffer(ready))


def reopen(ready: Ready, path: Path, *, force: bool) -> RunDir:
    """The directory of an unfinished run, reset to its newest undamaged state.

    force: also if the state was saved with another configuration, model, data or version

    Raises SpecError if no state is undamaged, or if the state does not fit; then no file is changed.
    """
    saved, damaged = newest_state(path)
    for line in first_lines(f"{line}; it is ignored" for line in damaged.values()):
        print(line, file=sys.stderr, flush=True)
    if saved is None and damaged and not force:
        raise spec_error(
            "resume",
            f"{path} has no undamaged state of this version",
            "type resume_anyway=true to start from the beginning and lose the records",
        )
    if saved is not None and not force:
        require_same(saved, ready, path)
    if saved is None:
        print(f"no state was saved in {path}: the run starts from the beginning", flush=True)
    run_dir = RunDir.reopen(path, _files_of(saved), _buffer(ready))
    remove_unfinished(path, damaged)
    run_dir.resumed = saved
    return run_dir


def share(ready: Ready, run_dir: RunDir, ranks: Ranks) -> None:
    """Send the directory and its state to the other ranks, which `receive`, and try the shared disk."""
    run_dir.ranks = ranks
    state = run_dir.resumed
    ranks.gathered([str(run_dir.path), None if state is None else [state.path.name, state.digest]])
    require_shared_disk(run_dir.path, ranks, ready, resumes=state is not None)


def receive(ready: Ready, ranks: Ranks) -> RunDir | None:
    """The directory that rank 0 sends; None if another process has just finished the run.

    Raises StoreError if this rank reads another state than rank 0.
    """
    place, state = ranks.gathered(None)[0]
    if place is None:
        return None
    path = Path(place)
    require_shared_disk(path, ranks, ready, resumes=state is not None)
    saved = None
    if state is not None:
        name, digest = state
        saved = read_state(path, name)
        if saved.digest != digest:
            raise StoreError(
                f"{saved.path} is another state than the one that rank 0 reads (rank {ranks.rank})"
            )
    run_dir = RunDir(path, _buffer(ready), ranks, _files_of(saved))
    run_dir.resumed = saved
    return run_dir


def _buffer(ready: Ready) -> int:
    """The bytes of captured rows that may wait to be written."""
    return ready.settings.compute.capture_buffer * 2**20


def _files_of(saved: SavedState | None) -> dict[str, object] | None:
    """How far the files of the run were written when the state was saved."""
    return None if saved is None else saved.part("files")
