"""Captures read back lazily: rows by number in data-set order, found by names, from indexes whose lines are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hookrun.engine.actions.base import TokenRows
from hookrun.errors import HookrunError, Lookup, NoSuchKey
from hookrun.store.captures.read import SampleTable, StoredCapture, read_captures
from hookrun.store.captures.shard import Shard, index_name, index_names, read_index, row_bytes, shard_name
from hookrun.store.captures.tensor_file import DTYPES
from hookrun.store.captures.write import CaptureWriter
from hookrun.store.files import StoreError
from hookrun.store.format import VERSION, encode
from hookrun.store.records import checked

AT = {"epoch": 0, "step": 0, "call": 0}


def batches(order: Sequence[int], size: int) -> tuple[list[Tensor], list[list[int]]]:
    """Batches whose rows hold their sample's number three times, and the samples of each batch."""
    ids = [list(order[start : start + size]) for start in range(0, len(order), size)]
    return [torch.tensor(batch, dtype=torch.float32)[:, None].repeat(1, 3) for batch in ids], ids


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> StoredCapture:
    """100 samples in a shuffled order, in several shards."""
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).tolist()
    folder = tmp_path_factory.mktemp("shuffled")
    capture = recorded(folder, *batches(order, 8))
    assert len(read_index(folder)) > 5
    return capture


ROWS = torch.arange(100.0)[:, None].expand(100, 3)


def test_rows_are_in_data_set_order_also_after_shuffling(shuffled: StoredCapture) -> None:
    assert len(shuffled) == 100
    assert shuffled.shape == (100, 3)
    assert shuffled.dtype == torch.float32
    assert torch.equal(shuffled[:], ROWS)
    assert shuffled.sample_ids.tolist() == list(range(100))
    assert torch.equal(torch.stack(list(shuffled)), ROWS)


@given(st.slices(100))
def test_a_slice_means_what_it_means_for_a_tensor(shuffled: StoredCapture, index: slice) -> None:
    expected = ROWS[torch.arange(100)[range(100)[index] if len(range(100)[index]) else []]]
    assert torch.equal(shuffled[index], expected)


@given(st.lists(st.integers(-100, 99), max_size=20))
def test_a_list_of_rows_may_repeat(shuffled, index) -> None:
    expected = ROWS[torch.tensor(index, dtype=torch.int64)]
    assert torch.equal(shuffled[index], expected)
    assert torch.equal(shuffled[torch.tensor(index, dtype=torch.int32)], expected)


def test_rows_of_one_shard_are_read_in_any_order(tmp_path: Path) -> None:
    capture = recorded(tmp_path, *batches(range(4), 4))
    for index in product(range(4), repeat=3):
        assert capture[list(index)][:, 0].tolist() == list(index)


@given(st.integers(-100, 99))
def test_an_int_gives_one_row(shuffled: StoredCapture, index: int) -> None:
    assert torch.equal(shuffled[index], ROWS[index])
    assert torch.equal(shuffled[torch.tensor(index)], ROWS[index])


@pytest.mark.parametrize("index", [100, -101, [0, 100], torch.tensor([-101])])
def test_a_missing_row_is_an_index_error(shuffled: StoredCapture, index: Any) -> None:
    with pytest.raises(IndexError, match=r"no row -?10[01], there are 100"):
        shuffled[index]


@pytest.mark.parametrize(
    "index", [1.0, True, [[0, 1]], torch.ones(100, dtype=torch.bool), [0.5], "a", None, (slice(2), 0)]
)
def test_only_whole_numbers_choose_rows(shuffled: StoredCapture, index: Any) -> None:
    with pytest.raises(IndexError, match="rows are chosen by"):
        shuffled[index]


def test_rows_that_were_read_are_the_reader_s_own_copy(shuffled: StoredCapture) -> None:
    for index in (0, slice(0, 10), [3, 3]):
        shuffled[index].fill_(-1)  # type: ignore[index]
    shuffled.sample_ids.fill_(-1)
    assert torch.equal(shuffled[:], ROWS)
    assert shuffled.sample_ids.tolist() == list(range(100))


def test_only_the_shards_of_the_wanted_rows_are_read(tmp_path: Path) -> None:
    capture = recorded(tmp_path, *batches(range(100), 10))
    assert len(capture.sample_ids) == 100
    others = sorted(tmp_path.glob("*.safetensors"))[1:]
    for path in others:
        path.unlink()
    fresh = read(tmp_path)["f"]["m"]
    fresh._table = capture._table  # the tables of all shards are needed once, for the order
    assert torch.equal(fresh[0:5], ROWS[0:5])
    with pytest.raises(StoreError, match=f"cannot read {others[-1]}"):
        fresh[99]


