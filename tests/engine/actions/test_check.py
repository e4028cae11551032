"""`check`: one result for each tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fake_site import FakeSite
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from hookrun.engine.actions.check import Check

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
BOUNDS = st.one_of(st.none(), st.integers(-2, 2).map(float))
VALUES = st.lists(st.one_of(st.integers(-4, 4).map(float), st.sampled_from([math.nan, math.inf, -math.inf])))


def passes(action: Check, x: Tensor) -> bool:
    site = FakeSite(action)
    action.build(site)(x)
    ((ok, _, _),) = site.verdicts
    assert ok.dim() == 0
    assert ok.dtype == torch.bool
    return bool(ok)


@given(VALUES.filter(len), st.booleans(), BOUNDS, BOUNDS, st.sampled_from(DTYPES))
def test_a_check_passes_finite_elements_within_bounds(
    values: list[float], finite: bool, low: float | None, high: float | None, dtype: torch.dtype
) -> None:
    bounded = low is not None or high is not None
    if not (finite or bounded) or (low is not None and high is not None and low > high):
        return
    wanted = all(
        (math.isfinite(value) or not finite)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and not (bounded and math.isnan(value))
        for value in values
    )
    assert passes(Check(finite=finite, min=low, max=high), torch.tensor(values, dtype=dtype)) == wanted


@pytest.mark.parametrize("dtype", DTYPES + FLOAT8, ids=str)
def test_a_value_clamped_to_a_bound_passes_that_bound(dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 99).double().clamp(-0.1, 0.1).to(dtype)
    assert passes(Check(min=-0.1, max=0.1), x)
    assert not passes(Check(min=-0.1, max=0.08), x)


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.float8_e8m0fnu], ids=str)
def test_float8_is_checked_in_float32(dtype: torch.dtype) -> None:
    x = torch.tensor([0.25, 1, 4]).to(dtype)
    assert passes(Check(), x)
    assert passes(Check(min=0.25, max=4), x)
    assert not passes(Check(max=2), x)
    assert not passes(Check(min=0.5), x)
    x[1] = math.nan
    assert not passes(Check(), x)
    assert not passes(Check(finite=False, max=5), x)


@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:])
@pytest.mark.parametrize("finite", [True, False])
def test_bounds_beyond_the_dtype_admit_no_infinity(dtype: torch.dtype, finite: bool) -> None:
    check = Check(min=-1e300, max=1e300, finite=finite)
    top = torch.finfo(dtype).max
    assert passes(check, torch.tensor([-top, top], dtype=dtype))
    assert not passes(check, torch.tensor([math.inf], dtype=dtype))
    assert not passes(check, torch.tensor([-math.inf], dtype=dtype))


def test_infinite_bounds_admit_infinities_if_finite_is_false() -> None:
    x = torch.tensor([-math.inf, math.inf])
    assert passes(Check(min=-math.inf, max=math.inf, finite=False), x)
    assert not passes(Check(min=-math.inf, max=math.inf), x)


def test_complex_numbers_are_checked_by_their_absolute_value() -> None:
    assert passes(Check(max=5), torch.tensor([3 + 4j]))
    assert not passes(Check(), torch.tensor([complex(0, math.nan)]))


def test_an_empty_tensor_passes() -> None:
    site = FakeSite(Check())
    Check().build(site)(torch.empty(0))
    assert site.verdicts == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "finite"),
        ({"min": 0}, "finite and at least 0"),
        ({"min": -0.5, "max": 1e-6}, "finite, at least -0.5 and at most 1e-06"),
        ({"finite": False, "max": 3}, "at most 3"),
        ({"finite": False, "min": 0, "max": 3}, "at least 0 and at most 3"),
    ],
)
@pytest.mark.parametrize("policy", ["error", "stop", "warn"])
def test_the_message_states_the_requirement(params: dict[str, Any], message: str, policy: str) -> None:
    action = Check(**params, policy=policy)
    site = FakeSite(action)
    action.build(site)(torch.ones(2))
    ((_, text, of_policy),) = site.verdicts
    assert text == f"expected every element to be {message}"
    assert of_policy == policy


def test_a_check_without_a_requirement_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing is left to check"):
        Check(finite=False)
