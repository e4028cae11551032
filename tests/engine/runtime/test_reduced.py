"""Hooks on gradients that ranks sum run afterwards; a parameter that was replaced is refused, one that moved is not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_nets import Net
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import hookrun
from hookrun.engine.runtime.hooks.base import ParameterHook
from hookrun.engine.runtime.reduced import ReducedGradients
from hookrun.engine.runtime.sharded import HookedParameter, HookedParameters, edited, own_part
from hookrun.errors import HookError


class Noted(ParameterHook):
    """Doubles a gradient, and records what it saw."""

    def __init__(self, name: str, seen: list[tuple[str, float]], *, before: bool) -> None:
        self.name, self.seen, self.before_accumulation = name, seen, before  # type: ignore[misc]

    def reduced(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.seen.append((self.name, parameter.grad.item()))
        parameter.grad *= 2


def parameter(grad: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(()))
    made.grad = torch.tensor(grad)
    return made


def test_parameters_outside_the_pass_keep_their_gradient() -> None:
    seen = list[tuple[str, float]]()
    first = parameter(1.0)
    last = parameter(10.0)
    gradients = ReducedGradients()
    of_last = HookedParameter(nn.Module(), "last", last)
    gradients.add(HookedParameter(nn.Module(), "first", first), Noted("first", seen, before=True))
    gradients.add(of_last, Noted("last", seen, before=True))
    gradients.run(only={id(last)})
    assert seen == [("last", 10.0)]
    assert first.grad is not None
    assert first.grad.item() == 1
    shard = of_last.parameter = parameter(3.0)
    gradients.run(only={id(shard)})
    assert seen[1:] == [("last", 3.0)]
    assert gradients.parameters == [first, shard]


SEEN = {
    name: {"select": "weight", "hook": hook, "action": "capture"}
    for name, hook in (("grad", "grad"), ("whole", "post_accumulate_grad"))
}
DOUBLED = {"select": "weight", "hook": "grad", "action": "scale", "factor": 2}


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Fails(torch.autograd.Function):
    """Its backward pass fails where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.fails:
            raise ZeroDivisionError("no memory")
        return grad, None


def multiplying() -> Net:
    """Multiplies by a weight, so that the input is the gradient of it."""
    weights = {name: nn.Parameter(torch.ones(())) for name in ("first", "weight")}
    model = Net(lambda m, x: Fails.apply(x * m.first, m.fails) * m.weight, **weights)
    model.fails = False
    return model


def numbers(hooks: Any) -> dict[str, list[float]]:
    return {name: [float(each) for each in found["weight"]] for name, found in hooks.captures.items()}


def step(model: nn.Module, x: float) -> None:
    model(torch.tensor(x)).backward()


def test_hooks_see_what_they_see_without_a_wrapper() -> None:
    found = []
    order = {"order": {"select": "*", "hook": "grad", "action": "stats"}}
    for wrap in (nn.Sequential, DistributedDataParallel):
        model = multiplying()
        with hookrun.hooked(model, {**order, "double": DOUBLED, **SEEN}) as hooks:
            wrapped = wrap(model)
            for x in (3.0, 5.0):
                step(wrapped, x)
        found.append((numbers(hooks), model.weight.grad, [record["module"] for record in hooks.records]))
    seen = {"grad": [6.0, 10.0], "whole": [6.0, 16.0]}
    assert found[0] == found[1] == (seen, torch.tensor(16.0), ["weight", "first"] * 2)


def test_a_wrapper_takes_hooks_under_the_names_that_it_has() -> None:
    wrapped = DistributedDataParallel(multiplying())
    spec = {"seen": {"select": "module.weight", "hook": "grad", "action": "capture"}}
    with hookrun.hooked(wrapped, spec) as hooks:
        step(wrapped, 3.0)
    assert hooks.fired["seen", "module.weight"] == 1


@pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # of hooks that did not fire
def test_under_no_sync_only_hooks_on_the_sum_wait() -> None:
    model = multiplying()
    wrapped = DistributedDataParallel(model)
    with hookrun.hooked(model, {"whole": SEEN["whole"]}) as hooks:
        with wrapped.no_sync():
            step(wrapped, 3.0)
        assert hooks.fired["whole", "weight"] == 0
        step(wrapped, 5.0)
        assert numbers(hooks) == {"whole": [8.0]}
    with hookrun.hooked(model, SEEN), wrapped.no_sync(), pytest.raises(HookError, match=r"under no_sync\(\)"):
        step(wrapped, 3.0)


def test_only_a_forward_with_gradients_ends_its_pass() -> None:
    model = multiplying()
    wrapped = DistributedDataParallel(model)
    with hookrun.hooked(model, SEEN) as hooks:
        with wrapped.no_sync():  # which refuses `grad` hooks where the wrapper is known
            loss = wrapped(torch.tensor(3.0))
            with torch.no_grad():
                model(torch.tensor(9.0))
            with pytest.raises(HookError, match="not summed over the ranks"):
                loss.backward()
            model.weight.grad = None
            step(model, 4.0)  # the rank's own gradient
        assert numbers(hooks) == {"grad": [4.0], "whole": [4.0]}


def test_a_backward_pass_that_failed_leaves_nothing_for_the_next() -> None:
    model = multiplying()
    wrapped = DistributedDataParallel(model)
    with hookrun.hooked(model, SEEN) as hooks:
        model.fails = True
        with wrapped.no_sync(), pytest.raises(ZeroDivisionError):
            step(wrapped, 3.0)
        assert not numbers(hooks)["grad"]
        model.fails, model.weight.grad = False, torch.tensor(100.0)
        step(wrapped, 5.0)
    assert numbers(hooks) == {"grad": [5.0], "whole": [105.0]}
    assert model.weight.grad == 105.0


def test_parameters_added_after_the_wrapper_are_refused() -> None:
    added = {"b": {"select": "", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}}
    late = multiplying()
    wrapped = DistributedDataParallel(late)
    with (
        hookrun.hooked(late, added),
        pytest.raises(
            HookError, match="the parameter b_bias to a model that DistributedDataParallel had wrapped"
        ),
    ):
        step(wrapped, 3.0)
    model = multiplying()
    with hookrun.hooked(model, added):
        step(DistributedDataParallel(model), 3.0)
        assert model.get_parameter("b_bias").grad == 1.0


@pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # of hooks that did not fire
def test_after_the_block_gradients_are_torchs_own() -> None:
    model = multiplying()
    wrapped = DistributedDataParallel(model)
    with hookrun.hooked(model, {"double": DOUBLED}):
        loss = wrapped(torch.tensor(3.0))
    loss.backward()
    assert model.weight.grad == 3.0
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_write_to_the_local_tensor_changes_its_version() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    before = own_part(tensor)._version
    tensor.to_local().add_(1)  # as fully_shard adds gradients
    assert own_part(tensor)._version == before + 1
    assert own_part(tensor).tolist() == [1, 1]


def test_an_unchanged_unsharded_tensor_is_the_same_object() -> None:
    x = torch.zeros(2)
    same = SimpleNamespace(op=lambda value: value)
    firings: Any = [same, same]
    assert edited(x, firings) is x


def hooked() -> tuple[nn.Sequential, HookedParameters]:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    parameters = HookedParameters(model)
    parameters.add("0.weight", model[0])
    return model, parameters


def test_a_replaced_parameter_is_an_error_at_the_next_step() -> None:
    model, parameters = hooked()
    optimizer = torch.optim.SGD(model.parameters())
    parameters.follow(optimizer)
    model[0].weight = nn.Parameter(torch.zeros(1, 1))
    assert not parameters.all_there
    for check in (lambda: parameters.follow(optimizer), lambda: parameters.follow(shards=False)):
        with pytest.raises(HookError, match=r"parameter 0\.weight was replaced after hooks were installed"):
            check()
    parameters.places.clear()
    parameters.follow(optimizer)


def test_a_parameter_that_moved_within_the_model_keeps_its_hooks() -> None:
    model, parameters = hooked()
    old = model[0].weight
    model[0].weight, model[1].weight = model[1].weight, old
    parameters.follow(shards=False)
