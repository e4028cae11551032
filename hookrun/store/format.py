"""The run directory's format: file names, states, JSON with NaN, and the lines of a shard index."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Literal

STATUS = "status.json"
PLAN = "plan.json"
ENV = "env.json"
MODEL = "model.json"
HOOKS = "hooks.json"
CONFIG = ".hydra/config.yaml"
METRICS = "metrics.jsonl"
STATS = "stats.jsonl"
CAPTURES = "captures"
PREDICTIONS = "predictions"
CHECKPOINTS = "checkpoints"
INDEX = "index.jsonl"
REPORT = "report.html"

PREDICTED = ("predictions", "output")
"""The hook and the module under which predictions are recorded in their folder."""

State = Literal["running", "done", "failed", "interrupted", "stopped"]
EXIT_CODES: Mapping[State, int | None] = {
    "running": None,
    "done": 0,
    "failed": 1,
    "stopped": 3,
    "interrupted": 130,
}

COLUMNS = ("sample", "epoch", "step", "call", "rank", "split")
"""What is known of each row of a capture; its sample is `FIRING` where it is all that one firing saw.

The split is its number among the data's SPLITS, or -1.
"""

FIRING = -1

VERSION = 1
"""Raised when an older reader would misread a shard; keys and columns may be added without."""

# Strict JSON has no NaN. Python's literal `NaN` breaks jq, browsers and other readers on the whole file, and
# null would hide that a loss diverged: so the words of protobuf's JSON mapping, which the reader turns into
# floats again. A text that reads like one of them is told apart by a backslash before it.
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any, *, indent: int | None = None) -> str:
    """Strict ASCII JSON, on one line without `indent`. Takes paths, and numbers of torch and NumPy too."""
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def decode(text: bytes) -> Any:
    """What `encode` wrote, with NaN and infinities as floats. Raises ValueError if it is no JSON."""
    value = json.loads(text)
    return _restored(value) if b'NaN"' in text or b'Infinity"' in text else value


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return f"\\{value}" if value.lstrip("\\") in _WORDS else value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PathLike):
        return fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(value.item())
    raise TypeError(f"a {type(value).__name__} has no place in JSON: {value!r}")


def _key(key: Any) -> str:
    if isinstance(key, str | int):
        return str(key)
    raise TypeError(f"a {type(key).__name__} cannot be a key in JSON: {key!r}")


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _WORDS.get(value, value[1:] if value.lstrip("\\") in _WORDS else value)
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class Entry:
    """Rows of one tensor stream in one shard, in the order of recording.

    key:   name of the rows in the shard, a [rows, *shape] tensor; ``<key>.rows`` holds their [rows, columns]
           int64 table
    path:  where the tensor stood in the captured value: ``""`` for a bare tensor, else like ``[0].logits``
    dtype: as torch names it, without ``torch.``
    shape: of one row
    by:    what a row is: one `sample` of a batch, or all that one `firing` of the hook saw
    """

    key: str
    hook: str
    module: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    by: str


@dataclass(frozen=True, slots=True)
class Shard:
    """One line of a shard index: a file that is complete on disk, what it must be, and what it holds."""

    file: str
    sha256: str
    bytes: int
    columns: tuple[str, ...]
    entries: tuple[Entry, ...]

    def record(self) -> dict[str, Any]:
        """The line as a mapping for `encode`."""
        entries = [{name: getattr(entry, name) for name in Entry.__slots__} for entry in self.entries]
        return {
            "version": VERSION,
            "shard": self.file,
            "sha256": self.sha256,
            "bytes": self.bytes,
            "columns": self.columns,
            "entries": entries,
        }

    @classmethod
    def of(cls, record: Any) -> Shard:
        """The shard that a line describes, without unknown keys. Raises ValueError for any other line."""
        try:
            if record["version"] > VERSION:
                raise ValueError(f"it has format {record['version']}, this hookrun reads up to {VERSION}")
            entries = tuple(
                Entry(
                    entry["key"],
                    entry["hook"],
                    entry["module"],
                    entry["path"],
                    entry["dtype"],
                    tuple(entry["shape"]),
                    entry["rows"],
                    entry["by"],
                )
                for entry in record["entries"]
            )
            if "/" in record["shard"]:
                raise ValueError(f"the shard {record['shard']!r} lies outside of its folder")
            return cls(record["shard"], record["sha256"], record["bytes"], tuple(record["columns"]), entries)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it describes no shard: {error!r}") from error
