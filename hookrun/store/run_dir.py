"""An open run directory: status, plan, metrics and captures, written so that a crash leaves them readable.

torch is not imported at module level, so that the status is written before imports that may fail.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookrun.ranks.alone import ALONE, Ranks, own_rank
from hookrun.store.files import (
    Lines,
    StoreError,
    is_full,
    make_folder,
    os_reason,
    overwrite_json,
    replacing,
    sync_folder,
    write_json,
)
from hookrun.store.format import (
    CAPTURES,
    CHECKPOINTS,
    ENV,
    EXIT_CODES,
    HOOKS,
    INDEX,
    METRICS,
    MODEL,
    PICTURES,
    PLAN,
    PREDICTIONS,
    STATUS,
    Line,
    State,
)
from hookrun.store.manifest import write_manifest
from hookrun.store.records import STREAMS

if TYPE_CHECKING:
    from hookrun.store.captures.write import CaptureWriter
    from hookrun.store.states.files import SavedState
    from hookrun.store.states.position import FolderPosition, PositionRecord

MOST_REASON = 200_000
"""Most characters of the reason in status.json."""

_SHORT = 500
"""The length of a reason that fits into the disk block of the old status.json in any case."""


class RunDir:
    """The directory of a running run; only the process of the run writes to it. `create` makes one.

    path:        the directory
    checkpoints: the folder for checkpoints, made by the first one
    ended:       the status says how the run ended
    buffer:      bytes of memory for captured rows that are not on the disk yet; None: the writer's default
    resumed:     the state that the run was resumed from; None if it was not resumed
    reached:     how far its files reached when it was resumed; None if it was not resumed
    ranks:       the processes of the run
    batches:     the number of batches computed, by all ranks together
    kept:        lines that wait until rank 0 writes them; rank 0 writes its own at once
    """

    kept: Sequence[Line] = ()

    def __init__(self, path: Path, buffer: int | None = None) -> None:
        self.path = path
        self.buffer = buffer
        self.checkpoints = path / CHECKPOINTS
        self.resumed: SavedState | None = None
        self.ranks: Ranks = ALONE
        self.batches = 0
        self._lines = {name: Lines(path / name) for name in STREAMS}
        self.ended = False
        self._place: os.stat_result | None = None
        self._started = ""
        self._manifest = ""
        self.reached: PositionRecord | None = None

    @classmethod
    def create(cls, path: str | os.PathLike[str], buffer: int | None = None) -> RunDir:
        """Make the directory, or use one that does not hold a run yet. StoreError if it holds one."""
        folder = Path(path).absolute()
        names = (STATUS, PLAN, *STREAMS, f"{CAPTURES}/{INDEX}", f"{PREDICTIONS}/{INDEX}")
        found = [name for name in names if (folder / name).exists()]
        if found:
            raise StoreError(
                f"{folder} already holds a run: it has {', '.join(found)}. "
                "Choose another directory (hydra.run.dir)"
            )
        make_folder(folder)
        return cls(folder, buffer)

    @classmethod
    def reopen(
        cls,
        path: str | os.PathLike[str],
        position: Mapping[str, Any] | None,
        buffer: int | None = None,
    ) -> RunDir:
        """Open the directory of an interrupted run to resume it from `position`, a value of `position()`.

        Records after the position are cut off; with None, all of them. The start time of the run is kept.

        StoreError, before anything is changed, if the directory does not hold what the position names.
        """
        from hookrun.store.states.position import cut_back, read_position, started_before

        folder = Path(path).absolute()
        reached = read_position(folder, position)
        cut_back(folder, reached)
        run = cls(folder, buffer)
        run._started = started_before(folder)
        run.go_on_from(reached)
        return run

    def go_on_from(self, reached: PositionRecord) -> None:
        """Set the position that the files have been cut back to."""
        self.reached, self.batches = reached, reached.batches

    def position(self) -> dict[str, Any]:
        """How far each file reaches, all of it on the disk; a resumable state holds it for `reopen`.

        Buffered captured rows are written as shards. StoreError if that fails.
        """
        found = self.written()
        self.sync()
        return found

    def written(self) -> dict[str, Any]:
        """The position; its lines may not be on the disk until `sync` was called."""
        from hookrun.store.states.position import position_key

        return {
            **{position_key(name): lines.size() for name, lines in self._lines.items()},
            "batches": self.batches,
            **self.shard_positions(),
        }

    def sync(self) -> None:
        """Wait until every line so far is on the disk; another thread may add lines meanwhile.

        StoreError if that fails.
        """
        for lines in self._lines.values():
            lines.sync()
        sync_folder(self.path)  # so that the names of the files are on the disk too

    def shard_positions(self) -> dict[str, Any]:
        """How far captures and predictions of all ranks reach; every rank must call it."""
        from hookrun.store.states.position import shard_positions

        return shard_positions(self.ranks, self._writers, self.reached)

    @property
    def _writers(self) -> dict[str, CaptureWriter]:
        """The writers made so far: making another one would import torch."""
        return {name: self.__dict__[name] for name in (CAPTURES, PREDICTIONS) if name in self.__dict__}

    def set_status(
        self,
        status: State,
        reason: str = "",
        exit_code: int | None = None,
        objective: Mapping[str, Any] | None = None,
    ) -> None:
        """Replace status.json. Times are ISO 8601 in UTC; the exit code is the state's own unless given.

        objective: the run's result, as an ObjectiveRecord

        A reason of more than `MOST_REASON` characters is cut. A manifest that was written is named by its SHA-256.
        """
        self._require_same_place()
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._started = self._started or now
        now = max(now, self._started)  # the clock may have been set back in the meantime
        code = EXIT_CODES[status] if exit_code is None else exit_code
        record: dict[str, Any] = {
            "status": status,
            "reason": reason if len(reason) <= MOST_REASON else f"{reason[:MOST_REASON]}… (cut off here)",
            "started": self._started,
            "ended": None if status == "running" else now,
            "pid": os.getpid(),
            "host": platform.node(),
            "exit_code": code,
        }
        if objective is not None:
            record["objective"] = dict(objective)
        if self._manifest:
            record["manifest"] = self._manifest
        try:
            write_json(self.path / STATUS, record)
        except StoreError as error:
            if not is_full(error) or not (self.path / STATUS).exists():
                raise
            overwrite_json(self.path / STATUS, {**record, "reason": reason[:_SHORT]})
        self.ended = status != "running"

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write plan.json."""
        self._write(PLAN, plan)

    def write_env(self, env: Mapping[str, Any]) -> None:
        """Write env.json; `environment()` gives its content."""
        self._write(ENV, env)

    def write_model(self, model: Mapping[str, Any]) -> None:
        """Write model.json: the tree of its modules."""
        self._write(MODEL, model)

    def write_hooks(self, hooks: Mapping[str, Any]) -> None:
        """Write hooks.json: what each hook did at each of its modules."""
        self._write(HOOKS, hooks)

    def write_manifest(self) -> None:
        """Write manifest.json: sizes and hashes of all files at the end of the run, before the final status.

        Only the status and the report may be written afterwards. StoreError if that fails.
        """
        self._require_same_place()
        self._manifest = write_manifest(self.path)

    def append(self, stream: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Append a line for each record to a file of `STREAMS`, all of them or none."""
        self._lines[stream].extend(records)

    def log_metrics(self, **values: Any) -> None:
        """Append one flat line to metrics.jsonl: numbers (NaN and infinities too), texts, None."""
        for name, value in values.items():
            if isinstance(value, Mapping | list | tuple | set):
                raise TypeError(f"the metric {name!r} is a {type(value).__name__}; a line of metrics is flat")
        self.append(METRICS, [values])

    def write_pictures(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write pictures.jsonl: small pictures of samples, one line per sample. StoreError if that fails."""
        with replacing(self.path / PICTURES, flushes_folder=False) as file:
            file.write("".join(f"{json.dumps(line)}\n" for line in lines).encode())

    @cached_property
    def captures(self) -> CaptureWriter:
        """The writer of captures/."""
        return self._writer(CAPTURES)

    @cached_property
    def predictions(self) -> CaptureWriter:
        """The writer of predictions/."""
        return self._writer(PREDICTIONS)

    @property
    def shards(self) -> int:
        """The number of shards of captures and predictions on the disk, with those of earlier processes of the run."""
        writers, reached, rank = self._writers, self.reached, self.ranks.rank
        others = () if reached is None else {CAPTURES, PREDICTIONS} - writers.keys()
        before = [getattr(reached, name).of_rank(rank) for name in others]
        return sum(each.shards for each in (*writers.values(), *before))

    def close(self) -> None:
        """Write what is buffered to the disk and close every file; the status is not changed."""
        with ExitStack() as stack:  # closes all of them even if one fails; the last callback is called first
            for lines in self._lines.values():
                stack.callback(lines.close)
                stack.callback(lines.sync)
            for writer in self._writers.values():
                stack.callback(writer.close)

    def flush(self) -> None:
        """Wait until the captures and predictions so far are on the disk."""
        for writer in self._writers.values():
            writer.flush()

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        self._require_same_place()
        write_json(self.path / name, value, flushes_folder=False)  # writing the status afterwards flushes it

    def _require_same_place(self) -> None:
        """StoreError if the directory was replaced since the run began: another run may have its name."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise StoreError(
                f"the run directory {self.path} cannot be reached: {os_reason(error)}"
            ) from error
        self._place = self._place or found
        if not os.path.samestat(self._place, found):
            raise StoreError(
                f"the run directory {self.path} was removed during the run, and another process has created it again"
            )

    def _writer(self, folder: str) -> CaptureWriter:
        from hookrun.store.captures.write import BUFFERS, SHARD_BYTES, CaptureWriter

        shard_bytes = SHARD_BYTES if self.buffer is None else max(self.buffer // BUFFERS, 1)
        before: FolderPosition | None = getattr(self.reached, folder, None)
        mine = None if before is None else before.of_rank(self.ranks.rank)
        going_on: dict[str, Any] = {} if mine is None else {"goes_on": mine}
        if self.ranks.several or (before is not None and before.in_turns):
            going_on["batch"] = partial(getattr, self, "batches")
            return CaptureWriter(self.path / folder, shard_bytes, self.ranks.rank, **going_on)
        return CaptureWriter(self.path / folder, shard_bytes, own_rank(), **going_on)


def cut_off(status: Mapping[str, Any]) -> str:
    """A note if the status says `running` but its process has ended; else ``""``.

    For a run on another machine this cannot be known: ``""``.
    """
    is_here = status.get("host") in (None, platform.node())
    pid = status.get("pid")
    if status.get("status") != "running" or not is_here or pid is None or _alive(pid):
        return ""
    return f"it says 'running', but there is no process {pid} here: it was cut off"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it belongs to another user
    except OverflowError:
        return False  # not a valid process number
    return True


def update_latest(path: str | os.PathLike[str]) -> str:
    """Point the link `latest` beside the directory at it, atomically.

    A run does not fail if the link cannot be made: returns ``""``, or a note that says why there is none.
    """
    folder = Path(path).absolute()
    link = folder.with_name("latest")
    aside = folder.with_name(f".latest.{os.getpid()}.tmp")
    if link.exists() and not link.is_symlink():
        return f"{link} is not a link: it is left alone and does not point to the newest run"
    try:
        aside.unlink(missing_ok=True)
        os.symlink(folder.name, aside)  # relative, so that the folder can be moved
        os.replace(aside, link)
    except OSError as error:
        return f"{link} does not point to the newest run: {os_reason(error)}"
    return ""
