"""Blocks that bypass the system's cache: the file is the same, and a failing write is an error."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hookrun.store.past_cache import LARGE, STEP, BlockWriter
from hookrun.store.tensor_file import write_tensors
from hookrun.store.writer import CaptureWriter


def block(size: int, offset: int = 0) -> memoryview:
    """Random bytes that begin `offset` bytes after the start of a page."""
    memory = memoryview(mmap.mmap(-1, offset + size))[offset:]
    memory[:] = os.urandom(size)
    return memory


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each write that bypassed the cache."""
    import fcntl

    found, write = list[int](), os.write

    def told(file: int, data: Any) -> int:
        done = write(file, data)
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            found.append(done)
        return done

    monkeypatch.setattr("hookrun.store.past_cache.os.write", told)
    return found


@pytest.mark.cases(
    "blocks",
    [
        [block(STEP), block(LARGE), block(7), block(LARGE), block(LARGE + STEP + 5)],
        [block(3 * LARGE + 5), block(STEP - 5), block(LARGE)],
        [block(LARGE, offset=8), block(LARGE, offset=STEP)],
        [memoryview(bytes(LARGE)), block(1), block(LARGE)],
    ],
)
def test_the_file_holds_the_blocks(tmp_path: Path, blocks: Sequence[memoryview]) -> None:
    with open(tmp_path / "f", "xb") as file:
        writer = BlockWriter(file)
        for each in blocks:
            writer.write(each)
        assert file.tell() == sum(each.nbytes for each in blocks)
    assert (tmp_path / "f").read_bytes() == b"".join(blocks)


def test_a_file_system_without_direct_writes_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def refuse(file: int, data: Any) -> int:
        calls.append(file)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("hookrun.store.past_cache.os.write", refuse)
    blocks = [block(LARGE), block(LARGE)]
    with open(tmp_path / "f", "xb") as file:
        writer = BlockWriter(file)
        for each in blocks:
            writer.write(each)
    assert (tmp_path / "f").read_bytes() == b"".join(blocks) and len(calls) <= 1


def test_a_failed_write_is_raised(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE + 3 * STEP + 1, hard))
    try:
        with open(tmp_path / "f", "xb") as file, pytest.raises(OSError, match="too large"):
            writer = BlockWriter(file)
            writer.write(block(LARGE))
            writer.write(block(LARGE))
            file.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_large_chunks_are_aligned_and_so_are_later_ones(tmp_path: Path) -> None:
    tensors = {
        "odd": [torch.arange(3, dtype=torch.uint8)],
        "wide": [torch.arange(5)],
        "steps": [torch.randn(2, LARGE // 8), torch.randn(1, LARGE // 8)],
        "large": [torch.randn(LARGE // 4 + 1)],
    }
    with open(tmp_path / "f", "xb") as file:
        sha256, size = write_tensors(file, tensors)
    data = (tmp_path / "f").read_bytes()
    assert (hashlib.sha256(data).hexdigest(), len(data)) == (sha256, size)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (length + 8) % STEP == 0 and header["steps"]["data_offsets"][0] == 0
    for name, chunks in tensors.items():
        assert (length + 8 + header[name]["data_offsets"][0]) % chunks[0].dtype.itemsize == 0
        assert torch.equal(load_file(tmp_path / "f")[name], torch.cat(chunks))


def test_captures_bypass_the_cache_and_are_read_back(tmp_path: Path, direct: list[int]) -> None:
    """If the file system can do it; otherwise they are only read back. Also with small captures between them."""
    bound = 6 * LARGE
    values = [torch.randn(16, 64, 33, 32) for _ in range(5)]  # 4 1/8 times LARGE
    small = torch.randn(16, 3)
    writer = CaptureWriter(tmp_path / "captures", shard_bytes=bound)
    for step, value in enumerate(values):
        for name, each in (("a", small), ("b", value), ("c", value[:, 0])):
            writer.add("f", name, each, sample_ids=range(16), epoch=0, step=step, call=0)
    writer.close()
    found = dict[str, list[torch.Tensor]]()
    for line in (tmp_path / "captures" / "index.jsonl").read_text().splitlines():
        shard = json.loads(line)
        path = tmp_path / "captures" / shard["shard"]
        assert path.stat().st_size == shard["bytes"] <= bound
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard["sha256"]
        stored = load_file(path)
        for entry in shard["entries"]:
            found.setdefault(entry["module"], []).append(stored[entry["key"]])
    assert torch.equal(torch.cat(found["b"]), torch.cat(values))
    assert torch.equal(torch.cat(found["c"]), torch.cat(values)[:, 0])
    assert torch.equal(torch.cat(found["a"]), small.repeat(5, 1))
    with open(tmp_path / "probe", "xb") as file:
        BlockWriter(file).write(block(LARGE))
    able = bool(direct) and direct.pop() == LARGE
    assert not able or sum(direct) > sum(value.nbytes for value in values) // 2