FIRINGS = [torch.full((2, 2), float(step)) for step in range(5)]
MIXED = [torch.full((2,), 5.0), torch.tensor(9.0), torch.full((2,), 1.0)]


@pytest.mark.parametrize(
    ("values", "ids", "samples", "steps"),
    [
        (*batches([3, 1, 2, 3, 1, 2], 3), [3, 1, 2, 3, 1, 2], [0, 0, 0, 1, 1, 1]),
        (FIRINGS, None, [-1] * 5, [0, 1, 2, 3, 4]),
        (MIXED, [[6, 5], [4], [1, 0]], [6, 5, -1, 1, 0], [0, 0, 1, 2, 2]),
    ],
    ids=["a sample twice", "firings", "samples and firings"],
)
def test_rows_are_in_recorded_order_where_samples_repeat(
    tmp_path: Path, values: list[Tensor], ids: list[list[int]] | None, samples: list[int], steps: list[int]
) -> None:
    capture = recorded(tmp_path, values, ids)
    assert capture.sample_ids.tolist() == samples
    assert capture.steps.tolist() == steps
    assert capture.epochs.tolist() == [step // 2 for step in steps]
    assert torch.equal(capture[:].flatten(), torch.cat([value.flatten() for value in values]))
    assert capture[3].shape == capture.shape[1:]


def test_repeated_rows_of_ranks_come_batch_by_batch(tmp_path: Path) -> None:
    batch = [0]
    writers = [CaptureWriter(tmp_path, rank=rank, batch=lambda: batch[0]) for rank in range(2)]
    for batch[0], (rank, writer) in product(range(2), enumerate(writers)):
        writer.add("f", "m", torch.tensor([2.0 * batch[0] + rank]), sample_ids=[rank], **AT)
    for writer in writers:
        writer.close()
    assert read(tmp_path)["f"]["m"][:].tolist() == [0, 1, 2, 3]


def test_rows_of_patterns_are_sorted_by_sample_first(tmp_path: Path) -> None:
    rows = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 1, 0], [0, 0, 1]])  # sample, query, key
    tokens = TokenRows(rows[:, 0], rows[:, 0], rows[:, 1], rows[:, 1], rows[:, 2])
    writer = CaptureWriter(tmp_path)
    writer.add("f", "m", rows, sample_ids=rows[:, 0], tokens=tokens, **AT)
    writer.close()
    assert read(tmp_path)["f"]["m"][:].tolist() == sorted(rows.tolist())


def test_rows_are_found_by_step(tmp_path: Path) -> None:
    capture = recorded(tmp_path, *batches([0, 1, 2, 3] * 4, 2))
    assert capture.where(epoch=1).tolist() == [4, 5, 6, 7]
    assert capture.where(epoch=1, sample=3).tolist() == [7]
    assert capture.where(step=5, call=0).tolist() == [10, 11]
    assert capture.where(call=1).tolist() == []
    assert capture[capture.where(sample=2)].tolist() == [[2, 2, 2]] * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 0), (0, 3)])
def test_every_dtype_is_read_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    value = torch.randint(0, 2, (size,), dtype=torch.uint8).view(dtype).reshape(shape)
    capture = recorded(tmp_path, [value], [list(range(shape[0]))[::-1]])
    found = capture[:]
    assert found.dtype == dtype
    assert found.shape == shape
    assert capture.shape == shape
    assert capture.dtype == dtype
    data = [
        rows.reshape(-1).view(torch.uint8).reshape(shape[0], -1) for rows in (found, value) if rows.numel()
    ]
    assert not data or torch.equal(data[0], data[1].flip(0))
    if shape[0]:
        assert capture[0].shape == shape[1:]


def test_rows_of_differing_shapes_are_read_one_by_one(tmp_path: Path) -> None:
    values = [torch.full((length, 2), float(length)) for length in (3, 4, 4, 3)]
    capture = recorded(tmp_path, values)
    assert [tuple(row.shape) for row in capture] == [(3, 2), (4, 2), (4, 2), (3, 2)]
    assert capture[1:3].shape == (2, 4, 2)
    assert capture[[0, 3]].shape == (2, 3, 2)
    for read_mixed in (lambda: capture[:], lambda: capture.shape, lambda: capture[[0, 1]]):
        with pytest.raises(HookrunError) as caught:
            read_mixed()
        assert str(caught.value) == (
            "f at 'm': rows of 2 kinds (float32 [3, 2], float32 [4, 2]) do not fit into one tensor. "
            "Read row by row: [row for row in capture]"
        )


