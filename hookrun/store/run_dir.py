"""An open run directory: status, plan, metrics and captures, written so that a crash leaves them readable.

Also the default folder of runs, the finished runs in it, and what env.json says.

torch is not imported at module level, so that the status is written before imports that may fail.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookrun.engine.rank import own_rank
from hookrun.engine.trust import of_environment
from hookrun.errors import whole_characters
from hookrun.run.ranks import ALONE, Ranks
from hookrun.store.captures.shard import index_name, index_names
from hookrun.store.files import (
    Lines,
    StoreError,
    listed_inside,
    make_folder,
    os_errors,
    os_reason,
    overwrite_json,
    read_lines,
    replacing,
    require_size,
    sync_folder,
    write_json,
)
from hookrun.store.format import (
    CAPTURES,
    CHECKPOINTS,
    ENV,
    EXIT_CODES,
    HYDRA,
    INDEX,
    JOB,
    METRICS,
    OUTPUT,
    PICTURES,
    PLAN,
    PREDICTIONS,
    STATUS,
    SUMMARY,
    State,
    decode,
    encode,
)
from hookrun.store.manifest import hashed, manifest_faults, read_manifest, require_unchanged, write_manifest
from hookrun.store.records import Status, fitting, grouped, read_record, typed_record
from hookrun.store.states.position import PositionRecord, cut_back
from hookrun.store.studies import streams
from hookrun.terminal import noted
from hookrun.version import __version__

if TYPE_CHECKING:
    from hookrun.store.captures.write import CaptureWriter
    from hookrun.store.folds import Folds
    from hookrun.store.states.files import SavedState


MOST_REASON = 200_000
"""Most characters of the reason in status.json."""

_LOOKS_AGAIN = 0.2
"""Seconds after which a file of another rank that is not there is looked for again."""

_SHORT = 500
"""The length of a reason that fits into the disk block of the old status.json in any case."""

MOST_KEPT = 256
"""The number of lines of hooks that a rank keeps before those of all ranks are written."""


class RunDir:
    """The directory of a running run. `create` makes one.

    Rank 0 writes to it. The other ranks write only their captured rows. Where there are several, each keeps the lines
    of its hooks until `take_kept`, in which rank 0 writes those of all in the order of the steps.

    path:        the directory
    checkpoints: the folder for checkpoints, made by the first one
    ended:       the status says how the run ended
    buffer:      bytes of memory for captured rows that are not on the disk yet; None: the writer's default
    resumed:     the state that the run was resumed from; None if it was not resumed
    reached:     how far its files reached when it was resumed
    ranks:       the processes of the run
    batches:     the number of batches computed, by all ranks together
    position:    of the files if the run is resumed, a value of `position()`; None if it is not resumed
    """

    def __init__(
        self,
        path: Path,
        buffer: int | None = None,
        ranks: Ranks = ALONE,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.buffer = buffer
        self.ranks = ranks
        self.reached = fitting(f"{path}: not a position of a run directory", position or {}, PositionRecord)
        self.batches = self.reached.batches
        self._before = {CAPTURES: self.reached.captures, PREDICTIONS: self.reached.predictions}
        self.checkpoints = path / CHECKPOINTS
        self.resumed: SavedState | None = None
        self.ended = False
        self._lines = {name: Lines(path / name) for name in streams()}
        self._writers: dict[str, CaptureWriter] = {}
        self._kept = list[list[Any]]()  # stream, when, line
        self._place: os.stat_result | None = None
        self._started = ""
        self._manifest = ""
        self._written = set[str]()
        for name, before in self._before.items():
            for rank, part in enumerate(before.parts):
                if part.shards:
                    self._written.add(f"{name}/{index_name(rank)}")
        self._of_ranks = dict[str, Any]()

    @classmethod
    def create(cls, path: str | os.PathLike[str], buffer: int | None = None) -> RunDir:
        """Make the directory, or use one that does not hold a run yet. StoreError if it holds one."""
        folder = Path(path).absolute()
        names = [STATUS, PLAN, *streams()]
        for name in (CAPTURES, PREDICTIONS):
            names += [f"{name}/{index}" for index in index_names(folder / name)]
        files = [name for name in names if (folder / name).exists()]
        if files:
            raise StoreError(
                f"{folder} already holds a run: it has {', '.join(files)}. "
                "Choose another directory (hydra.run.dir)"
            )
        above = run_above(folder)
        if above is not None:
            raise StoreError(f"{folder} is inside of {above}, which holds a run. Choose another directory")
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
        run = cls(Path(path).absolute(), buffer, position=position)
        cut_back(run.path, run.reached)
        with suppress(StoreError):  # cut off, or never written: the run starts now
            run._started = typed_record(run.path / STATUS, Status).started or ""
        return run

    def position(self) -> dict[str, Any]:
        """How far the files of all ranks reach; a resumable state holds it for `reopen`. Every rank must call it.

        Buffered captured rows are written as shards, StoreError if that fails; the lines are on the disk after `sync`.
        """
        shards: dict[str, Any] = {}
        for name, before in self._before.items():
            if name in self._writers:
                shards[name] = self._writers[name].position()
            else:
                shards[name] = before.of_rank(self.ranks.rank).model_dump()
        of_ranks = self.ranks.gathered(shards)
        if not self.ranks.is_main:
            return {}
        position: dict[str, Any] = {}
        for name, lines in self._lines.items():
            position[name.removesuffix(".jsonl")] = lines.size()
        position["batches"] = self.batches
        for name, before in self._before.items():
            others = [of_rank[name] for of_rank in of_ranks[1:]]
            # those of ranks that the resumed run does not have
            others += [part.model_dump() for part in before.others[self.ranks.size - 1 :]]
            position[name] = {**of_ranks[0][name], "others": others}
        return position

    def sync(self) -> None:
        """Wait until every line so far is on the disk; another thread may add lines meanwhile.

        StoreError if that fails.
        """
        for lines in self._lines.values():
            lines.sync()
        sync_folder(self.path)  # so that the names of the files are on the disk too

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
        That the folder of a written final status cannot be flushed is only printed.
        """
        if not self.ranks.is_main:
            self.ended = status != "running"
            return
        self._require_same_place()
        if status == "running":
            self._written.update(name for name, _ in listed_inside(self.path, HYDRA))
            if (self.path / JOB).exists():
                self._written.add(JOB)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._started = self._started or now
        now = max(now, self._started)  # the clock may have been set back in the meantime
        if exit_code is None:
            exit_code = EXIT_CODES[status]
        if len(reason) > MOST_REASON:
            reason = f"{reason[:MOST_REASON]}… (cut off here)"
        record: dict[str, Any] = {
            "status": status,
            "reason": reason,
            "started": self._started,
            "ended": None if status == "running" else now,
            "pid": os.getpid(),
            "host": platform.node(),
            "exit_code": exit_code,
        }
        if objective is not None:
            record["objective"] = dict(objective)
        if status != "running":
            from hookrun.store.description import describe

            record[SUMMARY] = asdict(describe(self.path)[0])
        if self._manifest and status in ("done", "stopped"):  # a failure at the end adds error.txt
            record["manifest"] = self._manifest
        try:
            write_json(self.path / STATUS, record, flushes_folder=False)
        except StoreError as error:
            code = getattr(error.__cause__, "errno", None)
            if code not in (errno.ENOSPC, errno.EDQUOT) or not (self.path / STATUS).exists():
                raise
            record.pop(SUMMARY, None)
            overwrite_json(self.path / STATUS, {**record, "reason": reason[:_SHORT]})
        self.ended = status != "running"
        try:
            sync_folder(self.path)
        except StoreError as error:
            if not self.ended:
                raise
            print(noted(str(error)), file=sys.stderr, flush=True)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file of the run, such as plan.json."""
        if self.ranks.is_main:
            self._require_same_place()
            self.wrote(self.path / name)
            write_json(
                self.path / name, value, flushes_folder=False
            )  # writing the status afterwards flushes it

    def wrote(self, path: Path) -> None:
        """The file must be there when the run ends."""
        self._written.add(path.relative_to(self.path).as_posix())

    def see_ranks(self, within: float) -> None:
        """Wait until rank 0 sees all that the ranks have written; every rank calls it, after `close`.

        within: seconds to wait for a disk that shows late what another node has written

        StoreError on rank 0 for a file that it does not see whole, and for captured rows that are in no index.
        """
        of_ranks = self.ranks.gathered([platform.node(), {} if self.ranks.is_main else self._indexes()])
        end = time.monotonic() + within
        while self.ranks.largest([bool(unseen := self._unseen(of_ranks))])[0]:
            if unseen and time.monotonic() > end:
                raise StoreError(unseen)
            time.sleep(_LOOKS_AGAIN)
        for _, indexes in of_ranks:
            self._of_ranks |= indexes
        if self.ranks.several and self.ranks.is_main and CAPTURES in self._writers:
            self._require_rows()

    def _indexes(self) -> dict[str, Any]:
        """The indexes of this rank -> bytes and SHA-256."""
        indexes: dict[str, Any] = {}
        for folder in self._before:
            if self._writer(folder).shards:
                name = f"{folder}/{index_name(self.ranks.rank)}"
                indexes[name] = list(hashed(self.path / name, self.path))
        return indexes

    def _unseen(self, of_ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """What another rank has written and rank 0 does not see whole; ``""`` if it sees everything."""
        for rank, (host, indexes) in enumerate(of_ranks if self.ranks.is_main else ()):
            for name, (size, sha256) in indexes.items():
                index = self.path / name
                try:
                    require_unchanged(index, self.path, size, sha256, says=f"rank {rank}")
                    for _, shard in read_lines(index, self.path):
                        name = f"{index.parent.name}/{shard['shard']}"
                        size = shard["bytes"]
                        require_size(self.path / name, self.path, size, says="its index")
                except StoreError as error:
                    return (
                        f"rank {rank} on {host} wrote {name} ({size:,} bytes), which rank 0 does not see: the run "
                        f"directory has to be on a disk that all nodes share ({error})"
                    )
        return ""

    def _require_rows(self) -> None:
        """StoreError if the indexes do not hold as many rows as the ranks say that they have captured."""
        rows = Counter[tuple[str, str]]()
        for name in index_names(self.path / CAPTURES):
            for _, shard in read_lines(self.path / CAPTURES / name, self.path):
                for entry in shard["entries"]:
                    rows[entry["hook"], entry["module"]] += entry["rows"]
        for (hook, module), count in self.captures.counts.items():
            if count.rows != rows[hook, module]:
                there = f"{self.path / CAPTURES} has {rows[hook, module]:,}"
                raise StoreError(
                    f"the ranks captured {count.rows:,} rows of {hook} at {module!r}, and {there}"
                )

    def write_manifest(self) -> None:
        """Write manifest.json: sizes and hashes of all files at the end of the run, before the final status.

        Only the status and the report may be written afterwards. StoreError if that fails, or if a file is missing or
        cut off that this process or another rank has written, or Hydra before it.
        """
        if self.ranks.is_main:
            self._require_same_place()
            self._written.update(name for name, lines in self._lines.items() if lines.count)
            self._written.update(f"{name}/{INDEX}" for name, writer in self._writers.items() if writer.shards)
            self._manifest = write_manifest(self.path, self._written, self._of_ranks)

    def append(self, stream: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Append a line for each record to a file of `streams()`, all of them or none.

        Several ranks keep them, as plain JSON values, since an action may record numbers of NumPy and torch; rank 0
        writes the metrics, which are means over all ranks.
        """
        if not self.ranks.several or (stream == METRICS and self.ranks.is_main):
            self._lines[stream].extend(records)
        elif stream != METRICS:
            for record in records:
                line = decode(encode(record).encode())
                self._kept.append([stream, self._when(line), line])

    def _when(self, line: Mapping[str, Any]) -> list[int]:
        """The epoch and step of a line of a hook; the lines of a sample have the number of the batch."""
        step = line.get("step")
        if step is None:
            return [self.batches, 0]
        return [line.get("epoch") or 0, step]

    @property
    def keeps_many(self) -> bool:
        """Whether this rank keeps so many lines that `take_kept` should be called."""
        return len(self._kept) > MOST_KEPT

    def take_kept(self) -> None:
        """Rank 0 writes the lines that the ranks keep, which are of one pass; every rank must call it."""
        kept = self._kept
        self._kept = []
        of_ranks = self.ranks.gathered([] if self.ranks.is_main else kept)
        if self.ranks.is_main:
            self._write_kept([*kept, *chain.from_iterable(of_ranks[1:])])

    def _write_kept(self, kept: Sequence[list[Any]]) -> None:
        """Append lines in the order of their steps; those of one step stay in the order of the ranks."""
        ordered = sorted(kept, key=itemgetter(1))
        for stream, lines in grouped(ordered, itemgetter(0)).items():
            self._lines[stream].extend([line for _, _, line in lines])

    def log_metrics(self, **values: Any) -> None:
        """Append one flat line to metrics.jsonl: numbers (NaN and infinities too), texts, None."""
        for name, value in values.items():
            if isinstance(value, Mapping | list | tuple | set):
                raise TypeError(f"the metric {name!r} is a {type(value).__name__}; a line of metrics is flat")
        self.append(METRICS, [values])

    def write_pictures(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write pictures.jsonl: small pictures of samples, one line per sample. StoreError if that fails."""
        if not self.ranks.is_main:
            return
        with replacing(self.path / PICTURES, flushes_folder=False) as file:
            file.write("".join(f"{json.dumps(line)}\n" for line in lines).encode())
        self.wrote(self.path / PICTURES)

    def write_folds(self, folds: Folds) -> None:
        """Write folds.safetensors anew, if there are any. StoreError if that fails."""
        from hookrun.store.folds import write_folds

        if folds and self.ranks.is_main:
            self.wrote(write_folds(self.path, folds))

    @property
    def captures(self) -> CaptureWriter:
        """The writer of captures/."""
        return self._writer(CAPTURES)

    @property
    def predictions(self) -> CaptureWriter:
        """The writer of predictions/."""
        return self._writer(PREDICTIONS)

    @property
    def shards(self) -> int:
        """The number of shards of captures and predictions on the disk, with those of earlier processes of the run."""
        return sum(self._writer(name).shards for name in self._before)

    def close(self) -> None:
        """Write what is buffered to the disk and close every file; the status is not changed."""
        with ExitStack() as stack:  # closes all of them even if one fails; the last callback is called first
            for lines in self._lines.values():
                stack.callback(lines.close)
                stack.callback(lines.sync)
            for writer in self._writers.values():
                stack.callback(writer.close)
            if self.ranks.is_main:  # after a failure no rank takes them
                self._write_kept(self._kept)

    def flush(self) -> None:
        """Wait until the captures and predictions so far are on the disk."""
        for writer in self._writers.values():
            writer.flush()

    def _require_same_place(self) -> None:
        """StoreError if the directory was replaced since the run began: another run may have its name."""
        with os_errors(f"the run directory {self.path} cannot be reached"):
            place = os.stat(self.path)
        if self._place is None:
            self._place = place
        if not os.path.samestat(self._place, place):
            raise StoreError(
                f"the run directory {self.path} was removed during the run, and another process has created it again"
            )

    def _writer(self, name: str) -> CaptureWriter:
        """The writer of a folder of shards, made when it is first used, since it imports torch."""
        if name not in self._writers:
            from hookrun.store.captures.write import BUFFERS, SHARD_BYTES, CaptureWriter

            shard_bytes = SHARD_BYTES
            if self.buffer is not None:
                shard_bytes = max(self.buffer // BUFFERS, 1)
            rank = own_rank()
            batch = None
            if self.ranks.several or any(part.turns for part in self._before[name].parts):
                rank = self.ranks.rank
                batch = partial(getattr, self, "batches")
            before = self._before[name].of_rank(self.ranks.rank)
            self._writers[name] = CaptureWriter(self.path / name, shard_bytes, rank, batch, before)
        return self._writers[name]


def run_above(folder: Path) -> Path | None:
    """The nearest directory above the folder that holds a run; None if there is none."""
    for above in folder.resolve().parents:
        if all(os.path.isfile(above / name) for name in (STATUS, ENV)):
            return above
    return None


def cut_off(status: Mapping[str, Any]) -> str:
    """A note if the status says `running` but its process has ended; else ``""``.

    For a run on another machine this cannot be known: ``""``.
    """
    pid = status.get("pid")
    if (
        status.get("status") == "running"
        and pid is not None
        and status.get("host") in (None, platform.node())
    ):
        try:
            os.kill(pid, 0)
        except PermissionError:  # it belongs to another user
            return ""
        except (ProcessLookupError, OverflowError):  # or it is not a valid process number
            return f"it says 'running', but there is no process {pid} here: it was cut off"
    return ""


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


def environment(argv: Sequence[str] | None = None, device: str | None = None) -> dict[str, Any]:
    """Versions, machine and command line of a run; of environment variables only the packages in HOOKRUN_TRUST.

    argv:   the command line; default: that of this process
    device: the device that the run uses; default: the machine's accelerator, else cpu
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    chosen = accelerator or torch.device("cpu")
    if device is not None:
        chosen = torch.device(device)
    device_name = platform.processor()
    if accelerator is not None and chosen.type == accelerator.type:
        module = torch.get_device_module(chosen)
        if hasattr(module, "get_device_name"):
            device_name = module.get_device_name(chosen)
    of_cuda: dict[str, Any] = {}
    if chosen.type == "cuda":
        of_cuda["cublas_workspace"] = os.environ.get(WORKSPACE)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "hydra": _version("hydra-core"),
        "hookrun": __version__,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": str(chosen),
        "device_name": device_name,
        **of_cuda,
        "threads": torch.get_num_threads(),
        "argv": list(map(whole_characters, sys.argv if argv is None else argv)),
        "trusted": sorted(of_environment()),
    }


