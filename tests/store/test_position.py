"""A run directory that was cut off is continued from a position: data before it is kept, later data removed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookrun.run.ranks import ALONE, Ranks
from hookrun.store.files import StoreError
from hookrun.store.format import SAMPLES, STATS
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir
from hookrun.store.states import position as cutting
from hookrun.store.verify import verify

BUFFER = 3 * 2600  # bytes, of which a third is a shard: two batches


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, Any]:
    return ended(whole(tmp_path / "whole"))


def test_the_end_equals_that_of_an_uninterrupted_run(tmp_path: Path, expected: dict[str, Any]) -> None:
    for cut in range(7):
        path = tmp_path / str(cut)
        run = whole(path, cut)
        position = run.position()
        for number in range(cut, 5):  # these batches are lost
            record(run, number)
        run.close()
        tear(path)
        run = RunDir.reopen(path, position, BUFFER)
        assert run.position() == position
        for number in range(cut, 7):
            record(run, number)
        assert ended(run) == expected


def test_without_a_position_everything_is_removed(tmp_path: Path, expected: dict[str, Any]) -> None:
    run = whole(tmp_path / "run", 4)
    run.close()
    tear(run.path)
    (run.path / "captures" / "mine.txt").write_text("somebody's own")
    run = RunDir.reopen(run.path, None, BUFFER)
    left = sorted(each.name for each in run.path.rglob("*"))
    assert left == ["captures", "mine.txt", "predictions", "status.json"]
    (run.path / "captures" / "mine.txt").unlink()
    for number in range(7):
        record(run, number)
    assert ended(run) == expected


def test_the_start_time_of_the_first_process_is_kept(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.set_status("running")
    started = json.loads((tmp_path / "status.json").read_text())["started"]
    again = RunDir.reopen(tmp_path, run.position())
    again.set_status("running")
    assert json.loads((tmp_path / "status.json").read_text())["started"] == started
    (tmp_path / "status.json").write_text("{")
    RunDir.reopen(tmp_path, None).set_status("done")
    assert json.loads((tmp_path / "status.json").read_text())["started"] > started


def test_a_directory_may_be_cut_back_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
) -> None:
    class Killed(BaseException):
        pass

    def dying(real: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*args, **kwargs)

        return call

    died = 0
    for moment in range(20):
        path = tmp_path / str(moment)
        run = whole(path, 3)
        position = run.position()
        for number in range(3, 6):
            record(run, number)
        run.close()
        tear(path)
        with monkeypatch.context() as patch:
            left = [moment]
            patch.setattr(Path, "unlink", dying(Path.unlink, left))
            patch.setattr(cutting.os, "ftruncate", dying(os.ftruncate, left))
            try:
                RunDir.reopen(path, position, BUFFER)
            except Killed:
                died += 1
                assert verify(path).bad == [], "what is indexed is whole at every moment"
        run = RunDir.reopen(path, position, BUFFER)
        for number in range(3, 7):
            record(run, number)
        assert ended(run) == expected
    assert 8 < died < 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": 10**6}, r"metrics.jsonl has 2\d\d bytes, and no line ends at byte 1,000,000"),
        ({"stats": -3}, r"stats.jsonl has .*, and no line ends at byte"),
        ({"samples": -10_000}, "greater than or equal to 0"),
        ({"captures": {"shards": 2}}, "index of captures names 2 shards in .* bytes, the state says 2 in "),
        ({"captures": {"index": 0, "shards": 2}}, r"2 shards in [\d,]+ bytes, the state says 2 in 0"),
    ],
)
def test_a_position_beyond_the_files_changes_nothing(change, message: str, tmp_path: Path) -> None:
    run = whole(tmp_path / "run", 5)
    position = run.position()
    run.close()
    for name, value in change.items():
        if isinstance(value, dict):
            position[name] = {**position[name], **value}
        elif value < 0:
            position[name] += value
        else:
            position[name] = value
    refuse(run.path, position, message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("captures/000000.safetensors", "captures/000000.safetensors: No such file"),
        ("captures/index.jsonl", "index.jsonl: No such file"),
    ],
)
def test_a_position_needs_the_files_of_its_captures(name: str, message: str, tmp_path: Path) -> None:
    run = whole(tmp_path / "run", 5)
    position = run.position()
    run.close()
    (run.path / name).unlink()
    refuse(run.path, position, message)


def test_a_position_needs_shards_of_their_size(tmp_path: Path) -> None:
    run = whole(tmp_path / "run", 5)
    position = run.position()
    run.close()
    (run.path / "captures" / "000000.safetensors").write_bytes(b"x")
    refuse(run.path, position, "captures/000000.safetensors has 1 bytes, its index says")


@pytest.mark.parametrize(
    ("name", "message"),
    [("samples.jsonl", "it is a link"), ("predictions", "predictions is not a folder of its own")],
)
def test_a_link_in_place_of_a_file_is_not_followed(name: str, message: str, tmp_path: Path) -> None:
    run = whole(tmp_path / "run", 5)
    position = run.position()
    run.close()
    secret = tmp_path / "secret"
    secret.write_text("not yours\n")
    (run.path / name).rename(tmp_path / "before")
    (run.path / name).symlink_to(secret if name == "samples.jsonl" else tmp_path)
    refuse(run.path, position, message)
    assert secret.read_text() == "not yours\n"


def test_a_file_that_was_deleted_during_the_run_has_no_position(tmp_path: Path) -> None:
    run = whole(tmp_path / "run", 3)
    (run.path / "stats.jsonl").unlink()
    with pytest.raises(StoreError, match=r"stats.jsonl was removed during the run, with its 3 lines"):
        run.position()
    with pytest.raises(StoreError):
        run.close()


class Three(Ranks):
    """Rank 0 of three; the others have the same position."""

    size = 3

    def gathered(self, plain: Any) -> list[Any]:
        return [plain, plain, plain]


def test_a_position_names_the_folders_of_all_ranks(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.captures.add("h", "m", torch.ones(2, 3), sample_ids=[0, 1], epoch=0, step=0, call=0)
    position = run.position()
    run.close()
    assert position["captures"]["index"] == (tmp_path / "captures/index.jsonl").stat().st_size > 0
    assert position["captures"]["shards"] == 1
    assert position["captures"]["others"] == []
    assert position["predictions"] == {"index": 0, "shards": 0, "counts": {}, "turns": False, "others": []}

    own = {**position["captures"], "turns": True}
    before = {"captures": own | {"others": [own | {"index": index, "others": []} for index in (5, 6)]}}
    for ranks, others in ((ALONE, [5, 6]), (Three(), [own["index"]] * 2)):
        found = RunDir(tmp_path, ranks=ranks, position=before).position()["captures"]
        assert found | {"others": []} == own, "a folder to which nothing is added keeps its position"
        assert [part["index"] for part in found["others"]] == others


def record(run: RunDir, number: int) -> None:
    """Write the records of a run for the batch with that number."""
    at: dict[str, Any] = {"sample_ids": [2 * number, 2 * number + 1], "epoch": 0, "step": number, "call": 0}
    run.captures.add("h", "fc", torch.full((2, 5), float(number)), split="val", **at)
    run.predictions.add("predictions", "output", torch.full((2, 3), -float(number)), split="val", **at)
    run.log_metrics(step=number, split="val", loss=number / 3)
    run.append(STATS, [{"hook": "h", "module": "fc", "step": number}])
    run.append(SAMPLES, [{"split": "val", "sample": number}])


def refuse(path: Path, position: dict[str, Any], message: str) -> None:
    """Reopening is an error with this message, and changes no file."""

    def content() -> dict[Path, bytes]:
        return {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}

    before = content()
    with pytest.raises(StoreError, match=message):
        RunDir.reopen(path, position)
    assert content() == before


def recorded(path: Path) -> dict[str, Any]:
    """Everything that a reader finds."""
    run = open_run(path)
    assert verify(path).bad == []
    found: dict[str, Any] = {"files": sorted(each.name for each in path.iterdir())}
    for name, rows in {"captures": run.captures["h"]["fc"], "predictions": run.predictions}.items():
        found[name] = rows[:].tolist(), rows.sample_ids.tolist(), rows.steps.tolist()
    for name in ("metrics", "stats", "samples"):
        found[name] = (path / f"{name}.jsonl").read_text()
    return found


def whole(path: Path, batches: int = 7) -> RunDir:
    run = RunDir.create(path, BUFFER)
    run.set_status("running")
    for number in range(batches):
        record(run, number)
    return run


def ended(run: RunDir) -> dict[str, Any]:
    counts = dict(run.captures.counts)
    run.close()
    run.write_manifest()
    run.set_status("done")
    return {**recorded(run.path), "counts": counts}


def tear(path: Path) -> None:
    """Partly written files, as a process that is killed while writing may leave."""
    for name in ("metrics.jsonl", "captures/index.jsonl"):
        with open(path / name, "ab") as file:
            file.write(b'{"step": 1')
    (path / "captures" / "000900.safetensors").write_bytes(b"torn")
    (path / "captures" / ".000901.safetensors.7.tmp").write_bytes(b"torn")
    (path / ".status.json.7.tmp").write_bytes(b"{")
    for name in ("manifest.json", "hooks.json"):
        (path / name).write_text("{}")
