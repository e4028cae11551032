"""Captured values become rows in shards of limited size, written by a thread; the index names only complete shards."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hookrun.engine.values.containers import get
from hookrun.engine.values.index import parse_target
from hookrun.store import background
from hookrun.store.background import Background
from hookrun.store.captures import write as writer_module
from hookrun.store.captures.write import CaptureWriter, Count
from hookrun.store.files import StoreError


def test_interruptions_leave_every_piece_done_once() -> None:
    line = 1
    while interrupted_at(line):
        line += 1
    assert line > 10


@pytest.mark.parametrize("most", [2**26, 0])
def test_it_is_written_in_order_with_the_content_at_the_call(most: int, monkeypatch) -> None:
    monkeypatch.setattr(background, "MOST_COPIED", most)  # 0: too large to be copied
    writing = Background("states")
    written = list[float]()
    weight = torch.zeros(4)
    for _ in range(20):
        weight += 1
        writing.write("w", {"w": weight}, lambda tensors: written.append(float(tensors["w"][0])))
        writing.put_newest()
    writing.close()
    assert written == list(range(1, 21))


@pytest.mark.parametrize("end", [Background.put_newest, Background.wait, Background.close])
def test_between_two_intervals_the_newest_of_each_name_is_kept(
    end: Callable[[Background], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now))
    writing = Background("states")
    written = list[str]()

    def write(*texts: str) -> None:
        for text in texts:
            writing.write(text.split()[0], {}, lambda _, text=text: written.append(text))
        writing.put_newest(after=background.INTERVAL)

    write("best 1", "state 1")
    write("best 2", "state 2")
    write("state 3")
    now += background.INTERVAL
    write()
    write("state 4")
    write("best 5", "state 5")
    end(writing)
    writing.close()
    assert written == ["best 1", "state 1", "best 2", "state 3", "best 5", "state 5"]


def test_an_error_in_the_thread_is_raised_once(tmp_path: Path) -> None:
    writing = Background("hookrun states")
    for _ in range(2):
        writing.write("state", {}, lambda _: (tmp_path / "missing" / "state").touch())
    with pytest.raises(FileNotFoundError):
        writing.close()
    writing.close()
    assert "hookrun states" not in {thread.name.partition("_")[0] for thread in threading.enumerate()}


AT = {"epoch": 0, "step": 0, "call": 0}
ONE = torch.ones(1)
TWO = torch.full((2,), 2.0)


def index(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def recorded(folder: Path, *values: Any, **options: Any) -> list[dict[str, Any]]:
    """The index after these firings of one hook."""
    writer = CaptureWriter(folder)
    for value in values:
        writer.add("f", "m", value, **{"sample_ids": None, **AT, **options})
    writer.close()
    return index(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_batch_becomes_one_row_per_sample(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, rank=3)
    batch = torch.randn(3, 2)
    writer.add("features", "layer4", batch, sample_ids=[7, 5, 6], epoch=1, step=20, call=2, split="val")
    writer.close()
    [shard] = index(tmp_path)
    where = {"key": "0", "hook": "features", "module": "layer4", "path": ""}
    assert shard["entries"] == [{**where, "dtype": "float32", "shape": [2], "rows": 3, "by": "sample"}]
    stored = load_file(tmp_path / shard["shard"])
    assert torch.equal(stored["0"], batch)
    columns = "sample epoch step call rank split position token key"
    assert shard["columns"] == columns.split()
    assert stored["0.rows"].tolist() == [[id_, 1, 20, 2, 3, 1, -1, -1, -1] for id_ in (7, 5, 6)]


@pytest.mark.parametrize("sample_ids", [None, [0, 1], torch.tensor([0, 1])])
def test_values_without_a_batch_become_a_row_per_firing(tmp_path: Path, sample_ids: list[int] | None) -> None:
    [shard] = recorded(tmp_path, torch.ones(3, 2), torch.tensor(2.0), sample_ids=sample_ids, step=4)
    assert [(entry["by"], entry["shape"], entry["rows"]) for entry in shard["entries"]] == [
        ("firing", [3, 2], 1),
        ("firing", [], 1),
    ]
    stored = load_file(tmp_path / shard["shard"])
    assert stored["0.rows"].tolist() == [[-1, 0, 4, 0, 0, -1, -1, -1, -1]]
    assert stored["1"].tolist() == [2.0]


def test_consecutive_batches_of_one_stream_share_an_entry(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path)
    for step, size in enumerate([4, 4, 1]):  # the last batch is smaller
        for module in ("a", "b"):
            writer.add(
                "f", module, torch.full((size, 2), step), sample_ids=range(size), epoch=0, step=step, call=0
            )
    writer.add("f", "a", torch.zeros(2, 3), sample_ids=range(2), **AT)  # another row shape
    writer.add("f", "a", torch.zeros(2, 3).half(), sample_ids=range(2), **AT)  # another dtype
    writer.close()
    [shard] = index(tmp_path)
    assert [(entry["module"], entry["rows"], entry["shape"]) for entry in shard["entries"]] == [
        ("a", 9, [2]),
        ("b", 9, [2]),
        ("a", 2, [3]),
        ("a", 2, [3]),
    ]


@dataclass
class Output:
    loss: Tensor | None
    states: Any
    cached: bool = True


class Pair(NamedTuple):
    logits: Tensor
    hidden: Any


@pytest.mark.parametrize(
    ("path", "value", "paths"),
    [
        ("", (ONE, [TWO, ONE]), ["[0]", "[1][0]", "[1][1]"]),
        ("", {"logits": ONE, "a key": (TWO,), 3: ONE}, ["logits", "['a key'][0]", "[3]"]),
        ("", {0: ONE, "0": TWO}, ["[0]", "['0']"]),
        ("", (Pair(ONE, {"last": TWO}), 3, "text"), ["[0].logits", "[0].hidden.last"]),
        ("", Output(None, (None, TWO)), ["states[1]"]),
        ("[0].logits", ONE, ["[0].logits"]),  # of a part of a container
        ("states", (ONE,), ["states[0]"]),
        ("[1]", {"last": ONE}, ["[1].last"]),
    ],
)
def test_the_path_of_a_leaf_is_its_target(tmp_path: Path, path: str, value: Any, paths: list[str]) -> None:
    [shard] = recorded(tmp_path, value, path=path)
    assert [entry["path"] for entry in shard["entries"]] == paths
    stored = load_file(tmp_path / shard["shard"])
    for entry in shard["entries"] if not path else ():
        assert torch.equal(stored[entry["key"]][0], get(value, parse_target(entry["path"]).keys))


def test_shards_are_limited_in_size(tmp_path: Path) -> None:
    bound = 20_000
    writer = CaptureWriter(tmp_path, shard_bytes=bound)
    for step in range(10):
        writer.add("f", "a", torch.randn(16, 64), sample_ids=range(16), epoch=0, step=step, call=0)
    writer.close()
    shards = index(tmp_path)
    assert [shard["shard"] for shard in shards] == [
        f"{number:06d}.safetensors" for number in range(len(shards))
    ]
    assert len(shards) == writer.shards > 2
    for shard in shards:
        data = (tmp_path / shard["shard"]).read_bytes()
        assert len(data) == shard["bytes"] <= bound
        assert hashlib.sha256(data).hexdigest() == shard["sha256"]
    assert sum(entry["rows"] for shard in shards for entry in shard["entries"]) == 160
    assert names(tmp_path) == [*(shard["shard"] for shard in shards), "index.jsonl"]


@pytest.mark.parametrize(
    ("bound", "values", "rows"),
    [
        (10_000, [torch.randn(10, 700)], [3, 3, 3, 1]),
        (1_000, [torch.randn(1, 1_000)] * 2, [1, 1]),
        (64_000, [torch.ones(1)] * 200, [57, 57, 57, 29]),  # 0.8 kB of data in 200 tensor objects
    ],
    ids=["a batch above it", "a row above it", "many small values"],
)
def test_a_shard_keeps_its_limit_or_is_one_row(
    tmp_path: Path, bound: int, values: list[Tensor], rows: list[int]
) -> None:
    writer = CaptureWriter(tmp_path, shard_bytes=bound)
    for value in values:
        writer.add("f", "a", value, sample_ids=range(len(value)), **AT)
    writer.close()
    parts = [load_file(tmp_path / shard["shard"])["0"] for shard in index(tmp_path)]
    assert [len(part) for part in parts] == rows
    assert torch.equal(torch.cat(parts), torch.cat(values))


def test_later_changes_do_not_affect_the_copy(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path)
    value = torch.arange(6.0).reshape(2, 3).t()
    value.requires_grad_()
    clone = torch._lazy_clone(value.detach())
    writer.add("f", "a", value, sample_ids=None, **AT)
    writer.add("f", "a", clone, sample_ids=None, **AT)
    assert torch._C._is_cow_tensor(clone)  # it was read without being copied
    with torch.no_grad():
        value.fill_(-1)
    writer.close()
    stored = load_file(tmp_path / "000000.safetensors")["0"]
    assert torch.equal(stored, torch.arange(6.0).reshape(2, 3).t().expand(2, 3, 2))


def test_counts_have_the_rows_of_each_module(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path)
    for _ in range(2):
        writer.add("f", "a", (torch.zeros(4, 2), torch.zeros(3).bfloat16()), sample_ids=range(4), **AT)
    writer.add("f", "b", None, sample_ids=range(4), **AT)
    assert writer.counts == {("f", "a"): Count(tensors=4, bytes=2 * (32 + 6), rows=10), ("f", "b"): Count()}


def test_a_tensor_without_a_disk_format_names_its_module(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path)
    with pytest.raises(StoreError) as caught:
        writer.add("f", "fft", (torch.zeros(2, dtype=torch.complex128),), sample_ids=None, **AT)
    assert str(caught.value) == (
        "cannot capture the torch.complex128 tensor of hook 'f' at module 'fft', [0]: safetensors has no complex128"
    )


def test_a_closed_writer_has_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    writer = CaptureWriter(tmp_path)
    writer.add("f", "a", torch.ones(1), sample_ids=None, **AT)
    writer.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(StoreError, match="is closed"):
        writer.add("f", "a", torch.ones(1), sample_ids=None, **AT)


def test_file_names_are_counters(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path)
    for module in ("a/b", "../up", "line\nbreak", "nul\0", "x" * 300):
        writer.add("f", module, torch.ones(1), sample_ids=None, **AT)
    writer.close()
    assert names(tmp_path) == ["000000.safetensors", "index.jsonl"]
    assert [entry["module"] for entry in index(tmp_path)[0]["entries"]][:2] == ["a/b", "../up"]


def test_an_interruption_while_a_shard_is_written_loses_nothing(tmp_path, monkeypatch) -> None:
    """Ctrl-C reaches the main thread, which waits; the thread that writes continues."""
    replace = os.replace

    def interrupted(*args: str) -> None:
        signal.raise_signal(signal.SIGINT)
        replace(*args)

    writer = CaptureWriter(tmp_path)
    writer.add("f", "a", torch.ones(3), sample_ids=[0, 1, 2], **AT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("os.replace", interrupted)
            writer.flush()
    finally:
        signal.signal(signal.SIGINT, before)
        writer.close()
    assert [shard["entries"][0]["rows"] for shard in index(tmp_path)] == [3]
    assert names(tmp_path) == ["000000.safetensors", "index.jsonl"]


def test_a_failed_write_is_raised_at_the_next_value(tmp_path, monkeypatch) -> None:
    refused = threading.Event()

    def refuse(*_: object) -> None:
        refused.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.replace", refuse)
    before = set(threading.enumerate())
    writer = CaptureWriter(tmp_path, shard_bytes=10_000)
    with pytest.raises(StoreError, match=r"No space left on device(.|\n)*captured rows are lost") as caught:
        for _ in range(10_000):
            writer.add("f", "a", torch.ones(2_000), sample_ids=None, **AT)
            if refused.is_set():
                writer._disk.wait()
    writer.close()  # reports nothing a second time
    assert str(tmp_path) in str(caught.value)
    assert set(threading.enumerate()) <= before


def test_one_buffer_is_filled_while_another_is_written(tmp_path, monkeypatch) -> None:
    """Then a fast model waits for a slow disk: memory holds three buffers at most."""
    writing = threading.Event()
    allowed = threading.Event()
    write = writer_module.write_tensors

    def slow(*args: Any, **options: Any) -> int:
        writing.set()
        allowed.wait()
        return write(*args, **options)

    monkeypatch.setattr(writer_module, "write_tensors", slow)
    writer = CaptureWriter(tmp_path, shard_bytes=10_000)

    def add() -> None:
        writer.add("f", "a", torch.ones(2_000), sample_ids=None, **AT)

    add()
    add()  # passes on the first
    writing.wait()
    add()
    waits = threading.Thread(target=add)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive(), "a third buffer is full, one waits and one is written"
    allowed.set()
    waits.join()
    writer.close()
    assert writer.shards == 4


MEASURED = """
import sys
from pathlib import Path

