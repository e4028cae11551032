"""An open run directory: status, plan, metrics and captures, written so that a crash leaves them readable.

Nothing at the top imports torch: a run has a status before the imports that may fail.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookrun.store.files import (
    Lines,
    StoreError,
    is_full,
    make_folder,
    os_reason,
    overwrite_json,
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
    PLAN,
    PREDICTIONS,
    SAMPLES,
    STATS,
    STATUS,
    TOKENS,
    State,
)
from hookrun.store.manifest import write_manifest
from hookrun.version import __version__

if TYPE_CHECKING:
    from hookrun.store.writer import CaptureWriter

MOST_REASON = 200_000
"""Characters of the reason in status.json."""

_SHORT = 500
"""Characters of a reason that surely find room in the block of the status before."""


class RunDir:
    """The directory of one run under way; only the process that runs writes to it. `create` makes one.

    path:        the directory
    checkpoints: the folder for checkpoints, made by the first one
    buffer:      bytes of memory for captured rows on their way to the disk; None: as the writer has it
    """

    def __init__(self, path: Path, buffer: int | None = None) -> None:
        self.path = path
        self.buffer = buffer
        self.checkpoints = path / CHECKPOINTS
        self._metrics = Lines(path / METRICS)
        self._stats = Lines(path / STATS)
        self._samples = Lines(path / SAMPLES)
        self._tokens = Lines(path / TOKENS)
        self._started = ""
        self._manifest = ""

    @classmethod
    def create(cls, path: str | os.PathLike[str], buffer: int | None = None) -> RunDir:
        """Make the directory, or take one that holds no run yet. StoreError if it holds one."""
        folder = Path(path).absolute()
        names = (STATUS, PLAN, METRICS, STATS, f"{CAPTURES}/{INDEX}", f"{PREDICTIONS}/{INDEX}")
        found = [name for name in names if (folder / name).exists()]
        if found:
            raise StoreError(
                f"{folder} already holds a run: it has {', '.join(found)}. "
                "Choose another directory (hydra.run.dir)"
            )
        make_folder(folder)
        return cls(folder, buffer)

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
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._started = self._started or now
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

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write plan.json."""
        write_json(self.path / PLAN, plan)

    def write_env(self, env: Mapping[str, Any]) -> None:
        """Write env.json; `environment()` gives its content."""
        write_json(self.path / ENV, env)

    def write_model(self, model: Mapping[str, Any]) -> None:
        """Write model.json: the tree of its modules."""
        write_json(self.path / MODEL, model)

    def write_hooks(self, hooks: Mapping[str, Any]) -> None:
        """Write hooks.json: what came of each hook at each of its modules."""
        write_json(self.path / HOOKS, hooks)

    def write_manifest(self) -> None:
        """Write manifest.json: what every file of the run is at its end, before the status says that it is over.

        Nothing but the status and the report may be written afterwards. StoreError if the disk refuses.
        """
        self._manifest = write_manifest(self.path)

    def log_metrics(self, **values: Any) -> None:
        """Append one flat line to metrics.jsonl: numbers (NaN and infinities too), texts, None."""
        for name, value in values.items():
            if isinstance(value, Mapping | list | tuple | set):
                raise TypeError(f"the metric {name!r} is a {type(value).__name__}; a line of metrics is flat")
        self._metrics.append(values)

    def log_stats(self, record: Mapping[str, Any]) -> None:
        """Append one line to stats.jsonl."""
        self._stats.append(record)

    def log_sample(self, record: Mapping[str, Any]) -> None:
        """Append one line to samples.jsonl: what a sample is called."""
        self._samples.append(record)

    def log_token(self, token: int, text: str) -> None:
        """Append one line to tokens.jsonl: the text of a token that captured rows are of."""
        self._tokens.append({"token": token, "text": text})

    @cached_property
    def captures(self) -> CaptureWriter:
        """The writer of captures/."""
        return self._writer(CAPTURES)

    @cached_property
    def predictions(self) -> CaptureWriter:
        """The writer of predictions/."""
        return self._writer(PREDICTIONS)

    def close(self) -> None:
        """Write what is buffered and close every file; the status stays as it was set."""
        with ExitStack() as stack:  # each is closed, whichever of them fails
            stack.callback(self._metrics.close)
            stack.callback(self._stats.close)
            stack.callback(self._samples.close)
            stack.callback(self._tokens.close)
            for name in ("captures", "predictions"):
                if name in self.__dict__:  # a writer that nobody asked for would import torch
                    stack.callback(getattr(self, name).close)

    def _writer(self, folder: str) -> CaptureWriter:
        from hookrun.store.writer import BUFFERS, SHARD_BYTES, CaptureWriter

        shard_bytes = SHARD_BYTES if self.buffer is None else max(self.buffer // BUFFERS, 1)
        return CaptureWriter(self.path / folder, shard_bytes, _rank())


def cut_off(status: Mapping[str, Any]) -> str:
    """A note on a status that says `running`, where its process is no more; else ``""``.

    Of a run on another machine nobody here can tell.
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
        return True  # it is somebody else's
    except OverflowError:
        return False  # no process has such a number
    return True


def _rank() -> int:
    """Of this process in a distributed run; 0 in any other."""
    from torch import distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def environment(argv: Sequence[str] | None = None, device: str | None = None) -> dict[str, Any]:
    """What a run was made with: versions, machine and command line, and no value of an environment variable.

    argv:   the command line; the process's own unless given
    device: the device computed on; the machine's accelerator, else cpu, unless given
    """
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    chosen = torch.device(device) if device is not None else accelerator or torch.device("cpu")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "hydra": _version("hydra-core"),
        "hookrun": __version__,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": str(chosen),
        "device_name": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "argv": list(sys.argv if argv is None else argv),
    }


def update_latest(path: str | os.PathLike[str]) -> str:
    """Point the link `latest` beside the directory at it, atomically.

    A link is a comfort, so nothing fails for want of one: returns ``""``, or a note that says why there is
    none.
    """
    folder = Path(path).absolute()
    link = folder.with_name("latest")
    aside = folder.with_name(f".latest.{os.getpid()}.tmp")
    if link.exists() and not link.is_symlink():
        return f"{link} is no link: it is left alone and does not point to the newest run"
    try:
        aside.unlink(missing_ok=True)
        os.symlink(folder.name, aside)  # relative: the link survives a move of its folder
        os.replace(aside, link)
    except OSError as error:
        return f"{link} does not point to the newest run: {os_reason(error)}"
    return ""


def _version(package: str) -> str | None:
    """The installed version; None where it is not installed, as hookrun itself run from a checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
