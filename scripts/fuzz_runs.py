"""Damages a valid run directory at random and reads it with all functions of hookrun that read run directories.

``python scripts/fuzz_runs.py 5000 [SEED]``: each function must return a result or raise a HookrunError, within limits
of time and memory. Any other exception is printed with a number, which as SEED reproduces the directory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hookrun.cli import main as hookrun_main
from hookrun.engine.actions.values import RunValue
from hookrun.errors import HookrunError
from hookrun.report import write_report
from hookrun.run.experiment.run_values import RunReferences, read_value
from hookrun.store.captures.read import Leaf, StoredCapture
from hookrun.store.reader import Run, open_run
from hookrun.store.run_dir import RunDir
from hookrun.store.verify import verify

HANGS = 120
"""Seconds after which one reading counts as hanging."""


@dataclass
class Outcome:
    """The results of reading a directory.

    unexpected: reading -> its exception, if that is not a HookrunError
    refused:    reading -> its HookrunError
    slowest:    (seconds of processor time, name) of the slowest reading
    """

    unexpected: dict[str, BaseException] = field(default_factory=dict)
    refused: dict[str, HookrunError] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")


def good_run(path: Path) -> Path:
    """Make a finished run with all kinds of files: records, captures, predictions, checkpoints, Hydra's own."""
    hooks = {
        "seen": "{select: [layers.1, fc], hook: forward, action: capture, when: {mode: eval}}",
        "norms": "{select: '**', hook: optimizer_step_pre, action: stats, of: [norm]}",
        "bound": "{select: fc, hook: forward, action: check, max: 0.1, policy: warn}",
        "said": "{select: fc, hook: forward, action: print, what: shape}",
    }
    small = (
        "compute.device=cpu",
        "compute.threads=1",
        "model=mlp",
        "train.epochs=1",
        "train.limit_batches=2",
        "data.batch_size=16",
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = hookrun_main([*small, f"hydra.run.dir={path}", *(f"+hooks.{k}={v}" for k, v in hooks.items())])
    assert code == 0
    again = RunDir(path)
    again.set_status("running")
    at = {"epoch": 0, "step": 0, "call": 0}
    rows = {"logits": torch.randn(4, 3), "boxes": torch.ones(4, 2)}
    again.predictions.add("predictions", "output", rows, sample_ids=range(4), split="val", **at)
    again.close()
    (path / "error.txt").write_text("Traceback (most recent call last):\n")
    again.write_manifest()
    again.set_status("done")
    return path


def damage(folder: Path, draw: random.Random) -> str:
    """Make one to three random changes; returns a description of them."""
    return "; ".join(_damage_once(folder, draw) for _ in range(draw.choice((1, 1, 1, 2, 3))))


def _damage_once(folder: Path, draw: random.Random) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    file = draw.choice([path for path in files if path.name != "report.html" and path.stat().st_size < 10**7])
    kinds: list[Callable[[Path, random.Random], None]] = [
        _flip, _flip, _cut, _delete, _repeat, _replace, _insert,
    ]  # fmt: skip
    if file.suffix in (".json", ".jsonl"):
        kinds += [_swap_value] * 8
    kind = draw.choice(kinds)
    kind(file, draw)
    return f"{kind.__name__[1:]} {file.relative_to(folder)}"


def _flip(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 4, 64))):
        if data:
            # Half of the time near the beginning, where headers are.
            place = draw.randrange(min(len(data), 200)) if draw.random() < 0.5 else draw.randrange(len(data))
            data[place] = draw.randrange(256)
    file.write_bytes(data)


def _cut(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data) + 1)])


def _insert(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    place = draw.randrange(len(data) + 1)
    piece = draw.choice(
        (b"\0", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5_000, b"9" * 5_000, b"\n", b"NaN", b"*a")
    )
    file.write_bytes(data[:place] + piece + data[place:])


def _delete(file: Path, draw: random.Random) -> None:
    shutil.rmtree(file.parent) if draw.random() < 0.2 and (
        file.parent / "status.json"
    ).exists() is False else (file.unlink())


def _repeat(file: Path, draw: random.Random) -> None:
    lines = file.read_bytes().split(b"\n")
    lines.insert(draw.randrange(len(lines)), draw.choice(lines))
    file.write_bytes(b"\n".join(lines))


def _replace(file: Path, draw: random.Random) -> None:
    file.unlink()
    match draw.randrange(7):
        case 0:
            file.symlink_to("/etc/passwd")
        case 1:
            file.symlink_to("/dev/zero")
        case 2:
            os.mkfifo(file)
        case 3:
            file.mkdir()
        case 4:
            with file.open("wb") as opened:
                opened.truncate(draw.choice((10**5, 10**9, 10**13)))
        case 5:
            file.symlink_to(file.name)
        case 6:
            file.write_bytes(b"")


_VALUES: tuple[Any, ...] = (
    None, True, -1, -5, 0, 10**12, 2**63, 10**400, 1e308, "NaN", "Infinity", "", "x" * 5_000, "\ud800", "\0",
    "../../etc/passwd", "</script><script>alert(1)</script>", "\x1b[2J", "float64",
    [], {}, [[]], [None], {"": None}, [-1], [10**12],
)  # fmt: skip


def _swap_value(file: Path, draw: random.Random) -> None:
    text = file.read_text(errors="replace")
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    number = draw.randrange(max(len(lines), 1))
    try:
        value = json.loads(lines[number])
    except (ValueError, IndexError, RecursionError):
        return
    slots = list(_slots(value))
    if slots:
        holder, key = draw.choice(slots)
        new = draw.choice(_VALUES)
        match draw.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(("x" * 5_000, "path", "\ud800", "split", "least"))] = new
            case _:
                holder[key] = new
    lines[number] = json.dumps(value, indent=2 if file.suffix == ".json" else None)
    file.write_text("\n".join(lines) + "\n")


