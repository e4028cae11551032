"""`hookrun.rows` yields every row once, in nearly uniform order, and goes on where it stopped."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader

import hookrun
from hookrun.store import rows as stored_rows
from hookrun.store.run_dir import RunDir

AT: dict[str, Any] = {"epoch": 0, "step": 0, "call": 0}
COUNT = 700
VALUES = torch.arange(COUNT * 3, dtype=torch.float32).reshape(COUNT, 3)


def made(path: Path, rows: Any = VALUES, status: Any = "done") -> Path:
    """A run whose shards have a few hundred rows."""
    run = RunDir.create(path, buffer=60_000)
    run.set_status("running")
    run.captures.add("seen", "fc", rows, sample_ids=range(COUNT), split="val", **AT)
    run.close()
    run.set_status(status)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("rows") / "run")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "BLOCK_BYTES", 12 * 7)
    monkeypatch.setattr(stored_rows, "CHUNK_BYTES", 12 * 20)


def yielded(rows: Any) -> Tensor:
    return torch.stack(list(rows))


def is_permutation(rows: Tensor, of: Tensor = VALUES) -> bool:
    order = of[:, 0].argsort(stable=True)
    return torch.equal(rows[rows[:, 0].argsort(stable=True)], of[order])


def test_a_pass_is_a_seeded_permutation(run: Path) -> None:
    rows = hookrun.rows(run, "seen", buffer=100)
    first = yielded(rows)
    assert len(rows) == COUNT
    assert is_permutation(first)
    assert torch.equal(yielded(rows), first)
    assert torch.equal(yielded(hookrun.rows(str(run), "seen", "fc", buffer=100)), first)
    other_seed = yielded(hookrun.rows(run, "seen", buffer=100, seed=1))
    rows.set_epoch(1)
    other_epoch = yielded(rows)
    for other in (other_seed, other_epoch, VALUES):
        assert is_permutation(other)
        assert not torch.equal(other, first)


def test_the_order_is_nearly_uniform(run: Path) -> None:
    order = yielded(hookrun.rows(run, "seen", buffer=400))[:, 0] / 3
    places = torch.arange(COUNT, dtype=torch.float32)
    assert abs(torch.corrcoef(torch.stack([places, order]))[0, 1]) < 0.2
    assert (order.diff() == 1).sum() < COUNT // 50  # of the rows follow the one that they were captured after


def test_unshuffled_rows_are_in_the_order_of_the_capture(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", buffer=60_000)
    run.set_status("running")
    ids = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    run.captures.add("seen", "fc", VALUES[ids], sample_ids=ids, split="val", **AT)
    run.close()
    run.set_status("done")
    assert torch.equal(yielded(hookrun.rows(run.path, "seen", shuffle=False)), VALUES)
    assert is_permutation(yielded(hookrun.rows(run.path, "seen", buffer=64)))


def test_rows_of_several_runs_are_mixed(run: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other", VALUES + COUNT * 3)
    both = torch.cat([VALUES, VALUES + COUNT * 3])
    mixed = yielded(hookrun.rows([run, hookrun.open_run(other)], buffer=4 * COUNT))
    assert is_permutation(mixed, both)
    assert 0.3 < (mixed[:COUNT, 0] < COUNT * 3).float().mean() < 0.7
    assert torch.equal(yielded(hookrun.rows([run, other], shuffle=False)), both)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [0, 1, 20, 333, COUNT])
def test_a_pass_goes_on_where_its_state_was_made(run: Path, count: int, shuffle: bool) -> None:
    options: dict[str, Any] = {"buffer": 100, "shuffle": shuffle}
    whole = hookrun.rows(run, "seen", **options)
    whole.set_epoch(2)
    rows = iter(whole)
    before = list(islice(rows, count))
    state = json.loads(json.dumps(whole.state_dict()))
    after = list(rows)
    resumed = hookrun.rows(run, "seen", **options)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    rest = list(resumed)
    assert len(rest) == len(after) == COUNT - count
    for row, wanted in zip(rest, after, strict=True):
        assert torch.equal(row, wanted)
    assert torch.equal(yielded(resumed), torch.stack([*before, *after]))  # the next pass is a whole one


@pytest.mark.parametrize(("key", "value"), [("seed", 1), ("buffer", 99), ("shuffle", False)])
def test_a_state_of_another_order_is_refused(run: Path, key: str, value: Any) -> None:
    state = hookrun.rows(run, "seen", buffer=100).state_dict()
    with pytest.raises(hookrun.HookrunError, match=f"the state has {key}"):
        hookrun.rows(run, "seen", **{"buffer": 100, key: value}).load_state_dict(state)


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_divide_the_rows(run: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool) -> None:
    parts = list[Tensor]()
    for rank in range(3):
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
        rows = hookrun.rows(run, "seen", buffer=50, shuffle=shuffle)
        parts.append(yielded(rows))
        assert len(rows) == len(parts[-1])
    assert sorted(map(len, parts)) == [233, 233, 234]
    assert is_permutation(torch.cat(parts))


def test_workers_divide_the_rows_in_each_epoch(run: Path) -> None:
    rows = hookrun.rows(run, "seen", buffer=100)
    loader = DataLoader(
        rows, batch_size=32, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    first = torch.cat(list(loader))
    rows.set_epoch(1)
    second = torch.cat(list(loader))
    assert is_permutation(first)
    assert is_permutation(second)
    assert not torch.equal(first, second)


def test_the_buffer_is_bounded_in_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "MOST_BYTES", 12 * 40)
    rows = hookrun.rows(run, "seen")
    groups = [len(order) for _, order in rows._shuffled(0)]
    assert max(groups) <= 20
    assert sum(groups) == COUNT


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool, torch.int16]
)
def test_rows_keep_their_dtype_and_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    values = VALUES[:, :2].to(dtype)
    run = made(tmp_path / "run", values)
    kept = sorted(row.view(torch.uint8).tolist() for row in values)
    rows = list(hookrun.rows(run, "seen", buffer=64))
    assert {row.dtype for row in rows} == {dtype}
    assert sorted(row.view(torch.uint8).tolist() for row in rows) == kept


def test_what_has_no_rows_is_refused(run: Path, tmp_path: Path) -> None:
    pair = made(tmp_path / "pair", (VALUES, VALUES[:, :2]))
    narrow = made(tmp_path / "narrow", VALUES[:, :2])
    nothing = made(tmp_path / "nothing", VALUES[:, :0])
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (run, {"capture": "sen"}, "no hook 'sen'.*did you mean 'seen'"),
        (run, {"module": "fcc"}, "no module 'fcc'.*did you mean 'fc'"),
        (pair, {}, r"2 captured tensors, name one: capture='seen', module='fc \[0\]'"),
        ([run, narrow], {}, r"rows of several kinds: .*\[3\].*\[2\]"),
        (nothing, {}, "has no values"),
        ([], {}, "found an empty list"),
        (run, {"buffer": 0}, "found buffer=0"),
    ]
    for source, options, says in refused:
        with pytest.raises(hookrun.HookrunError, match=says):
            hookrun.rows(source, **options)
    assert len(hookrun.rows(pair, module="fc [1]")) == COUNT


def test_a_run_that_is_still_written_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path / "run", status="running")
    with pytest.raises(hookrun.HookrunError, match="is still being written"):
        hookrun.rows(run)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    shard = run / "captures/000000.safetensors"
    whole = shard.read_bytes()
    rows = hookrun.rows(run)
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    header["0"]["data_offsets"][0] = 2**63
    text = json.dumps(header).encode()
    far = (len(text).to_bytes(8, "little") + text + whole)[: len(whole)]
    for content in (
        whole[:-5],
        b"\xff" * len(whole),
        whole.replace(b"F32", b"I32"),
        whole.replace(b'"0"', b'"9"'),
        far,
    ):
        shard.write_bytes(content)
        with pytest.raises(hookrun.HookrunError, match=r"000000\.safetensors"):
            list(rows)
