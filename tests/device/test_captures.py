"""Captured rows leave the device while the program goes on, and are those that the CPU writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import second_device
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hookrun
from hookrun.cli import main
from hookrun.engine.values import host_copies
from hookrun.engine.values.host_copies import HostCopy
from hookrun.errors import HookrunWarning
from hookrun.store.captures import write
from hookrun.store.captures.read import read_captures
from hookrun.store.captures.shard import read_index
from hookrun.store.captures.write import CaptureWriter
from hookrun.store.files import StoreError

AT = {"epoch": 0, "step": 0, "call": 0}
is_second = pytest.mark.skipif(os.environ.get("HOOKRUN_TEST_DEVICE", "second") != "second", reason="second")


@pytest.mark.parametrize("shard_bytes", [2**20, 8_000])
def test_the_files_are_those_that_the_cpu_writes(
    tmp_path: Path, device: torch.device, shard_bytes: int
) -> None:
    """In one shard; and in several, with rows split over shards, and with rows that are larger than the buffer."""
    write_all(tmp_path / "cpu", "cpu", shard_bytes)
    write_all(tmp_path / "device", device, shard_bytes)
    assert files(tmp_path / "device") == files(tmp_path / "cpu")


@is_second
def test_no_captured_value_waits_for_the_device(tmp_path: Path, device: torch.device) -> None:
    seen = write_all(tmp_path / "device", device)
    assert not seen.waits, seen
    assert [kind for kind, _, _ in seen] == ["late"] * 3 * len(tensors())


@is_second
def test_rows_that_are_read_too_early_are_noticed(tmp_path: Path, device: torch.device, monkeypatch) -> None:
    """The other tests of this file compare with the CPU: this is what they would find without a wait."""
    write_all(tmp_path / "cpu", "cpu")
    monkeypatch.setattr(HostCopy, "wait", lambda self: self.tensor)
    write_all(tmp_path / "device", device)
    wrong = files(tmp_path / "device")["000000.safetensors"]
    assert wrong != files(tmp_path / "cpu")["000000.safetensors"]
    assert b"\xa5" * 1_000 in wrong


class InPlace(nn.Module):
    """Captured modules, after which their outputs are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.one(x))
        y = self.two(x)
        y += 1
        return y.mul_(2)


def test_later_changes_in_place_are_not_captured(tmp_path: Path, device: torch.device) -> None:
    """In each mode of autograd, in one run."""
    hooks = {
        "out": {"select": "*", "hook": "forward", "action": "capture", "batch_dim": 0},
        "grad": {"select": "two", "hook": "output_grad", "action": "capture", "batch_dim": 0},
    }
    stored = list[dict[str, Tensor]]()
    for where in ("cpu", device):
        torch.manual_seed(0)
        model = InPlace().to(where)
        batches = torch.randn(3, 6, 5)
        folder = tmp_path / str(where)
        with hookrun.record(model, hooks, folder) as recording:
            for batch, mode in zip(
                batches, (torch.inference_mode, torch.no_grad, torch.enable_grad), strict=True
            ):
                with mode():
                    out = model(batch.to(where))
                if out.requires_grad:
                    out.square().sum().backward()
                recording.step()
        captures = hookrun.open_run(folder).captures
        read = {}
        for hook, modules in captures.items():
            for name, rows in modules.items():
                read[f"{hook}/{name}"] = rows[:]
        stored.append(read)
    expected, found = stored
    assert sorted(expected) == sorted(found) == ["grad/two", "out/one", "out/relu", "out/two"]
    for name, rows in expected.items():
        assert torch.allclose(found[name], rows, atol=1e-4), name


@is_second
@pytest.mark.parametrize("device_key", [None, "cpu"])
def test_a_run_does_not_wait_for_what_its_hooks_capture(tmp_path, device, device_key: str | None) -> None:
    hook = {"select": "*", "hook": "forward", "action": "capture", "device": device_key, "batch_dim": 0}
    model = InPlace().to(device)
    x = torch.randn(6, 5).to(device)
    with hookrun.record(model, {"out": hook}, tmp_path / "run") as recording:
        with second_device.watch() as seen:
            for _ in range(3):
                model(x)
                recording.step()
        assert not seen.waits, seen
        assert len(seen) == 9, seen
    assert hookrun.open_run(tmp_path / "run").captures["out"]["relu"][:].shape == (18, 5)