def test_chosen_rows_are_a_capture_of_their_own(shuffled: StoredCapture) -> None:
    rows = [90, 3, 7, 3]
    chosen = shuffled.chosen(torch.tensor(rows))
    assert len(chosen) == 4
    assert chosen.shape == (4, 3)
    assert chosen.sample_ids.tolist() == rows
    assert torch.equal(chosen[:], ROWS[rows])
    assert torch.equal(chosen[-2:], ROWS[[7, 3]])


def test_a_container_beside_a_bare_tensor_is_found(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path)
    for step, value in enumerate(([torch.zeros(2)], torch.ones(2))):
        writer.add("f", "m", value, sample_ids=None, epoch=0, step=step, call=0)
    writer.close()
    found = {path: tensor[:].tolist() for path, tensor in read(tmp_path)["f"]["m"].items()}
    assert found == {"[0]": [[0, 0]], "": [[1, 1]]}


def test_reading_does_not_depend_on_the_default_device(tmp_path: Path) -> None:
    torch.set_default_device("meta")
    try:
        value = torch.arange(6.0, device="cpu").reshape(2, 3)
        capture = recorded(tmp_path, [value], [[1, 0]])
        assert torch.equal(capture[:], value[[1, 0]])
        assert capture[[0]].device == capture.where(sample=1).device == torch.device("cpu")
    finally:
        torch.set_default_device(None)


class TestNames:
    @pytest.fixture
    def found(self, tmp_path: Path) -> Lookup[Any]:
        writer = CaptureWriter(tmp_path)
        one = torch.ones(2, 1)
        writer.add("features", "layer4", one, sample_ids=[0, 1], **AT)
        writer.add("features", "lstm", (one, (one, 2 * one)), sample_ids=[0, 1], **AT)
        writer.add("features", "head", {"logits": one}, sample_ids=[0, 1], **AT)
        writer.close()
        return read(tmp_path, {"layer4": "layer4", "shared": "layer4"})

    def test_a_container_is_a_mapping_from_path_to_capture(self, found: Lookup[Any]) -> None:
        assert list(found["features"]) == ["layer4", "lstm", "head"]
        assert list(found["features"]["lstm"]) == ["[0]", "[1][0]", "[1][1]"]
        assert found["features"]["lstm"]["[1][1]"][:].tolist() == [[2], [2]]
        assert list(found["features"]["head"]) == ["logits"]

    @pytest.mark.parametrize(
        ("keys", "said"),
        [
            (["featurs"], "no hook 'featurs' in the captures of"),
            (["featurs"], "did you mean 'features'?"),
            (["features", "layer3"], "no module 'layer3' in the captures of 'features': did you mean 'layer4'?"),
            (["features", "head", "logit"], "no tensor 'logit' in features at 'head': did you mean 'logits'?"),
            (["features", "lstm", "[2]"], "no tensor '[2]' in features at 'lstm': did you mean"),
        ],
    )  # fmt: skip
    def test_an_unknown_name_is_an_error_with_the_nearest(self, found, keys: list[str], said: str) -> None:
        with pytest.raises(NoSuchKey) as caught:
            for key in keys:
                found = found[key]
        assert said in str(caught.value)
        assert isinstance(caught.value, KeyError)
        assert isinstance(caught.value, HookrunError)

    def test_rows_of_a_container_need_a_tensor_s_name_first(self, found: Lookup[Any]) -> None:
        for index in (0, slice(0, 2)):
            with pytest.raises(NoSuchKey) as caught:
                found["features"]["lstm"][index]
            assert str(caught.value) == (
                "features at 'lstm' holds one tensor per name; there are: [0], [1][0], [1][1]"
            )

    def test_captures_have_a_readable_repr(self, found: Lookup[Any]) -> None:
        assert repr(found["features"]["lstm"]) == "<features at 'lstm': '[0]', '[1][0]', '[1][1]'>"
        assert repr(found["features"]["layer4"]) == "<features at 'layer4': 2 rows of float32 [1]>"


def test_a_shard_that_was_cut_off_is_named(tmp_path: Path) -> None:
    recorded(tmp_path, [torch.ones(4)])
    path = tmp_path / "000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        StoreError, match=f"{path} has .* bytes, its index says .*: it was changed or cut off"
    ):
        read(tmp_path)["f"]["m"][0]


