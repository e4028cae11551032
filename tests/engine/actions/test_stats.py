"""`stats`: statistics as tensors without dimensions, exact also where the mean is large, otherwise equal to torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_site import FakeSite
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from hookrun.engine.actions import stats
from hookrun.engine.actions.stats import DEFAULT, Stats, measuring

ALL = ("mean", "std", "var", "min", "max", "norm", "abs_mean", "abs_max", "sum", "zeros", "nans", "infs")
# In float32 the square of a number below 1e-22 is 0, and so is the std.
NUMBERS = st.floats(-1e3, 1e3, width=32).map(lambda x: x if abs(x) > 1e-15 else 0.0)
FINITE = st.lists(NUMBERS, min_size=2, max_size=40)
OPTIONS = {"readable": False}
ByTorch = Callable[[Tensor], dict[str, float]]


@pytest.fixture(scope="module", params=[False, True], ids=["in torch", "read at once"], autouse=True)
def readable(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "readable", request.param)
        yield


def measured(x: Tensor, *names: str) -> dict[str, Any]:
    return {name: float(value) for name, value in measuring(names)(x, **OPTIONS).items()}


@given(FINITE, st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_every_statistic_equals_torch_s(by_torch: ByTorch, values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values).to(dtype)
    expected = by_torch(x)
    scale = expected["abs_max"]
    for name, value in measured(x, *ALL).items():
        size = scale**2 if name == "var" else scale * len(values)
        assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6 * size), name


@given(st.sampled_from(ALL), st.integers(0, 99))
def test_a_statistic_does_not_depend_on_the_others(name: str, seed: int) -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    assert measured(x, name)[name] == measured(x, *ALL)[name]


@given(st.floats(-1e4, 1e4), st.floats(0.1, 10), st.integers(0, 99))
def test_the_std_is_accurate_if_the_mean_is_far_from_0(mean: float, std: float, seed: int) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(seed)) * std + mean
    assert measured(x, "std")["std"] == pytest.approx(x.double().std().item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.full((5000,), 300.0, dtype=dtype)
    assert measured(x, "norm", "sum") == {"norm": pytest.approx(300 * math.sqrt(5000)), "sum": 300 * 5000}
    assert measuring(["norm"])(x)["norm"].dtype == torch.float32


def test_float64_is_computed_in_float64() -> None:
    found = measuring(DEFAULT)(torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64))
    assert {value.dtype for value in found.values()} == {torch.float64}
    assert found["std"].item() == pytest.approx(1e-12 / math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("size", [3, 4 * stats.CPU_BLOCK + 100], ids=["small", "in parts"])
def test_nan_propagates_as_in_torch(size: int) -> None:
    x = torch.ones(size)
    x[-2:] = torch.tensor([-2, math.inf])
    found = measured(x, *ALL)
    assert found["infs"] == 1
    assert found["nans"] == 0
    assert found["max"] == math.inf
    assert found["min"] == -2
    assert found["norm"] == found["mean"] == math.inf
    assert math.isnan(found["std"])
    x[0], x[-1] = math.nan, 0
    found = measured(x, *ALL)
    assert found["nans"] == 1
    assert found["infs"] == 0
    assert found["zeros"] == pytest.approx(1 / size)
    for name in ("mean", "std", "min", "max", "norm", "abs_max", "sum"):
        assert math.isnan(found[name])


def test_the_std_of_one_element_is_nan() -> None:
    found = measured(torch.tensor([3.0]), *ALL)
    assert math.isnan(found["std"])
    assert math.isnan(found["var"])
    assert found["mean"] == 3
    assert found["norm"] == 3
    assert found["min"] == 3


def test_an_empty_tensor_has_no_mean() -> None:
    found = measured(torch.empty(0, 3), *ALL, "numel", "bytes")
    assert {name for name, value in found.items() if value == 0} == {
        *("sum", "norm", "nans", "infs", "numel", "bytes")
    }
    assert {name for name, value in found.items() if math.isnan(value)} == {
        *("mean", "std", "var", "min", "max", "abs_mean", "abs_max", "zeros")
    }


def test_complex_numbers_count_by_absolute_value() -> None:
    assert measured(torch.tensor([3 + 4j, 0j]), "max", "mean", "zeros") == {
        "max": 5,
        "mean": 2.5,
        "zeros": 0.5,
    }


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float64, 8), (torch.bfloat16, 2), (torch.bool, 1)], ids=str
)
def test_bytes_are_those_of_the_dtype(dtype: torch.dtype, size: int) -> None:
    assert measuring(["bytes", "numel"])(torch.ones(3, 4, dtype=dtype)) == {"bytes": 12 * size, "numel": 12}


def test_default_statistics_are_recorded_in_order() -> None:
    site = FakeSite(Stats())
    Stats().build(site)(torch.randn(4, 5))
    ((path, data),) = site.emitted
    assert path is None
    assert list(data) == ["mean", "std", "min", "max", "norm"]
    for value in data.values():
        assert isinstance(value, Tensor)
        assert value.dim() == 0


@pytest.mark.parametrize(
    ("of", "message"), [("maen", "'mean', 'std'"), (["mean", "q"], "'mean', 'std'"), ([], "empty")]
)
def test_an_unknown_statistic_is_refused(of: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Stats(of=of)


OF_PARTS = ("mean", "std", "var", "sum", "norm", "min", "max", "abs_max")


def test_the_division_into_parts_does_not_change_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (401, 499, 500, 501, 1003)  # the last part has one element, or all of them
    tensors = [torch.randn(size, dtype=torch.float64) * 3 + 50 for size in sizes]
    whole = [measured(x, *OF_PARTS) for x in tensors]
    monkeypatch.setattr(stats, "CPU_BLOCK", 100)
    for x, expected in zip(tensors, whole, strict=True):
        assert measured(x, *OF_PARTS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [4 * stats.CPU_BLOCK, 3 * 2**20 + 7], ids=["in one", "in parts"])
def test_statistics_of_millions_of_elements_are_accurate(by_torch: ByTorch, size: int) -> None:
    x = torch.full((size,), 100.0)
    x[::2] += 0.5
    expected = by_torch(x)
    found = measured(x, "norm", "std", "mean")
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-4)


def test_every_layout_is_supported(by_torch: ByTorch) -> None:
    x = torch.randn(1100, 1000) * 2 + 3
    for same in (x.t(), x.half(), x.bfloat16(), x.double(), x.clone().requires_grad_()):
        expected = by_torch(same)
        assert measured(same, *OF_PARTS) == pytest.approx(
            {name: expected[name] for name in OF_PARTS}, rel=1e-4
        )
    assert measuring(["std"])(x.double())["std"].dtype == torch.float64


def test_the_tensor_is_not_written() -> None:
    x = torch.randn(4 * stats.CPU_BLOCK + 3)
    before = x.clone()
    version = x._version
    measured(x, *OF_PARTS)
    assert torch.equal(x, before)
    assert x._version == version


FAR = [1e-44, 1e-30, 1e-25, 1e-19, 1e18, 1e19, 1e30, 1e34]
"""Numbers of float32 and bfloat16 whose squares are not."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [7, 5000, stats.CPU_BLOCK + 9], ids=["few", "small", "in parts"])
@pytest.mark.parametrize("mean", [0, 5], ids=["around 0", "far from 0"])
def test_the_std_is_torch_s_also_where_squares_are_out_of_range(
    mean: float, size: int, dtype: torch.dtype
) -> None:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) + mean
    for scale in FAR:
        x = (numbers * scale).to(dtype)
        expected = x.float().std().item()
        assert measured(x, *ALL)["std"] == pytest.approx(expected, rel=1e-3, abs=1e-44), scale


@pytest.mark.parametrize("size", [7, 5000, stats.CPU_BLOCK + 9], ids=["few", "small", "in parts"])
@pytest.mark.parametrize("name", ["mean", "std", "var", "norm", "sum"])
def test_no_statistic_overflows_where_torch_s_does_not(name: str, size: int) -> None:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    for scale in [*FAR, 1e37, 1e38]:
        for x in (numbers * scale, numbers.abs() * scale, torch.full((size,), scale)):
            if math.isfinite(getattr(x, name)()):
                assert math.isfinite(measured(x, name)[name]), scale
