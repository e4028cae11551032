"""Streaming activations to disk, flushed: alone, and while the processor computes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import OURS, Result, Settings, judged

Write = Callable[[Path, int, Any], None]
RAW = "raw write, the faster one"


def dropped_write(folder: Path, batches: int, batch: Any) -> None:
    """One file, one write for each batch; written pages are dropped from the system's cache at once."""
    with open(folder / "raw", "wb", buffering=0) as file:
        for _ in range(batches):
            file.write(memoryview(batch.numpy()).cast("B"))
            os.fdatasync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.fsync(file.fileno())


def buffered_write(folder: Path, batches: int, batch: Any) -> None:
    """One file, flushed at the end."""
    with open(folder / "raw", "wb", buffering=0) as file:
        for _ in range(batches):
            file.write(memoryview(batch.numpy()).cast("B"))
        os.fsync(file.fileno())


def one_file_each(save: Callable[[Path, Any], object]) -> Write:
    """A function that writes and flushes one file for each batch."""

    def write(folder: Path, batches: int, batch: Any) -> None:
        for number in range(batches):
            path = folder / f"{number}.npy"
            save(path, batch)
            flush(path)

    return write


def flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def h5py_write(folder: Path, batches: int, batch: Any) -> None:
    """One HDF5 data set with one chunk for each batch."""
    import h5py

    with h5py.File(folder / "data.h5", "w") as file:
        shape = (batches * len(batch), *batch.shape[1:])
        rows = file.create_dataset("rows", shape, chunks=tuple(batch.shape), dtype="f4")
        for number in range(batches):
            rows[number * len(batch) : (number + 1) * len(batch)] = batch.numpy()
    flush(folder / "data.h5")


def zarr_write(folder: Path, batches: int, batch: Any) -> None:
    """One zarr array with one chunk for each batch, without compression."""
    import zarr

    shape = (batches * len(batch), *batch.shape[1:])
    rows = zarr.create_array(
        str(folder / "data.zarr"), shape=shape, chunks=tuple(batch.shape), dtype="f4", compressors=None
    )
    for number in range(batches):
        rows[number * len(batch) : (number + 1) * len(batch)] = batch.numpy()
    for path in (folder / "data.zarr").rglob("*"):
        if path.is_file():
            flush(path)


def hookrun_write(folder: Path, batches: int, batch: Any) -> None:
    """The writer that a run uses."""
    from hookrun.store.captures.write import CaptureWriter

    writer = CaptureWriter(folder / "captures")
    for number in range(batches):
        add(writer, number, batch)
    writer.close()


def add(writer: Any, number: int, batch: Any) -> None:
    """Add one batch in the same way as a run."""
    ids = range(number * len(batch), (number + 1) * len(batch))
    writer.add("h", "m", batch, sample_ids=ids, epoch=0, step=number, call=0)


def stream(settings: Settings) -> Result:
    """1 GB of activations, the final fsync included."""
    import numpy as np
    import torch

    batch = torch.randn(64, 256, 8, 8)  # 4 MB
    batches = 256
    ways: dict[str, Write] = {
        "raw write, dropped as it goes": dropped_write,
        "raw write, buffered": buffered_write,
        OURS: hookrun_write,
        "np.save": one_file_each(lambda path, rows: np.save(path, rows.numpy())),
        "torch.save": one_file_each(lambda path, rows: torch.save(rows, path)),
    }
    missing = {}
    for name, write in {"h5py": h5py_write, "zarr": zarr_write}.items():
        if importlib.util.find_spec(name) is None:
            missing[name] = "not installed"
        else:
            ways[name] = write
    times: dict[str, list[float]] = {RAW: [], **{name: [] for name in ways}}
    least = batches * batch.numel() * batch.element_size()
    for number in range(settings.slow()):
        for name in ways if number % 2 else reversed(ways):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                ways[name](Path(folder), batches, batch)
                times[name].append(time.perf_counter() - start)
                require_written(name, Path(folder), least)
        times[RAW].append(min(times[name][-1] for name in list(ways)[:2]))
    return judged(
        "stream 1 GB of activations to disk, flushed",
        times,
        target=1.25,
        compared=tuple(ways),
        missing=missing,
    )


def require_written(name: str, folder: Path, least: int) -> None:
    """Raise RuntimeError if there are fewer bytes on disk than there should be."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size < least:
        raise RuntimeError(f"{name} wrote {size} bytes of {least}")


def behind_compute(settings: Settings) -> Result:
    """The same with 15 ms of compute for each batch, compared with the compute alone."""
    import torch

    from hookrun.store.captures.write import CaptureWriter

    batch, batches, matrix = torch.randn(64, 256, 8, 8), 256, torch.randn(512, 512)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    multiply(200)  # the first ones are several times slower
    start = time.perf_counter()
    multiply(500)
    steps = max(1, round(0.015 * 500 / (time.perf_counter() - start)))

    def computed(after: Callable[[int], object]) -> float:
        start = time.perf_counter()
        for number in range(batches):
            multiply(steps)
            after(number)
        return time.perf_counter() - start

    def streamed(folder: Path) -> float:
        writer = CaptureWriter(folder / "captures")
        took = computed(lambda number: add(writer, number, batch))
        start = time.perf_counter()
        writer.close()
        return took + time.perf_counter() - start

    def saved(folder: Path) -> float:
        def save(number: int) -> None:
            torch.save(batch, folder / f"{number}.pt")
            flush(folder / f"{number}.pt")

        return computed(save)

    times: dict[str, list[float]] = {"compute alone": [], OURS: [], "torch.save": []}
    for _ in range(settings.slow()):
        times["compute alone"].append(computed(lambda number: None))
        for name, way in {OURS: streamed, "torch.save": saved}.items():
            folder = Path(tempfile.mkdtemp())
            times[name].append(way(folder))
            shutil.rmtree(folder)
    return judged("stream 1 GB under 15 ms of compute for each batch", times, target=1.41)


ROWS = (stream, behind_compute)
