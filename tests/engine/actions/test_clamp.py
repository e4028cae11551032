"""`clamp`: min(max(x, min), max)."""

from __future__ import annotations

import math

import pytest
import torch
from fake_site import build
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hookrun.engine.actions.clamp import Clamp

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BOUNDS = st.one_of(st.none(), st.integers(-3, 3), st.floats(-3, 3))


@given(BOUNDS, BOUNDS, st.sampled_from(DTYPES), st.lists(st.floats(-9, 9), max_size=9))
def test_results_equal_torch_clamp(low, high, dtype, values) -> None:
    x = torch.tensor(values, dtype=dtype)
    if (low is None and high is None) or (low is not None and high is not None and low > high):
        with pytest.raises(ValidationError):
            Clamp(min=low, max=high)
        return
    clamp = Clamp(min=low, max=high).build(None)  # type: ignore[arg-type]  # it asks nothing of the site
    assert torch.equal(clamp(x), torch.clamp(x, low, high))


def test_infinities_are_limited_but_nan_stays() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf])
    clamped = build(Clamp(min=-1, max=1))(x)
    assert torch.equal(clamped.isnan(), torch.tensor([True, False, False]))
    assert clamped[1:].tolist() == [1, -1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bound_beyond_the_dtype_counts_as_its_largest_number(dtype: torch.dtype) -> None:
    x = torch.tensor([-math.inf, -3.0, 3.0, math.inf], dtype=dtype)
    top = torch.finfo(dtype).max
    clamped = build(Clamp(min=-1e5, max=1e300))(x)
    expected = torch.tensor([max(-1e5, -top), -3.0, 3.0, min(1e300, top)], dtype=torch.float64).to(dtype)
    assert torch.equal(clamped, expected)


def test_an_infinite_bound_means_no_bound() -> None:
    x = torch.tensor([-math.inf, 2.0, math.inf])
    assert build(Clamp(min=0, max=math.inf))(x).tolist() == [0, 2, math.inf]
    assert build(Clamp(min=-1e6, max=math.inf))(x).tolist() == [-1e6, 2, math.inf]


@pytest.mark.parametrize("bounds", [{"min": -1}, {"max": 1}, {"min": -1, "max": 1}], ids=str)
def test_the_gradient_passes_between_the_bounds_only(bounds: dict[str, float]) -> None:
    x = torch.tensor([-2.0, -0.5, 0.5, 2.0], requires_grad=True)
    build(Clamp(**bounds))(x).sum().backward()
    assert x.grad.tolist() == ["min" not in bounds, 1, 1, "max" not in bounds]


def test_min_above_max_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"min 0\.5 is greater than max 0\.1"):
        Clamp(min=0.5, max=0.1)
    with pytest.raises(ValidationError, match="give min, max or both"):
        Clamp()