def test_names_are_found_by_sample_within_a_split(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(
        '{"split": "train", "sample": 0, "file": "a.png", "class": "cat"}\n'
        '{"split": "val", "sample": 0, "file": "b.png"}\n'
    )
    (tmp_path / "tokens.jsonl").write_text('{"token": 7, "text": " the"}\n')
    table = SampleTable(tmp_path)
    assert table.by_sample["val", 0]["file"] == "b.png"
    assert table.by_sample["train", 0]["class"] == "cat"
    assert table.texts == {7: " the"}


def test_without_files_the_table_is_empty(tmp_path: Path) -> None:
    table = SampleTable(tmp_path)
    assert table.lines == []
    assert table.by_sample == {}
    assert table.texts == {}
    (tmp_path / "samples.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError):
        _ = SampleTable(tmp_path).lines


ENTRY = {
    "key": "0", "hook": "h", "module": "layer4\n\0", "path": "[0].logits", "dtype": "bfloat16", "shape": [4, 8],
    "rows": 32, "by": "sample",
}  # fmt: skip
SHARD = {
    "shard": "000000.safetensors", "sha256": "ab" * 32, "bytes": 4096, "columns": ["sample", "epoch", "step", "call"],
    "entries": [ENTRY], "version_of_the_future": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": VERSION + 1}, "this hookrun reads up to"),
        ({"shard": "../../other.safetensors"}, "outside of its folder"),
        ({"entries": [{"key": "0"}]}, r"it has no hook \(entries\.0\.hook, and \d more\)"),
        ({"columns": None}, "found nothing.*columns"),
        ({"bytes": "4096"}, "found a str.*bytes"),
        ({"sha256": "0" * 63}, "sha256"),
        ({"shard": ""}, "shard"),
        ({"shard": "a" * 256}, "shard"),
        ({"entries": [ENTRY | {"shape": [1] * 65}]}, "shape"),
        ({"columns": ["sample", "epoch"]}, "do not say their step, call"),
        ({"shard": "index.jsonl"}, "cannot be a file of it"),
        ({"bytes": 32 * (32 * 2 + 4 * 8) - 1}, "its rows need 3,072 bytes, and the shard has 3,071"),
        ({"entries": [ENTRY | {"dtype": "qint8"}]}, "unknown dtype 'qint8'"),
    ],
)
def test_an_invalid_line_is_refused(change: dict[str, object], said: str) -> None:
    assert checked(SHARD, Shard).file == "000000.safetensors"
    with pytest.raises(ValueError, match=said):
        checked(SHARD | change, Shard)


def test_each_rank_has_its_index_of_shards(tmp_path: Path) -> None:
    assert [index_name(0), index_name(12)] == ["index.jsonl", "index_12.jsonl"]
    assert [shard_name(0, 3), shard_name(12, 3)] == ["000003.safetensors", "12_000003.safetensors"]
    for name in ("index_10.jsonl", "index_2.jsonl", "index_02.jsonl", "index_x.jsonl"):
        (tmp_path / name).write_text("")
    assert index_names(tmp_path) == ["index.jsonl", "index_2.jsonl", "index_10.jsonl"]
    assert index_names(tmp_path / "none") == ["index.jsonl"]


def test_the_bytes_of_a_row_follow_its_dtype() -> None:
    kinds = ("float32", "bfloat16", "bool", "complex128", "uint8")
    assert [row_bytes(dtype, (2, 3)) for dtype in kinds] == [24, 12, 6, 96, 6]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (encode(SHARD), "the shard '000000.safetensors' is in an earlier line"),
        ("{}", "it does not describe a shard"),
    ],
)
def test_a_shard_in_two_lines_is_named(line: str, said: str, tmp_path: Path) -> None:
    for name, content in (("index.jsonl", encode(SHARD)), ("index_1.jsonl", line)):
        (tmp_path / name).write_text(f"{content}\n")
    with pytest.raises(StoreError, match=rf"index_1\.jsonl, line 1: {said}"):
        read_index(tmp_path)


def read(folder: Path, aliases: Mapping[str, str] | None = None) -> Lookup[Any]:
    return read_captures(folder, read_index(folder), aliases or {})


def recorded(
    folder: Path, values: Sequence[Tensor], ids: Sequence[Sequence[int]] | None = None
) -> StoredCapture:
    """The capture of `values`, one per step, two steps per epoch, in shards of a few rows."""
    writer = CaptureWriter(folder, shard_bytes=2_500)
    for step, value in enumerate(values):
        samples = None if ids is None else ids[step]
        writer.add("f", "m", value, sample_ids=samples, epoch=step // 2, step=step, call=0)
    writer.close()
    capture = read(folder)["f"]["m"]
    assert isinstance(capture, StoredCapture)
    return capture
