"""`print`: values as records that people can read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fake_site import FakeSite
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hookrun.engine.actions.print import LIMIT, Print


def printed(what: str, value: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """The records that `what` gives for a value."""
    action = Print(what=what)
    site = FakeSite(action)
    assert action.build(site)(value) is None
    return site.emitted


@pytest.mark.parametrize("what", ["shape", "stats", "value"])
def test_every_member_has_a_record_under_its_path(what: str) -> None:
    records = printed(what, (torch.ones(2), None, torch.zeros(3)))
    assert [path for path, _ in records] == ["[0]", "[1]", "[2]"]
    assert records[1][1] == {"shape": None}
    assert "shape" not in records[0][1] or records[0][1] == {"shape": [2]}
    if what == "shape":
        assert printed(what, torch.ones(())) == [("", {"shape": []})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_statistics_of_any_dtype(dtype: torch.dtype) -> None:
    assert float(printed("stats", torch.tensor([True, False, False, False]))[0][1]["mean"]) == 0.25
    ((_, data),) = printed("stats", torch.tensor([1, 2, 3, 6]).to(dtype))
    assert list(data) == ["mean", "std", "min", "max"]
    expected = [3, math.sqrt(14 / 3), 1, 6]
    assert [float(value) for value in data.values()] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("x", "shown"),
    [
        (torch.tensor([[1.0, 2.5], [-3.0, 0.0]]), [[1, 2.5], [-3, 0]]),
        (torch.tensor(0.1), 0.1),
        (torch.tensor([1 / 3, 1e-9 / 3, 1e9 / 3]), [0.333333, 3.33333e-10, 3.33333e8]),
        (torch.tensor([0.1]).bfloat16(), [0.100098]),
        (torch.tensor([1234567890123]), [1234567890123]),
        (torch.tensor([True]), [True]),
        (torch.tensor([1 + 2j]), [[1, 2]]),
        (torch.empty(0, 3), []),
        (torch.tensor([math.inf, -math.inf]), [math.inf, -math.inf]),
        (torch.tensor([math.nan]), pytest.approx([math.nan], nan_ok=True)),
        (torch.ones(2, requires_grad=True), [1, 1]),
    ],
)
def test_values_are_nested_lists_of_six_significant_digits(x: Tensor, shown: Any) -> None:
    assert printed("value", x) == [("", {"value": shown})]


def test_a_large_tensor_is_truncated_with_a_note() -> None:
    x = torch.arange(LIMIT + 1.0)
    assert printed("value", x[:LIMIT]) == [("", {"value": list(range(LIMIT))})]
    ((_, data),) = printed("value", x.view(7, -1))
    assert data == {"value": list(range(LIMIT)), "truncated": LIMIT + 1, "shape": [7, 143]}


def test_a_fake_tensor_has_a_shape_but_no_values() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    for x in (fake, torch.ones(2, device="meta")):
        assert printed("value", x) == [("", {"value": None, "shape": [2]})]