class Disk:
    """A disk that writes nothing until it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.may = threading.Event(), threading.Event()
        self._write = write.write_tensors
        monkeypatch.setattr(write, "write_tensors", self.write_tensors)

    def write_tensors(self, *args: Any, **options: Any) -> int:
        """Instead of the function of this name."""
        self.asked.set()
        self.may.wait()
        return self._write(*args, **options)


def test_three_pinned_buffers_are_used_in_turn(tmp_path: Path, device: torch.device, monkeypatch) -> None:
    """While they are full, the program waits for the disk."""
    made = list[Tensor]()
    make = write.host_memory
    monkeypatch.setattr(write, "host_memory", lambda size: made.append(make(size)) or made[-1])
    disk = Disk(monkeypatch)
    writer = CaptureWriter(tmp_path, shard_bytes=10_000)
    rows = torch.randn(20, 1, 2_000)

    def add(row: Tensor) -> None:
        writer.add("f", "a", row.to(device), sample_ids=None, **AT)

    for row in rows[:3]:
        add(row)
    assert disk.asked.wait(60), "the first one is handed over when the second one is full"
    waiting = threading.Thread(target=add, args=[rows[3]])
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    disk.may.set()
    waiting.join()
    for row in rows[4:]:
        add(row)
    writer.close()
    assert [len(memory) for memory in made] == [10_000] * len(made)
    assert len(made) <= 3
    stored = [load_file(path)["0"] for path in shards(tmp_path)]
    assert torch.equal(torch.cat(stored), rows)


def test_rows_of_another_thread_stay_in_their_shard(tmp_path, device, monkeypatch) -> None:
    """Autograd has a thread for each device; one fills the buffer while a copy of the other one begins."""
    begin = host_copies.HostCopies.begin
    rows = torch.randn(41, 1, 500)

    def add(module: str, row: Tensor) -> None:
        writer.add("f", module, row.to(device), sample_ids=None, **AT)

    other = threading.Thread(target=lambda: [add("b", row) for row in rows[1:]])

    def begun(self: host_copies.HostCopies, *args: Any) -> HostCopy:
        copy = begin(self, *args)
        if other.ident is None:
            other.start()
            other.join(0.2)
        return copy

    monkeypatch.setattr(host_copies.HostCopies, "begin", begun)
    writer = CaptureWriter(tmp_path, shard_bytes=10_000)
    add("a", rows[0])
    other.join()
    writer.close()
    stored = read_captures(tmp_path, read_index(tmp_path), {})["f"]
    assert torch.equal(stored["a"][:], rows[:1])
    assert torch.equal(stored["b"][:], rows[1:])


def shards(folder: Path) -> list[Path]:
    """The shards in their order."""
    return sorted(folder.glob("*.safetensors"))


@is_second
@pytest.mark.parametrize(("lags", "batches"), [(False, 100), (True, 1_000)])
def test_memory_of_the_device_is_bounded(tmp_path, device, monkeypatch, lags: bool, batches: int) -> None:
    """Also if no copy ends before somebody waits for it."""
    monkeypatch.setattr(host_copies, "MOST_HELD", 40_000)
    if lags:
        monkeypatch.setattr(second_device.Event, "query", lambda self: False)
    writer = CaptureWriter(tmp_path, shard_bytes=2**20)
    value = torch.randn(10, 250).to(device)  # 10 kB
    before = second_device.allocated()
    second_device.peak(reset=True)
    for step in range(batches):
        writer.add("f", "a", value + 0, sample_ids=range(10), epoch=0, step=step, call=0)
    writer.close()
    assert second_device.peak() - before <= 40_000 + 2 * value.nbytes  # the value itself, and its clone
    copies = host_copies.copies_of(value)
    assert copies is not None
    copies.begin(value[:0]).wait()
    assert lags or second_device.allocated() <= before + value.nbytes


def test_a_disk_that_refuses_loses_the_rows_that_are_under_way(tmp_path, device, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.replace", refuse)
    writer = CaptureWriter(tmp_path)
    writer.add("f", "a", torch.ones(4, 2_000).to(device), sample_ids=range(4), **AT)
    with pytest.raises(StoreError, match=r"No space left on device(.|\n)*4 captured rows are lost"):
        writer.close()
    assert list(tmp_path.glob("*.safetensors")) == []


@is_second
@pytest.mark.parametrize("end", [CaptureWriter.flush, CaptureWriter.position, CaptureWriter.close])
def test_a_copy_that_fails_is_told_with_the_rows_that_are_lost(
    tmp_path: Path, device: torch.device, monkeypatch, end: Callable[[CaptureWriter], Any]
) -> None:
    writer = CaptureWriter(tmp_path)
    writer.add("f", "a", torch.ones(3, 2).to(device), sample_ids=range(3), **AT)
    writer.flush()

    def fail(self: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(second_device.Event, "query", lambda self: False)
    monkeypatch.setattr(second_device.Event, "synchronize", fail)
    writer.add("f", "a", torch.ones(4, 2).to(device), sample_ids=range(4), **AT)
    with pytest.raises(StoreError) as caught:
        end(writer)
    assert str(caught.value) == (
        "cannot copy captured rows to the host: RuntimeError: CUDA error: an illegal memory access was encountered\n"
        f"4 captured rows are lost; the 1 shards written to {tmp_path} before are kept and indexed"
    )
    with pytest.raises(StoreError, match="is closed"):
        writer.add("f", "a", torch.ones(1).to(device), sample_ids=None, **AT)
    monkeypatch.undo()
    writer.close()


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No memory can be pinned, as with `ulimit -l 0`."""
    empty = torch.empty

    def refusing(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refusing)
    host_copies._tell_waiting.cache_clear()
    yield
    host_copies._tell_waiting.cache_clear()


