"""Calls of a user's own code: exceptions are reported with their line, side effects on the run are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hookrun.actions.user_code import UserCodeError, called, on_tensor, only_without_data
from hookrun.errors import CheckFailed
from hookrun.trust.callables import code_of_given


def broken(x: Tensor) -> Tensor:
    raise KeyError("nothing of that name")


def reading(x: Tensor) -> Tensor:
    return x * x.max().item()


def guarded(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return on_tensor("h", code_of_given(function), function)


def test_the_error_names_the_function_and_the_line() -> None:
    with pytest.raises(UserCodeError, match=r"broken' failed: KeyError.*test_user_code\.py") as caught:
        guarded(broken)(torch.ones(2))
    assert caught.value.hook == "h" and isinstance(caught.value.__cause__, KeyError)


def test_a_hookrun_error_is_passed_on_unchanged() -> None:
    def checked(x: Tensor) -> Tensor:
        raise CheckFailed("too large")

    with pytest.raises(CheckFailed):
        called("h", code_of_given(checked), torch.ones(1), checked)


@pytest.mark.parametrize(("function", "runs_with_data"), [(reading, True), (broken, False)])
def test_a_failure_because_tensors_hold_no_data_is_distinguished_from_a_bug(
    function: Any, runs_with_data: bool
) -> None:
    state = torch.get_rng_state()
    with FakeTensorMode(), pytest.raises(UserCodeError) as caught:
        guarded(function)(torch.empty(2, 3))
    assert (only_without_data(caught.value) is not None) is runs_with_data
    assert torch.equal(torch.get_rng_state(), state)
