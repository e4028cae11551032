"""Values from files and runs: one tensor or one row for each sample, and parts, differences and multiples of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hookrun.errors import HookrunError
from hookrun.run_values import (
    CaptureRows,
    PendingRun,
    computable,
    difference,
    digest_of,
    form,
    is_by_token,
    multiple,
    part,
)
from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import open_run
from hookrun.values.index import parse_index

GENERATOR = torch.Generator()


@pytest.fixture
def rows(run: Path) -> CaptureRows:
    capture = open_run(run).captures["seen"]["fc"]
    return CaptureRows(capture, "seen/fc", torch.arange(3), resample=False)


def ids(*samples: int) -> torch.Tensor:
    return torch.tensor(samples)


def test_each_sample_has_its_own_row_in_the_order_of_the_batch(rows: CaptureRows) -> None:
    assert rows.of(ids(12, 14, 10, 12), GENERATOR)[:, 0].tolist() == [12, 14, 10, 12]
    assert (rows.shape, rows.dtype) == ((2,), torch.float16)


def test_a_sample_without_a_row_is_an_error_that_names_it(rows: CaptureRows) -> None:
    assert rows.missing(ids(9, 10, 11, 99)).tolist() == [9, 11, 99]
    with pytest.raises(HookrunError, match="seen/fc has no row of sample 11: it has 3 samples from 10 to 14"):
        rows.of(ids(10, 11), GENERATOR)


def test_resampled_rows_are_always_of_another_sample(run: Path) -> None:
    capture = open_run(run).captures["seen"]["fc"]
    drawn = CaptureRows(capture, "seen/fc", torch.arange(3), resample=True)
    asked = ids(*[10, 12, 14] * 50)
    found = drawn.of(asked, torch.Generator().manual_seed(0))[:, 0].long()
    assert set(found.tolist()) == {10, 12, 14} and not (found == asked).any()
    assert drawn.draws and not len(drawn.missing(ids(99)))
    again = drawn.of(asked, torch.Generator().manual_seed(0))[:, 0].long()
    assert torch.equal(found, again)


def test_a_part_a_difference_and_a_multiple_of_rows_equal_those_of_tensors(rows: CaptureRows) -> None:
    tensor = torch.tensor([1.0, 2.0])
    samples = ids(14, 10)
    plain = rows.of(samples, GENERATOR).float()
    items = parse_index("[1]").items
    for changed, expected in (
        (
            part(rows, items),
            plain[:, items[0]] if not isinstance(items[0], tuple) else plain[:, list(items[0])],
        ),
        (difference(rows, tensor), plain - tensor),
        (difference(tensor, rows), tensor - plain),
        (multiple(rows, -2.0), plain * -2.0),
        (multiple(difference(rows, tensor), 3.0), (plain - tensor) * 3),
    ):
        assert not isinstance(changed, torch.Tensor)
        found = changed.of(samples, GENERATOR)
        assert torch.equal(found, expected) and changed.shape == tuple(expected.shape[1:])
        assert changed.missing(ids(11, 10)).tolist() == [11] and "sample 11" in changed.lacks(ids(11))
    assert torch.equal(difference(tensor, tensor * 2), -tensor)  # type: ignore[arg-type]


def test_small_dtypes_are_computed_in_float32() -> None:
    assert computable(torch.ones(1, dtype=torch.bfloat16)).dtype is torch.float32
    assert computable(torch.ones(1, dtype=torch.float64)).dtype is torch.float64
    assert multiple(torch.ones(1, dtype=torch.float16), 2).dtype is torch.float32  # type: ignore[union-attr]


def test_hashes_follow_content_dtype_shape_and_change(rows: CaptureRows) -> None:
    ones = torch.ones(2, 2)
    sources = [
        ones, ones * 2, ones.reshape(4), ones.double(), rows, multiple(rows, 2), multiple(rows, 3),
        difference(rows, ones[0]), difference(ones[0], rows), PendingRun("a"), PendingRun("b"),
    ]  # fmt: skip
    assert len({digest_of(source) for source in sources}) == len(sources)
    assert digest_of(ones) == digest_of(torch.ones(2, 4)[:, :2])


def test_shapes_and_bytes_as_text(rows: CaptureRows) -> None:
    assert form(torch.ones(2, 3)) == ("[2, 3]", 24) and form(rows) == ("[2]", 4)
    assert form(PendingRun("a")) == ("not known yet", 0)


def test_a_row_with_a_position_belongs_to_a_token() -> None:
    found = [
        is_by_token(cast(StoredCapture, SimpleNamespace(positions=torch.tensor(positions))))
        for positions in ([-1, -1], [-1, 0], [2, 3])
    ]
    assert found == [False, True, True]
