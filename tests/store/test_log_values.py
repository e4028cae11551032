"""A value that a user's own loop logs is one number, a count or a short name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hookrun.errors import HookrunError
from hookrun.integrations.recording import clock_value, metric_value, split_name


def test_a_number_of_any_library_becomes_a_python_number() -> None:
    for value in (0.5, torch.tensor(0.5), np.float64(0.5), torch.tensor(0.5, requires_grad=True)):
        found = metric_value("loss", value)
        assert found == 0.5 and type(found).__mro__[-2] is float
    assert metric_value("n", torch.tensor(3)) == 3
    assert math.isnan(metric_value("loss", math.nan))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(1), "a Tensor of shape [1], expected a number"),
        (torch.ones((), device="meta"), "its value cannot be read"),
        ("0.5", "found a str, expected a number"),
        (1j, "found a complex"),
        (2**53 + 1, "beyond 2**53 is not kept exactly"),
    ],
)
def test_other_values_are_refused_with_their_name(value: Any, said: str) -> None:
    with pytest.raises(HookrunError) as refusal:
        metric_value("my_loss", value)
    assert said in str(refusal.value) and "my_loss" in str(refusal.value)


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(HookrunError, match="a name of 1,001 characters"):
        metric_value("a" * 1001, 1)


def test_steps_are_whole_numbers_from_0_and_splits_are_short_texts() -> None:
    assert clock_value("step", torch.tensor(3)) == 3 and split_name("val") == "val"
    for value in (-1, 1.0, True):
        with pytest.raises(HookrunError, match="expected a whole number from 0"):
            clock_value("step", value)
    for split in (None, "v" * 1001):
        with pytest.raises(HookrunError, match="expected a short text"):
            split_name(split)
