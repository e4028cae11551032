"""What holds for every action: edits keep shape and dtype and touch nothing, observers leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing import assert_close

from hookrun.actions import Action, actions
from hookrun.actions.stats import Statistic
from hookrun.hook_types import APPLY, SAVED_TENSORS

Build = Callable[..., Callable[[Any], Any]]
A = actions()
EDITS: dict[str, Action] = {
    "scale by a number": A["scale"](factor=0.3),
    "scale by a list": A["scale"](factor=[0.1, 0.2, 0.3]),
    "clamp": A["clamp"](min=-0.5, max=0.5),
    "clamp at the lower end": A["clamp"](min=0),
    "clamp beyond half precision": A["clamp"](min=-1e6, max=1e300),
    "replace by a number": A["replace"](value=0),
    "replace by a list": A["replace"](value=[1, 2, 3]),
    "add a number": A["add_bias"](value=0.1),
    "add a list": A["add_bias"](value=[[1, 2, 3]]),
    "add a trainable list": A["add_bias"](value=[1, 2, 3], trainable=True),
    "gaussian noise": A["noise"](),
    "uniform noise": A["noise"](kind="uniform"),
    "multiplicative noise": A["noise"](kind="multiplicative"),
    "clip the norm": A["clip_norm"](max_norm=0.1),
    "clip the largest": A["clip_norm"](max_norm=0.1, norm_type="inf"),
}
OBSERVERS: dict[str, Action] = {
    "capture": A["capture"](),
    "print shapes": A["print"](),
    "print statistics": A["print"](what="stats"),
    "print values": A["print"](what="value"),
    "statistics": A["stats"](of=get_args(Statistic)),
    "check": A["check"](min=-9, max=9),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TENSORS: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(4, 3),
    "empty": lambda: torch.empty(0, 3),
    "not contiguous": lambda: torch.randn(3, 4).t(),
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "channels last": lambda: torch.randn(2, 4, 2, 3).contiguous(memory_format=torch.channels_last),
}
each_edit = pytest.mark.parametrize("action", EDITS.values(), ids=EDITS)
each_observer = pytest.mark.parametrize("action", OBSERVERS.values(), ids=OBSERVERS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_tensor = pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)


def edit(action: Action, function: Callable[[Any], Any], x: Tensor) -> Tensor:
    """The edited tensor; an action on all tensors together gets a list of one."""
    return function([x])[0] if action.scope == "together" else function(x)


def test_these_are_all_actions_that_see_tensors() -> None:
    covered = {action.action_name for action in (*EDITS.values(), *OBSERVERS.values())}
    elsewhere = {"linear"} | {name for name, cls in A.items() if cls.hook_types <= {APPLY, SAVED_TENSORS}}
    assert covered | elsewhere == set(A)


@each_edit
@each_dtype
@each_tensor
def test_an_edit_keeps_shape_and_dtype_and_leaves_the_tensor_alone(
    action: Action, dtype: torch.dtype, make: Callable[[], Tensor], build: Build
) -> None:
    x = make().to(dtype)
    before = x.clone()
    new = edit(action, build(action), x)
    assert (new.shape, new.dtype, new.device) == (x.shape, x.dtype, x.device)
    assert_close(x, before, rtol=0, atol=0)
    assert new.numel() == 0 or new.data_ptr() != x.data_ptr()


@each_edit
@each_dtype
def test_an_edit_works_on_a_single_number(action: Action, dtype: torch.dtype, build: Build) -> None:
    x = torch.tensor(0.25, dtype=dtype)
    function = build(action)
    if isinstance(next(iter(action.model_dump().values())), tuple):
        with pytest.raises(ValueError, match="does not broadcast"):
            edit(action, function, x)
    else:
        new = edit(action, function, x)
        assert (new.shape, new.dtype) == (x.shape, dtype)


@each_edit
@each_dtype
def test_an_edit_runs_on_fake_tensors(action: Action, dtype: torch.dtype, build: Build) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 3, dtype=dtype)
        new = edit(action, build(action), x)
    assert isinstance(new, FakeTensor)
    assert (new.shape, new.dtype) == (x.shape, x.dtype)


@each_edit
def test_an_edit_leaves_the_global_random_numbers_alone(action: Action, build: Build) -> None:
    x, state = torch.randn(4, 3), torch.get_rng_state()
    edit(action, build(action), x)
    assert torch.equal(torch.get_rng_state(), state)


@each_observer
@each_dtype
@each_tensor
def test_an_observer_returns_nothing_and_leaves_the_tensor_alone(
    action: Action, dtype: torch.dtype, make: Callable[[], Tensor], build: Build
) -> None:
    x = make().to(dtype)
    before, state = x.clone(), torch.get_rng_state()
    assert build(action)(x) is None
    assert_close(x, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@each_observer
def test_an_observer_runs_on_fake_tensors(action: Action, build: Build) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert build(action)(torch.empty(4, 3)) is None


@each_observer
def test_an_observer_records_nothing_that_holds_the_graph(
    action: Action, site_of: Callable[..., Any]
) -> None:
    site = site_of(action)
    x = torch.randn(4, 3, requires_grad=True) * 2
    action.build(site)(x)
    recorded = [value for _, data in site.emitted for value in data.values()]
    recorded += [ok for ok, _, _ in site.verdicts]
    assert site.kept or recorded
    assert not any(isinstance(value, Tensor) and value.requires_grad for value in recorded)
