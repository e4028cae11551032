"""Promises that hold for every action: edits keep shape and dtype and leave their input; observers change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from fake_site import FakeSite, build
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing import assert_close

import hookrun
from hookrun.engine.actions import Action, actions
from hookrun.engine.actions.stats import Statistic
from hookrun.engine.hook_types import APPLY, SAVED_TENSORS
from hookrun.engine.spec.hook import parse_hooks

A = actions()
FOLDER = Path(__file__).parents[3] / "conf" / "hooks"
FORMS: dict[str, Action] = {
    "scale by a list": A["scale"](factor=[0.1, 0.2, 0.3]),
    "clamp at both ends": A["clamp"](min=-0.5, max=0.5),
    "clamp beyond half precision": A["clamp"](min=-1e6, max=1e300),
    "replace by a list": A["replace"](value=[1, 2, 3]),
    "add a number": A["add_bias"](value=0.1),
    "add a list": A["add_bias"](value=[[1, 2, 3]]),
    "add a trainable list": A["add_bias"](value=[1, 2, 3], trainable=True),
    "uniform noise": A["noise"](kind="uniform"),
    "multiplicative noise": A["noise"](kind="multiplicative"),
    "a function": A["python"](function=lambda x: x * 0.5),
    "clip the largest": A["clip_norm"](max_norm=0.1, norm_type="inf"),
    "print statistics": A["print"](what="stats"),
    "print values": A["print"](what="value"),
    "statistics": A["stats"](of=get_args(Statistic)),
    "project a list": A["project"](direction=[1, 2, 3]),
    "check": A["check"](min=-9, max=9),
}
"""Forms that the examples under conf/hooks leave out, for tensors whose last dimension is 3."""


def sees_any_tensor(action: Action) -> bool:
    """Whether it works on a tensor of any shape alone: without lists, files or arguments of a module."""
    fits_all = not action.outside_values() and not any(
        isinstance(value, tuple) and isinstance(value[0], float | tuple) for _, value in action
    )
    return fits_all and not sees_something_else(type(action))


def sees_something_else(action: type[Action]) -> bool:
    """Whether it does not act on tensors of any kind."""
    picks = action.taken is not Action.taken
    return (
        action.hook_types <= {APPLY, SAVED_TENSORS} or "args" in action.uses or action.does == "stop" or picks
    )


def examples() -> dict[str, Action]:
    """The examples under conf/hooks, which every action has."""
    found = dict[str, Action]()
    for file in sorted(FOLDER.glob("*.yaml")):
        hooks, _ = parse_hooks(yaml.safe_load(file.read_text()))
        found |= {f"{file.stem}: {hook.name}": hook.action for hook in hooks if sees_any_tensor(hook.action)}
    return found


ALL = examples() | FORMS
EDITS = {name: action for name, action in ALL.items() if not action.observes}
OBSERVERS = {name: action for name, action in ALL.items() if action.observes}
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


def test_these_are_all_actions_that_see_tensors() -> None:
    covered = {action.action_name for action in ALL.values()}
    elsewhere = {name for name, cls in A.items() if sees_something_else(cls)}
    assert covered | elsewhere == set(A), (
        "give the action an example that works on any tensor, or a form above"
    )


@pytest.mark.parametrize("action", ALL.values(), ids=ALL)
def test_a_plan_can_show_its_parameters_on_every_hook_type(action: Action) -> None:
    for hook_type in action.hook_types:
        assert set(action.said(hook_type)) <= set(type(action).model_fields), hook_type


@each_edit
def test_an_edit_keeps_the_form_of_its_input(action: Action) -> None:
    for kind, x in each_tensor():
        before = x.clone()
        new = edit(action, build(action), x)
        assert (new.shape, new.dtype, new.device) == (x.shape, x.dtype, x.device), kind
        assert_close(x, before, rtol=0, atol=0, msg=lambda text, kind=kind: f"{kind}: {text}")
        assert new.numel() == 0 or new.data_ptr() != x.data_ptr(), kind


@each_edit
def test_an_edit_works_on_a_tensor_without_dimensions(action: Action) -> None:
    for dtype in DTYPES:
        x = torch.tensor(0.25, dtype=dtype)
        function = build(action)
        if isinstance(next(iter(action.model_dump().values())), tuple):
            with pytest.raises(ValueError, match="does not broadcast"):
                edit(action, function, x)
        else:
            new = edit(action, function, x)
            assert new.shape == x.shape
            assert new.dtype == dtype


@each_edit
def test_an_edit_runs_on_fake_tensors(action: Action) -> None:
    for dtype in DTYPES:
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(4, 3, dtype=dtype)
            new = edit(action, build(action), x)
        assert isinstance(new, FakeTensor)
        assert new.shape == x.shape
        assert new.dtype == x.dtype


LISTED = [3.0, 0.0, -4.0, 12.0]
COMPUTED: list[dict[str, Any]] = [
    {"action": "project", "direction": LISTED},
    {"action": "project", "subspace": [LISTED]},
    {"action": "quantize"},
    {"action": "quantize", "per": "group", "group_size": 2},
    {"action": "quantize", "per": "channel", "observer": "percentile"},
]


@pytest.mark.parametrize("keys", COMPUTED, ids=str)
def test_an_edit_of_several_steps_compiles_into_one_graph(keys: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(5, 4)
    with hookrun.hooked(model, {"h": {"select": "0", "hook": "forward", **keys}}) as hooks:
        assert_close(hooks.compile(backend="eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("keys", [*COMPUTED[:3], {"action": "clamp", "min": 0}], ids=str)
def test_complex_tensors_are_refused_in_words(keys: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Identity())
    with (
        pytest.raises(hookrun.HookError, match=r"on 0: .*complex"),
        hookrun.hooked(model, {"h": {"select": "0", "hook": "forward", **keys}}),
    ):
        model(torch.ones(2, 4, dtype=torch.complex64))


@each_edit
def test_an_edit_does_not_use_the_global_generator(action: Action) -> None:
    x = torch.randn(4, 3)
    state = torch.get_rng_state()
    edit(action, build(action), x)
    assert torch.equal(torch.get_rng_state(), state)


@each_observer
def test_an_observer_does_not_write_its_input(action: Action) -> None:
    for kind, x in each_tensor():
        before = x.clone()
        state = torch.get_rng_state()
        assert build(action)(x) is None, kind
        assert_close(x, before, rtol=0, atol=0, msg=lambda text, kind=kind: f"{kind}: {text}")
        assert torch.equal(torch.get_rng_state(), state), kind


@each_observer
def test_an_observer_runs_on_fake_tensors(action: Action) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert build(action)(torch.empty(4, 3)) is None


@each_observer
def test_an_observer_records_nothing_that_holds_the_graph(action: Action) -> None:
    site = FakeSite(action)
    x = torch.randn(4, 3, requires_grad=True) * 2
    action.build(site)(x)
    recorded = [value for _, data in site.emitted for value in data.values()]
    recorded += [ok for ok, _, _ in site.verdicts]
    assert site.kept or recorded
    for value in recorded:
        assert not (isinstance(value, Tensor) and value.requires_grad)


def edit(action: Action, function: Callable[[Any], Any], x: Tensor) -> Tensor:
    """The edited tensor; an action on all tensors together gets a list of one."""
    return function([x])[0] if action.scope == "together" else function(x)


def each_tensor() -> Iterator[tuple[str, Tensor]]:
    """Tensors of every kind and dtype, each with a description for failures."""
    for (kind, make), dtype in product(TENSORS.items(), DTYPES):
        yield f"{kind}, {dtype}", make().to(dtype)
