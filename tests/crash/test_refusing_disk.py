"""A write that fails is one clear error, and a removed directory is not made again; never a partial file."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from hookrun.cli import main
from hookrun.run.passes.context import RunContext
from hookrun.store.captures.write import CaptureWriter
from hookrun.store.files import Lines, StoreError, read_lines
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir
from hookrun.store.states.files import save_weights
from hookrun.store.verify import verify

AT = {"epoch": 0, "step": 0, "call": 0}
NOBODY = 65534
SMALL = ("compute.device=cpu", "compute.threads=1", "hydra.run.dir=run")
CAPTURE = "+hooks.h={select: relu2, hook: forward, action: capture}"
PREDICT = ("task=predict", "compute.capture_buffer=1", CAPTURE)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A run directory that may be read but not written to; as root, the test switches to the user nobody."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "checkpoints").mkdir()
        os.chmod(path / "checkpoints", 0o555)
        os.chmod(path, 0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(NOBODY)
        try:
            yield path
        finally:
            if root:
                os.seteuid(0)
            os.chmod(path, 0o755)
            os.chmod(path / "checkpoints", 0o755)


def test_a_full_disk_keeps_every_shard_before_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.set_status("running")
    writer = run.captures
    writer.add("f", "m", torch.zeros(2, 10), sample_ids=[0, 1], **AT)
    writer.flush()
    writer.add("f", "m", torch.ones(3, 10_000), sample_ids=[2, 3, 4], **AT)
    with files_limited_to(50_000), pytest.raises(StoreError) as caught:
        writer.flush()
    path = tmp_path / "captures" / "000001.safetensors"
    assert str(caught.value) == (
        f"cannot write {path}: File too large; there is no file of that name\n"
        f"3 captured rows are lost; the 1 shards written to {path.parent} before are kept and indexed"
    )
    run.close()  # reports nothing a second time
    run.set_status("failed", str(caught.value))
    assert names(path.parent) == ["000000.safetensors", "index.jsonl"]
    assert torch.equal(open_run(tmp_path).captures["f"]["m"][:], torch.zeros(2, 10))


def test_after_a_failed_shard_no_more_rows_are_accepted(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path)
    writer.add("f", "m", torch.ones(10_000), sample_ids=None, **AT)
    with files_limited_to(1_000), pytest.raises(StoreError):
        writer.flush()
    with pytest.raises(StoreError, match="is closed"):
        writer.add("f", "m", torch.ones(1), sample_ids=None, **AT)
    assert names(tmp_path) == []


def test_an_index_that_cannot_grow_has_no_partial_line(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path)
    writer.add("f", "m", torch.zeros(1), sample_ids=None, **AT)
    writer.flush()
    size = (tmp_path / "index.jsonl").stat().st_size
    writer.add("f", "m" * 2 * size, torch.ones(1), sample_ids=None, **AT)  # a line longer than the shard
    with files_limited_to(size + 100), pytest.raises(StoreError, match=r"index\.jsonl: File too large; 1"):
        writer.flush()
    assert (tmp_path / "index.jsonl").stat().st_size == size


def test_a_failed_checkpoint_keeps_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    model = nn.Linear(100, 100)
    save_weights(model, path)
    before = path.read_bytes()
    with files_limited_to(10_000), pytest.raises(StoreError) as caught:
        save_weights(model, path)
    assert str(caught.value) == f"cannot write {path}: File too large; what it held before is kept"
    assert path.read_bytes() == before
    assert names(tmp_path) == ["last.safetensors"]


def test_a_failed_status_keeps_the_one_before(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.set_status("running")
    with files_limited_to(10), pytest.raises(StoreError, match="what it held before is kept"):
        run.set_status("done")
    assert open_run(tmp_path).status["status"] == "running"


def test_a_partly_written_line_is_removed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.log_metrics(step=0)
    with files_limited_to(20), pytest.raises(StoreError) as caught:
        run.log_metrics(step=1, loss=0.5)
    path = tmp_path / "metrics.jsonl"
    assert str(caught.value) == f"cannot append to {path}: File too large; 1 line kept"
    run.log_metrics(step=2)
    run.close()
    assert list(read_lines(path)) == [(1, {"step": 0}), (2, {"step": 2})]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_no_space_left_is_reported_in_the_system_s_words() -> None:
    path = Path("/dev/full")
    lines = Lines(path)
    with pytest.raises(StoreError) as caught:
        lines.extend([{"step": 0}])
    lines.close()
    assert str(caught.value) == f"cannot append to {path}: No space left on device; no line was written"


def test_a_read_only_folder_is_named(read_only: Path) -> None:
    run = RunDir.create(read_only)
    run.captures.add("f", "m", torch.ones(1), sample_ids=None, **AT)
    cases = {
        f"cannot write {read_only}/status.json: ": lambda: run.set_status("running"),
        f"cannot append to {read_only}/metrics.jsonl: ": lambda: run.log_metrics(step=0),
        f"cannot make the folder {read_only}/captures: ": run.captures.flush,
        f"cannot write {read_only}/checkpoints/last.safetensors: ": lambda: save_weights(
            nn.Linear(1, 1), run.checkpoints / "last.safetensors"
        ),
    }
    for said, write in cases.items():
        with pytest.raises(StoreError) as caught:
            write()
        assert str(caught.value).startswith(f"{said}Permission denied")
    run.close()
    assert names(read_only) == ["checkpoints"]
    assert names(read_only / "checkpoints") == []


@contextmanager
def no_more_files(left: int = 0) -> Iterator[None]:
    """No file can be opened, or few at a time: the other descriptors are used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(2)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_without_a_descriptor_is_named(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.set_status("running")
    run.captures.add("f", "m", torch.ones(1), sample_ids=None, **AT)
    cases = {
        f"cannot write {tmp_path}/status.json: Too many open files; what it held before is kept": (
            lambda: run.set_status("done")
        ),
        f"cannot append to {tmp_path}/metrics.jsonl: Too many open files": lambda: run.log_metrics(step=0),
        f"cannot write {tmp_path}/captures/000000.safetensors: Too many open files": run.captures.flush,
        f"cannot list {tmp_path}/captures: Too many open files": run.write_manifest,
    }
    for said, write in cases.items():
        with no_more_files(), pytest.raises(StoreError) as caught:
            write()
        assert str(caught.value).startswith(said)
    run.close()
    assert open_run(tmp_path).status["status"] == "running"
    assert names(tmp_path / "captures") == []


def test_a_run_with_few_file_descriptors_needs_no_more(tmp_path: Path) -> None:
    """Shards, lines and checkpoints are closed once they are written."""
    with no_more_files(left=24):
        assert main([*SMALL, *PREDICT, "train.limit_batches=8"]) == 0
    assert open_run(tmp_path / "run").status["status"] == "done"


def test_a_clock_that_is_set_back_ends_no_run_before_it_began(tmp_path, monkeypatch) -> None:
    class Clock(datetime):
        times: ClassVar = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (9, 7, 8)]

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.times.pop(0)

    monkeypatch.setattr("hookrun.store.run_dir.datetime", Clock)
    run = RunDir.create(tmp_path)
    for status in ("running", "running", "done"):
        run.set_status(status)  # type: ignore[arg-type]
    found = open_run(tmp_path).status
    assert found["started"] == found["ended"] == "2026-01-01T09:00:00.000+00:00"