def test_waiting_without_pinned_memory_is_told_once(tmp_path, device, unpinned: None) -> None:
    with pytest.warns(
        HookrunWarning, match="wait for the device: RuntimeError: CUDA error: out of memory"
    ) as told:
        write_all(tmp_path / "device", device, 3_000)
    assert len(told) == 1
    write_all(tmp_path / "cpu", "cpu", 3_000)
    assert files(tmp_path / "device") == files(tmp_path / "cpu")


def test_a_device_without_streams_is_copied_at_once(tmp_path, device, monkeypatch) -> None:
    monkeypatch.setattr(host_copies, "HostCopies", lambda device: device.streams)
    host_copies._copies_on.cache_clear()
    host_copies._tell_waiting.cache_clear()
    with pytest.warns(HookrunWarning, match="wait for the device: AttributeError: "):
        write_all(tmp_path / "device", device)
    host_copies._copies_on.cache_clear()
    write_all(tmp_path / "cpu", "cpu")
    assert files(tmp_path / "device") == files(tmp_path / "cpu")


KILLED = """
import os, signal, sys
from hookrun.cli import main
replace, left = os.replace, [3]
def killing(source, target, **options):
    if str(target).endswith(".safetensors"):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target, **options)
os.replace = killing
main(sys.argv[1:])
"""


def test_a_run_killed_while_writing_a_shard_is_resumed(tmp_path, monkeypatch, device) -> None:
    """It then has the rows of an uninterrupted one."""
    monkeypatch.chdir(tmp_path)
    argv = [
        "data.batch_size=100", "task=predict", "task.split=train", "train.limit_batches=6",
        "+hooks.features={select: conv1, hook: forward, action: capture}",
        "compute.capture_buffer=1", "compute.threads=1", f"compute.device={device.type}",
    ]  # fmt: skip
    assert main([*argv, "hydra.run.dir=whole"]) == 0
    environment = dict(os.environ)
    if device.type == "second":
        second_device.autoload(tmp_path / "device")
        environment["PYTHONPATH"] = f"{tmp_path / 'device'}:{environment.get('PYTHONPATH', '')}"
    killed = subprocess.run([sys.executable, "-c", KILLED, *argv, "hydra.run.dir=killed"], env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert hookrun.open_run("killed").status["status"] == "running"
    assert main(["resume=killed"]) == 0
    found = hookrun.open_run("killed").captures["features"]["conv1"]
    whole = hookrun.open_run("whole").captures["features"]["conv1"]
    assert torch.equal(found[:], whole[:])
    assert torch.equal(found.sample_ids, whole.sample_ids)
    assert len(shards(Path("killed/captures"))) > 3


def tensors() -> dict[str, Tensor]:
    """Module name -> a batch of six rows, or something else."""
    numbers = torch.randn(6, 3, dtype=torch.complex64)
    return {
        "floats": torch.randn(6, 5),
        "doubles": torch.randn(6, 3).double(),
        "halves": torch.randn(6, 7).bfloat16(),
        "eighths": torch.randn(6, 3).to(torch.float8_e4m3fn),
        "truth": torch.randn(6, 3) > 0,
        "integers": torch.arange(6),
        "complex": numbers,
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "transposed": torch.randn(5, 6).t(),
        "expanded": torch.randn(6, 1).expand(6, 9),
        "channels last": torch.randn(6, 3, 4, 4).to(memory_format=torch.channels_last),
        "no elements": torch.empty(6, 0),
        "no rows": torch.empty(0, 3),
        "one number": torch.tensor(3.0),
        "two long rows": torch.randn(2, 5_000),
    }


def files(folder: Path) -> dict[str, bytes]:
    """What a writer has written: the name of each file and its bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_all(folder: Path, device: torch.device | str, shard_bytes: int = 2**20) -> second_device.Seen:
    """Write three batches of `tensors`; what the second device has seen until the last one was added."""
    torch.manual_seed(0)
    moved = {name: tensor.to(device) for name, tensor in tensors().items()}
    writer = CaptureWriter(folder, shard_bytes)
    with second_device.watch() as seen:
        for step in range(3):
            for name, tensor in moved.items():
                samples = range(len(tensor)) if tensor.dim() else None
                writer.add("h", name, tensor, sample_ids=samples, epoch=0, step=step, call=0)
    writer.close()
    return seen