def _slots(value: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        for key, inner in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            yield holder, key
            if isinstance(inner, dict | list):
                waiting.append(inner)


def read_everything(folder: Path) -> Outcome:
    """Call all functions that read a run directory."""
    found = Outcome()
    readings: dict[str, Callable[[Run], object]] = {
        **{name: _attribute(name) for name in _ATTRIBUTES},
        "captures": lambda run: [_read_leaf(m) for hook in run.captures.values() for m in hook.values()],
        "predictions": lambda run: run.predictions is None or _read_leaf(run.predictions),
        "labels": lambda run: [run.labels_of(m) for m in run.captures["seen"].values() if isinstance(m, StoredCapture)],
        "value": _read_mean,
        "export": lambda run: run.export(folder.with_name("exported.safetensors")),
        "repr": repr,
    }  # fmt: skip
    for name, reading in readings.items():
        _attempt(found, name, lambda reading=reading: reading(open_run(folder)))  # type: ignore[misc]
    _attempt(found, "verify", lambda: verify(folder))
    _attempt(found, "report", lambda: write_report(folder))
    _attempt(found, "sweep", lambda: write_report(folder.parent))
    return found


_ATTRIBUTES = ("status", "plan", "config", "env", "model", "hooks", "metrics", "stats", "notes", "cut_off")


def _read_mean(run: Run) -> object:
    value = RunValue(run=str(run.path), capture="seen", module="fc", sample="mean")
    return read_value(value, {"fc": ("fc",)}, RunReferences())


def _attribute(name: str) -> Callable[[Run], object]:
    return lambda run: getattr(run, name)


def _read_leaf(leaf: Leaf) -> None:
    captures = [leaf] if isinstance(leaf, StoredCapture) else [leaf[path] for path in leaf]
    for capture in captures:
        _ = (repr(capture), capture.shape, capture.dtype, capture.sample_ids, capture.where(split="val"))
        _ = capture[:]
        if len(capture):
            _ = capture[0]


def _attempt(found: Outcome, name: str, read: Callable[[], object]) -> None:
    start = time.process_time()
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANGS)
    try:
        read()
    except HookrunError as error:
        found.refused[name] = error
    except BaseException as error:
        found.unexpected[name] = error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    found.slowest = max(found.slowest, (time.process_time() - start, name))


def _hangs(signal_number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it did not end within {HANGS} s")


def reset_peak() -> None:
    """Reset the peak that `peak` measures."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The peak memory of this process since `reset_peak`, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def main(count: int, seed: int = 0) -> int:
    """Damage and read `count` directories; returns the number of unexpected exceptions."""
    total = Counter[str]()
    slowest = (0.0, "", "")
    with tempfile.TemporaryDirectory() as temporary:
        good = good_run(Path(temporary) / "good")
        read_everything(good)
        reset_peak()
        base = peak()
        most = (0, "")
        for number in range(seed, seed + count):
            folder = Path(temporary) / "sweep/0"
            shutil.copytree(good, folder, symlinks=True)
            done = damage(folder, random.Random(number))
            outcome = read_everything(folder)
            for name, error in outcome.unexpected.items():
                print(f"{number}: {done}: {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            total["unexpected"] += len(outcome.unexpected)
            total["directories with a HookrunError"] += bool(outcome.refused)
            slowest = max(slowest, (*outcome.slowest, f"{number}: {done}"))
            most = max(most, (peak() - base, f"{number}: {done}"))
            shutil.rmtree(folder.parent)
    print(
        f"{count} directories; {dict(total)}; slowest: {slowest}; most memory: {most[0] / 1e6:.0f} MB at {most[1]}"
    )
    return total["unexpected"]


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:])), 1))