def full(path: str | Path, *_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_the_end_of_a_run_finds_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path)
    run.set_status("running")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        run.set_status("failed", "no space\n" * 1000, 1)
    status = open_run(tmp_path).status
    assert status["status"] == "failed"
    assert status["exit_code"] == 1
    assert status["reason"].startswith("no space")
    assert len(status["reason"]) == 500
    assert (tmp_path / "status.json").stat().st_size < 4096
    assert names(tmp_path) == ["status.json"]


def test_a_run_that_fills_its_disk_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace = os.replace
    shards: list[str | Path] = []

    def fills_up(source: str | Path, target: str | Path) -> None:
        if str(target).endswith(".safetensors"):
            shards.append(target)
        if len(shards) > 3:
            full(target)
        replace(source, target)

    monkeypatch.setattr("os.replace", fills_up)
    assert main([*SMALL, *PREDICT, "task.split=train"]) == 1
    said = capsys.readouterr().err
    # Of captures or of predictions: each has a writer of its own.
    refused = {str(shard) for shard in shards[3:] if f"cannot write {shard}: No space left on device" in said}
    assert refused
    assert "captured rows are lost" in said
    assert "Traceback" not in said
    assert "report: not made" in said
    run = open_run(tmp_path / "run")
    assert run.status["status"] == "failed"
    assert any(shard in run.status["reason"] for shard in refused)
    assert verify(run.path).bad == []
    assert len(run.captures["h"]["relu2"]) >= 64


