"""The run directory's format: file names, states, and JSON with NaN, read with limits on its size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os import PathLike, fspath
from typing import Any, Literal

STATUS = "status.json"
SUMMARY = "summary"
"""The key of status.json with the description of a run that has ended."""
PLAN = "plan.json"
ENV = "env.json"
MODEL = "model.json"
HOOKS = "hooks.json"
HYDRA = ".hydra"
CONFIG = f"{HYDRA}/config.yaml"
OVERRIDES = f"{HYDRA}/overrides.yaml"
METRICS = "metrics.jsonl"
STATS = "stats.jsonl"
FAULTS = "faults.jsonl"
SAMPLES = "samples.jsonl"
PICTURES = "pictures.jsonl"
TOKENS = "tokens.jsonl"
FOLDS = "folds.safetensors"
CAPTURES = "captures"
PREDICTIONS = "predictions"
CHECKPOINTS = "checkpoints"
STATES = f"{CHECKPOINTS}/state_"
"""The paths of all files of resumable states begin with it."""

INDEX = "index.jsonl"
REPORT = "report.html"
ERROR = "error.txt"
MANIFEST = "manifest.json"
LOCK = ".lock"
LEASE = ".lease"
"""The lock on a file system that has none."""
OUTPUT = "HOOKRUN_OUTPUT"
"""The environment variable with the folder of all outputs."""
JOB = "job.json"
"""In the directory of a job of a sweep: identifies the job when the sweep is resumed."""
MULTIRUN = "multirun.yaml"
"""In the directory of a sweep: its configuration, written by Hydra."""
SWEEP = "sweep.json"
"""In the directory of a sweep: how it ended the last time."""
RECORDED = "recorded"
"""A key in env.json of a run in a user's own loop, which may log a line twice."""

NOT_IN_MANIFEST = frozenset({MANIFEST, STATUS, LOCK, LEASE, REPORT})
"""Files of a run directory that its manifest leaves out: they change after it is written."""

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

COLUMNS = ("sample", "epoch", "step", "call", "rank", "split", "position", "token", "key", "turn")
"""The columns of the table beside captured rows; `sample` is `FIRING` if the row is the whole value of one firing.

`split` is the index in SPLITS, or -1. `position` in the sample, `token` there and, in attention patterns, `key` (the
position of the key) are -1 unless the hook has `tokens`. `turn` orders the rows of several ranks as one process would
have recorded them; a single process does not write it.
"""

FIRING = -1

STORED_DTYPES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The dtypes that a safetensors file can hold: torch's name -> the name in the file."""

MOST_DEPTH = 64
"""The maximum depth of nested lists and mappings in a JSON value."""

MOST_DIGITS = 100
"""The maximum number of digits of an integer."""

MOST_VALUES = 2_000_000
"""The maximum number of values in a JSON file, counted roughly before parsing, which needs much more memory."""

VERSION = 1
"""Increased when an older reader would misread a shard; new keys and columns do not need it."""

# Strict JSON has no NaN. Python's literal `NaN` breaks jq, browsers and other readers on the whole file, and
# null would hide that a loss diverged. So they are written as the words of protobuf's JSON mapping, which the reader
# turns into floats again. A text that equals one of these words gets a backslash in front of it.
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_ENDS = ("NaN", "Infinity")


def encode(value: Any, *, indent: int | None = None) -> str:
    """Strict ASCII JSON, on one line without `indent`. Takes paths, and numbers of torch and NumPy too."""
    if indent is None:
        with suppress(TypeError, ValueError):  # a number of torch or NumPy, NaN, an infinity
            text = _encoded(value)
            if 'NaN"' not in text and 'Infinity"' not in text:
                return text  # five times faster than below
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


_encoded = json.JSONEncoder(allow_nan=False).encode


def decode(text: bytes) -> Any:
    """The inverse of `encode`: NaN and infinities become floats again.

    Raises ValueError for text that is not JSON, and for JSON deeper than `MOST_DEPTH`, with more values than
    `MOST_VALUES` or an integer of more than `MOST_DIGITS` digits.
    """
    opened = text.count(b"[") + text.count(b"{")
    if opened + text.count(b",") > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values")
    parse = _parse_long if _LONG.search(text) else _parse  # calling our function for each number takes time
    try:
        value = parse(text.decode())
        is_deep = opened > MOST_DEPTH and _depth(value) > MOST_DEPTH + 1
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"it nests deeper than {MOST_DEPTH} lists and mappings")
    if b'NaN"' in text or b'Infinity"' in text:
        return _restored(value)
    return value


_LONG = re.compile(rb"\d{%d}" % (MOST_DIGITS + 1))


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON: it is written as the text {word!r}")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS + 1:  # + 1 for the sign
        raise ValueError(f"it holds a number of {len(digits):,} digits")
    return int(digits)


def _depth(value: Any) -> int:
    """How many lists and mappings lie in each other."""
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(each) for each in inside if isinstance(each, dict | list)), default=0)


_parse = json.JSONDecoder(parse_constant=_refuse_constant).decode
_parse_long = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_whole).decode


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        if value.endswith(_ENDS) and value.lstrip("\\") in _WORDS:
            return f"\\{value}"
        return value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str | int)]:
            raise TypeError(f"a {type(wrong[0]).__name__} cannot be a key in JSON: {wrong[0]!r}")
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PathLike):
        return fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(value.item())
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON: {value!r}")


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        if value in _WORDS:
            return _WORDS[value]
        if value.lstrip("\\") in _WORDS:
            return value[1:]
        return value
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return value


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key path, old value, new value) for each value that differs in nested mappings; None where there is none.

    Values are compared as JSON, in which NaN equals NaN.
    """
    old = dict(entries(before))
    new = dict(entries(now))
    keys = dict.fromkeys([*old, *new])
    for key in keys:
        was = old.get(key)
        becomes = new.get(key)
        if {} in (was, becomes) and any(other.startswith(f"{key}.") for other in keys):
            continue  # beside an empty mapping the other one's keys are what differs
        if encode(was) != encode(becomes):
            yield key, was, becomes


def entries(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The key path (such as ``model.name``) and the value of each entry of nested mappings; a tuple as a list."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from entries(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, list(node) if isinstance(node, tuple) else node