import torch

from hookrun.store.captures.write import BUFFERS, CaptureWriter


def of_process(name):
    return 1024 * int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])


torch.set_num_threads(1)
buffer, rows = 2**24, torch.ones(64, 5_000)
writer = CaptureWriter(Path(sys.argv[1]), buffer // BUFFERS)
for step in range(6 * buffer // rows.nbytes):
    if step == 1:
        Path("/proc/self/clear_refs").write_text("5")  # the highest value of memory is the present one
        before = of_process("VmRSS")
    writer.add("f", "a", rows, sample_ids=range(64), epoch=0, step=step, call=0)
writer.close()
print((of_process("VmHWM") - before) / buffer)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_buffer_bounds_the_memory_of_captures(tmp_path, warm) -> None:
    """It captures six times as much."""
    done = warm.run(MEASURED, str(tmp_path / "captures"))
    assert done.returncode == 0, done.stderr
    assert 0.5 < float(done.stdout) < 2, done.stdout


def test_a_refused_shard_leaves_no_file(tmp_path, monkeypatch) -> None:
    refusing = threading.Event()
    allowed = threading.Event()
    replace = os.replace

    def refuse(*args: Path) -> None:
        if args[1].name == "000001.safetensors":
            refusing.set()
            allowed.wait()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*args)

    monkeypatch.setattr("os.replace", refuse)
    writer = CaptureWriter(tmp_path, shard_bytes=10_000)
    for number in range(4):  # each passes on the one before it
        writer.add("f", "a", torch.full((2_000,), float(number)), sample_ids=None, **AT)
    refusing.wait()
    allowed.set()
    with pytest.raises(StoreError, match=r"000001(.|\n)*3 captured rows are lost; the 1 shards"):
        writer.close()
    assert names(tmp_path) == ["000000.safetensors", "index.jsonl"]
    writer.close()
    assert [shard["shard"] for shard in index(tmp_path)] == ["000000.safetensors"]
    assert not list(tmp_path.glob(".*.tmp"))


def interrupted_at(line: int) -> bool:
    """Pass three pieces, with KeyboardInterrupt at the given line; returns whether that line was reached."""
    done = list[int]()
    made = Background("hookrun captures")
    handed = 0
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != background.__file__ or frame.f_code.co_name == "_attempt":
            return None
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    came = False
    before = sys.gettrace()  # of a coverage measurement
    sys.settrace(trace)
    try:
        for piece in range(3):
            made.put(partial(done.append, piece))
            handed += 1
        made.wait()
    except KeyboardInterrupt:
        came = True
    finally:
        sys.settrace(before)
    made.wait()
    made.close()
    assert handed <= len(done) <= handed + 1, line
    assert done == list(range(len(done))), line
    return came