def test_a_folder_that_cannot_be_flushed_at_the_end_is_a_note(monkeypatch, capsys) -> None:
    fsync = os.fsync
    set_status = RunDir.set_status

    def refuse_folders(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(file)

    def set_with_bad_folders(run: RunDir, status: Any, *more: Any, **options: Any) -> None:
        with monkeypatch.context() as patch:
            if status != "running":
                patch.setattr(os, "fsync", refuse_folders)
            set_status(run, status, *more, **options)

    monkeypatch.setattr(RunDir, "set_status", set_with_bad_folders)
    assert main([*SMALL, "task=evaluate", "train.limit_batches=1"]) == 0
    assert "NOTE: cannot flush the folder" in capsys.readouterr().err
    assert open_run("run").status["status"] == "done"
    assert verify("run").bad == []


def test_a_final_status_that_cannot_be_written_still_verifies(monkeypatch, capsys) -> None:
    set_status = RunDir.set_status

    def refuse_done(run: RunDir, status: Any, *more: Any, **options: Any) -> None:
        if status == "done":
            raise StoreError("cannot write status.json: Input/output error")
        set_status(run, status, *more, **options)

    monkeypatch.setattr(RunDir, "set_status", refuse_done)
    assert main([*SMALL, "task=evaluate", "train.limit_batches=1"]) == 1
    assert open_run("run").status["status"] == "failed"
    assert verify("run").bad == []


@pytest.fixture
def at_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Call a function before the n-th forward; returns a list that grows by one with each forward."""

    forward = RunContext.forward

    def at_forward(number: int, do: Callable[[], Any]) -> list[int]:
        calls = list[int]()

        def counted(self: RunContext, *args: Any) -> Any:
            calls.append(len(calls))
            if len(calls) == number:
                do()
            return forward(self, *args)

        monkeypatch.setattr(RunContext, "forward", counted)
        return calls

    return at_forward


def remove(path: Path) -> None:
    """Remove at once, even while another thread writes into it."""
    gone = path.with_name("gone")
    path.rename(gone)
    if gone.is_file():
        gone.rename(path.parents[1] / "gone")
    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(gone, ignore_errors=True)


def test_a_run_whose_directory_is_removed_fails_early(tmp_path: Path, at_forward, capsys) -> None:
    path = tmp_path / "run"
    tasks = {
        "task=train train.log_every=1": "metrics.jsonl was removed during the run",
        "task=predict task.split=train compute.capture_buffer=1": "samples.jsonl was removed during the run",
    }
    for task, said in tasks.items():
        calls = at_forward(2, lambda: remove(path))
        assert main([*SMALL, *task.split(), CAPTURE]) == 1, task
        err = capsys.readouterr().err
        assert str(path) in err, err
        assert said in err, err
        assert "Traceback" not in err.replace("traceback: not saved", ""), err
        assert len(calls) < 20, f"{task}: it went on for {len(calls)} batches"
        assert not path.exists(), task


def test_a_run_does_not_write_into_another_run_of_its_name(tmp_path: Path, at_forward, capsys) -> None:
    path = tmp_path / "run"

    def replaced() -> None:
        path.rename(tmp_path / "moved")
        path.mkdir()
        (path / "status.json").write_text("another's")

    at_forward(2, replaced)
    assert main([*SMALL, "task=evaluate"]) == 1
    assert "removed during the run" in capsys.readouterr().err
    assert {each.name: each.read_text() for each in path.iterdir() if each.suffix == ".json"} == {
        "status.json": "another's"
    }


def test_a_run_that_has_lost_files_of_its_own_fails_at_the_end(tmp_path, at_forward, capsys) -> None:
    lost = (".hydra", "captures/000000.safetensors", "plan.json")
    at_forward(20, lambda: [remove(tmp_path / "run" / name) for name in lost])
    assert main([*SMALL, *PREDICT, "task.split=train"]) == 1
    said = capsys.readouterr().err
    assert "has lost files that were written to it: .hydra" in said
    for name in lost:
        assert name in said
    assert '"failed"' in (tmp_path / "run/status.json").read_text()


def test_each_part_of_a_removed_directory_names_its_path(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.set_status("running")
    run.log_metrics(step=0)
    run.captures.add("f", "m", torch.ones(1), sample_ids=None, **AT)
    run.captures.flush()
    shutil.rmtree(run.path)
    run.captures.add("f", "m", torch.ones(1), sample_ids=None, **AT)
    cases: dict[str, Callable[[], Any]] = {
        "metrics.jsonl was removed during the run, with its 1 lines": lambda: run.log_metrics(step=1),
        "captures/index.jsonl was removed": run.captures.flush,
        "cannot be reached: No such file": lambda: run.set_status("done"),
        "cannot be reached": run.write_manifest,
    }
    for said, write in cases.items():
        with pytest.raises(StoreError, match=said) as caught:
            write()
        assert str(run.path) in str(caught.value)
    with pytest.raises(StoreError, match="was removed during the run"):
        run.close()
    assert not run.path.exists()


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: a longer write is cut short and then fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
