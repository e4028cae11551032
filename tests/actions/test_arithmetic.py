"""Edits by numbers write the same results as torch's functions, for tensors of every floating-point dtype."""

from __future__ import annotations

import math

import pytest
import torch

from hookrun.actions.arithmetic import AddNumber, Arithmetic, ClampBetween, MultiplyBy

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_equal_torch_s_in_new_memory_and_in_place(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.0, -0.0, 0.0, 1 / 3, 7.0, math.inf, math.nan], dtype=dtype)
    for edit, wanted in (
        (MultiplyBy(1 / 3), x * (1 / 3)),
        (AddNumber(0.1), x + 0.1),
        (ClampBetween(-1, 0.5), x.clamp(-1, 0.5)),
        (ClampBetween(None, 0.5), x.clamp(max=0.5)),
    ):
        out, mine = torch.empty_like(x), x.clone()
        edit(x, out)
        edit(mine, mine)
        for found in (out, mine):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_bound_beyond_the_dtype_counts_as_its_largest_finite_number() -> None:
    x = torch.tensor([1.0, math.inf], dtype=torch.float16)
    out = torch.empty_like(x)
    ClampBetween(None, 1e6)(x, out)
    assert out.tolist() == [1.0, torch.finfo(torch.float16).max]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_compiled_pass_gets_the_numbers_that_torch_uses(dtype: torch.dtype) -> None:
    third = torch.tensor(1 / 3, dtype=dtype).item()
    expected: tuple[tuple[Arithmetic, tuple[float, float]], ...] = (
        (MultiplyBy(1 / 3), (third, 0.0)),
        (AddNumber(1 / 3), (third, 0.0)),
        (ClampBetween(-1, None), (-1, math.inf)),
        (ClampBetween(-math.inf, 2), (-math.inf, 2)),
    )
    for edit, numbers in expected:
        assert edit.numbers(dtype) == numbers
