"""Captured rows for others: exported, and yielded in random order, beside a copy and a read of the same bytes."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.measure import OURS, Result, Settings, judged

COPY = "a copy of the files, flushed"
READ = "the same reader in order, in batches"
ONE_BY_ONE = "the same in order, one by one"
RAW = "a raw read of the files in order"
COUNT, WIDTH = 2**18 + 2**16, 768  # 1 GB of float32
_AT_ONCE = 2**22


def captured(folder: Path) -> Path:
    """A run that captured 1 GB."""
    import torch

    from hookrun.store.run_dir import RunDir

    run = RunDir.create(folder / "run")
    run.set_status("running")
    batch = torch.randn(4096, WIDTH)
    for start in range(0, COUNT, len(batch)):
        ids = range(start, start + len(batch))
        run.captures.add("seen", "fc", batch, sample_ids=ids, split="val", epoch=0, step=0, call=0)
    run.close()
    run.set_status("done")
    return run.path


def shards(run: Path) -> list[Path]:
    """The files with the rows, dropped from the system's cache."""
    files = sorted((run / "captures").glob("*.safetensors"))
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return files


def copy(run: Path, target: Path) -> None:
    """All bytes of the rows into one file."""
    with open(target, "wb", buffering=0) as out:
        for path in shards(run):
            with open(path, "rb", buffering=0) as file:
                while data := file.read(_AT_ONCE):
                    out.write(data)
        os.fsync(out.fileno())


def read(run: Path, target: Path) -> None:
    """All bytes of the rows."""
    for path in shards(run):
        with open(path, "rb", buffering=0) as file:
            while file.read(_AT_ONCE):
                pass


def in_order(run: Path, target: Path) -> None:
    """All rows through hookrun's reader, in batches."""
    import hookrun

    shards(run)
    if sum(map(len, hookrun.open_run(run).captures["seen"]["fc"].batches(4096))) != COUNT:
        raise RuntimeError("other rows than were captured")


def exported(suffix: str, run: Path, target: Path) -> None:
    """All rows into one file of another form."""
    import hookrun

    shards(run)
    hookrun.open_run(run).export(target.with_suffix(suffix))


def one_by_one(shuffle: bool, run: Path, target: Path) -> None:
    """Each row once."""
    import hookrun

    shards(run)
    if sum(1 for _ in hookrun.rows(run, shuffle=shuffle)) != COUNT:
        raise RuntimeError("other rows than were captured")


def compared(
    work: str, settings: Settings, ways: dict[str, Callable[[Path, Path], None]], target: float
) -> Result:
    """The times of ways to do something with the same run; each begins with a cold cache."""
    times = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder:
        run = captured(Path(folder))
        for number in range(settings.slow(5)):
            for name in ways if number % 2 else reversed(ways):
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    start = time.perf_counter()
                    ways[name](run, Path(out) / "rows")
                    times[name].append(time.perf_counter() - start)
    return judged(work, {name: times[name] for name in ways}, target=target)


def export_parquet(settings: Settings) -> Result:
    """1 GB into Parquet: at least half as fast as a copy."""
    ways = {COPY: copy, OURS: partial(exported, ".parquet")}
    return compared("export 1 GB of captured rows to Parquet", settings, ways, 2.0)


def export_arrow(settings: Settings) -> Result:
    """1 GB into an Arrow file."""
    ways = {COPY: copy, OURS: partial(exported, ".arrow")}
    return compared("export 1 GB of captured rows to Arrow", settings, ways, 2.0)


def shuffled_rows(settings: Settings) -> Result:
    """1 GB of rows in random order: at least 0.7 times as fast as hookrun reads them in order.

    In batches nobody makes a tensor of each row, which takes about as long as to read it from memory.
    """
    ways = {
        READ: in_order,
        ONE_BY_ONE: partial(one_by_one, False),
        RAW: read,
        OURS: partial(one_by_one, True),
    }
    return compared("1 GB of captured rows of 768 floats, shuffled, one by one", settings, ways, 1.43)


ROWS = (export_parquet, export_arrow, shuffled_rows)