@cache
def _version(package: str) -> str | None:
    """The installed version; None if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable without which cuBLAS may give other sums in each run."""

OUTPUTS = "outputs"


def outputs_folder() -> Path:
    """The folder of single runs, as an absolute path: `outputs` in HOOKRUN_OUTPUT, else in the current directory."""
    return Path(os.path.abspath(Path(os.path.expanduser(os.environ.get(OUTPUT, "")), OUTPUTS)))


def newest_unchanged(folder: Path) -> Path | None:
    """The newest run in `folder` that is done and whose files have not changed since; None if there is none.

    Reads every file of the run.
    """
    for run, status in _ended(folder):
        with suppress(StoreError):  # a run that cannot be read is not reused
            if status["status"] == "done":
                manifest = read_manifest(run, status["manifest"])
                if not any(manifest_faults(run, manifest, {})):
                    return run
    return None


def newest_finished(folder: Path) -> Path:
    """The directory of the run in `folder` that ended last. StoreError if there is none."""
    ended = sorted((status["ended"], run) for run, status in _ended(folder) if status.get("ended"))
    if not ended:
        raise StoreError(f"there is no finished run in {folder}: run one first, or name a run directory")
    return ended[-1][1]


def _ended(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The directories of runs with a manifest and their status, the newest name first, without unreadable ones."""
    for path in sorted(folder.glob(f"*/{STATUS}"), reverse=True):
        if not path.parent.is_symlink():
            with suppress(StoreError):
                status = read_record(path, Status)
                if status.get("manifest"):
                    yield path.parent, status
