"""Shapes are checked on a fake copy; the model itself is not changed."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_nets import Net
from torch import Tensor, nn
from torchvision.models import resnet18

import hookrun
from hookrun.engine.prove import trial as proving
from hookrun.engine.prove.trial import TrialSink, is_small
from hookrun.errors import CompileError


def net() -> nn.Sequential:
    first = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(144, 3))


EXAMPLE = ((torch.zeros(2, 1, 8, 8),), {})


def compile_one(model: nn.Module, example: Any = EXAMPLE, **hook: Any) -> hookrun.Plan:
    return hookrun.compile({"h": {"hook": "forward", **hook}}, model, example=example)


def test_the_plan_shows_output_shapes_of_modules() -> None:
    plan = compile_one(net(), select="*", action="print")
    shapes = [target.shape for target in plan.hooks[0].matches]
    assert shapes == ["[2, 4, 6, 6]", "[2, 4, 6, 6]", "[2, 4, 6, 6]", "[2, 144]", "[2, 3]"]
    (target,) = compile_one(net(), select="4", action="capture").hooks[0].matches
    assert (target.bytes, target.per_sample) == (12, True)


def test_the_plan_shows_shapes_of_arguments() -> None:
    hooks = {
        kind: {"select": ["3", "4"], "hook": kind, "action": "stats"}
        for kind in ("forward_pre", "backward", "output_grad")
    }
    plan = hookrun.compile(hooks, net(), example=EXAMPLE)
    found = {hook.spec.name: [match.shape for match in hook.matches] for hook in plan.hooks}
    of_arguments = ["[2, 4, 6, 6]", "[2, 144]"]
    assert found == {
        "forward_pre": of_arguments,
        "backward": of_arguments,
        "output_grad": ["[2, 144]", "[2, 3]"],
    }


def test_arguments_that_no_hook_sees_may_contain_themselves() -> None:
    def second(_: Any, x: Tensor, state: list[Any]) -> Tensor:
        state.append(state)
        return x

    model = Net(lambda model, x: model.second(x, []), second=Net(second))
    plan = compile_one(model, ((torch.ones(2, 3),), {}), select="second", action="scale", factor=2)
    assert plan.hooks[0].matches[0].shape == "[2, 3]"
    assert plan.unchecked is None


@pytest.mark.parametrize(("reduce", "size"), [(None, (2 * 8, True)), ({"mean": [0]}, (8, False))])
def test_the_bytes_per_sample_are_those_of_all_calls_of_a_module(reduce: Any, size: tuple[int, bool]) -> None:
    layer = nn.Linear(2, 2)
    example = ((torch.ones(3, 2),), {})
    plan = compile_one(nn.Sequential(layer, layer), example, select="0", action="capture", reduce=reduce)
    (target,) = plan.hooks[0].matches
    assert (target.bytes, target.per_sample) == size


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ({"select": "4", "action": "add_bias", "value": [1, 2]}, "does not broadcast to the tensor's shape"),
        ({"select": "4", "action": "scale", "factor": 2, "index": "..., 3"}, "index 3 is out of bounds"),
        ({"select": "4", "action": "scale", "factor": 2, "index": ":, 3:9"}, "selects nothing"),
        ({"select": "4", "action": "scale", "factor": 2, "target": "logits"}, "'logits' is not in the tensor"),
        ({"select": "4", "hook": "forward_pre", "action": "capture", "target": "[1]"}, "is not in the tuple"),
        ({"select": "4", "hook": "grad", "action": "scale", "factor": 2, "index": "7"}, "out of bounds"),
        ({"select": "4", "hook": "output_grad", "action": "add_bias", "value": [1, 2]}, "does not broadcast"),
        ({"select": "4", "hook": "output_grad", "action": "stats", "target": "[1]"}, "target [1]: '[1]' is not in"),
        ({"select": "4", "hook": "optimizer_step_post", "action": "add_bias", "value": [1, 2]}, "broadcast"),
        ({"select": "4", "action": "python", "function": lambda x: x[:1]}, "changes the shape from [2, 3] to [1, 3]"),
        ({"select": "4", "action": "python", "function": lambda x: x.double()}, "changes the dtype from torch.float32"),
    ],
)  # fmt: skip
def test_a_hook_that_does_not_fit_is_refused(hook: dict[str, Any], said: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile_one(net(), **hook)
    assert said in str(caught.value)
    assert caught.value.errors[0].where == "hooks.h"


@pytest.mark.parametrize("hook", ["output_grad", "backward", "backward_pre"])
def test_a_gradient_hook_where_there_is_no_gradient_is_refused(hook: str) -> None:
    model = net()
    model.requires_grad_(False)
    with pytest.raises(CompileError, match=r"on 0: .*carries no gradient"):
        compile_one(model, select="0", hook=hook, action="print")


def test_the_model_is_not_changed() -> None:
    model = net().train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    spec = {
        "n": {"select": "0", "hook": "forward", "action": "noise"},
        "g": {"select": "**", "hook": "grad", "action": "scale", "factor": 2},
        "b": {"select": "4", "hook": "forward", "action": "add_bias", "value": 1, "trainable": True},
        "f": {"select": "0", "hook": "apply", "action": "fill", "value": 0},
        "o": {"select": "**", "hook": "optimizer_step_post", "action": "clamp", "max": 0},
        "c": {"select": "**", "hook": "forward", "action": "check"},
    }
    hookrun.compile(spec, model, example=EXAMPLE)
    assert model.state_dict().keys() == state.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    for parameter in model.parameters():
        assert parameter.grad is None
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)
    for module in model.modules():
        assert not (module._forward_hooks)
        assert not (module._forward_pre_hooks)


class Stateful(nn.Module):
    """Draws from every global generator, and fills lists of its own and of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.drawn = list[float]()

    def forward(self, x: Tensor, cache: dict[str, list[Tensor]]) -> Tensor:
        self.drawn += [random.random(), np.random.rand(), len(torch.rand(1))]
        cache["seen"].append(x)
        assert len(cache["seen"]) == 1, "each call has its own arguments"
        return self.fc(x) * self.drawn[0]


def test_neither_generators_nor_lists_of_the_caller_are_changed() -> None:
    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    model = Stateful()
    cache = {"seen": list[Tensor]()}
    before = states()
    plan = compile_one(model, ((torch.zeros(1, 2),), {"cache": cache}), select="fc", action="capture")
    assert plan.unchecked is None
    assert cache == {"seen": []}
    assert model.drawn == []
    assert states() == before


@pytest.mark.parametrize("shared", ["module", "child", "parameter", "buffer"])
def test_a_copy_that_shares_a_part_with_the_model_is_not_run(shared: str) -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.norm = nn.BatchNorm1d(2)

        def __deepcopy__(self, memo: Any) -> nn.Module:
            if shared == "module":
                return self
            new = Shares()
            if shared == "child":
                new.fc = self.fc
            elif shared == "parameter":
                new.fc.weight = self.fc.weight
            else:
                new.norm.running_mean = self.norm.running_mean
            return new

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x))

    model = nn.Sequential(Shares())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spec = {
        "g": {"select": "0.fc", "hook": "output_grad", "action": "scale", "factor": 2},
        "f": {"select": "0.norm", "hook": "apply", "action": "freeze"},
    }
    plan = hookrun.compile(spec, model, example=((torch.zeros(3, 2),), {}), training=False)
    assert "a deep copy of the model shares 0" in str(plan.unchecked)
    assert model[0].training
    for parameter in model.parameters():
        assert parameter.requires_grad
    for parameter in model.parameters():
        assert parameter.grad is None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    for module in model.modules():
        assert not (module._forward_hooks)
        assert not (module._forward_pre_hooks)


def test_gradient_hooks_are_checked_in_inference_mode_too() -> None:
    with torch.inference_mode():
        plan = compile_one(
            net(), ((torch.zeros(2, 1, 8, 8),), {}), select="4", hook="output_grad", action="stats"
        )
    assert plan.unchecked is None


def test_a_generator_argument_is_not_copied() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return super().forward(x + torch.rand(x.shape, generator=generator))

    generator = torch.Generator()
    before = generator.get_state()
    example = ((torch.zeros(1, 2), generator), {})
    assert compile_one(Noisy(2, 2), example, select="", action="stats").unchecked is None
    assert torch.equal(generator.get_state(), before)


def test_checking_prints_nothing(capsys, caplog) -> None:
    spec = {
        "p": {"select": "**", "hook": "forward", "action": "print", "what": "value"},
        "c": {"select": "**", "hook": "forward", "action": "check", "min": 5, "policy": "error"},
    }
    hookrun.compile(spec, net(), example=EXAMPLE)
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_model_gets_its_shapes_in_the_run() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    spec = {"h": {"select": "0", "hook": "forward", "action": "capture"}}
    plan = hookrun.compile(spec, model, example=((torch.ones(2, 4),), {}))
    assert plan.unchecked == "0.weight has no shape yet: a lazy module gets it at its first call"
    with plan.install(model) as hooks:
        model(torch.ones(2, 4))
    assert hooks.captures["h"]["0"][0].shape == (2, 3)


def test_a_model_that_needs_data_is_unchecked() -> None:
    def by_value(model: Any, x: Tensor) -> Tensor:
        return model.fc(x) if x.sum() > 0 else model.fc(-x)

    example = ((torch.ones(1, 2),), {})
    plan = compile_one(Net(by_value, fc=nn.Linear(2, 2)), example, select="fc", action="capture")
    assert plan.unchecked is not None
    assert "DataDependent" in plan.unchecked
    assert "shapes unchecked" in str(plan)


def test_an_example_of_the_wrong_shape_is_a_reason_too() -> None:
    plan = compile_one(net(), example=((torch.ones(1, 2),), {}), select="4", action="capture")
    assert plan.unchecked is not None


def test_a_module_that_the_example_does_not_reach_is_noted() -> None:
    attention = nn.MultiheadAttention(4, 2)
    x = torch.zeros(3, 1, 4)
    plan = compile_one(attention, example=((x, x, x), {}), select="out_proj", action="capture")
    assert plan.hooks[0].matches[0].called is False
    assert "the example did not reach out_proj" in str(plan)


def test_the_mode_can_be_chosen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    plan = hookrun.compile({}, model, example=((torch.ones(1, 2),), {}), training=True)
    assert plan.unchecked is not None
    assert "more than 1 value" in plan.unchecked
    assert hookrun.compile({}, model, example=((torch.ones(1, 2),), {}), training=False).unchecked is None


SITE: Any = SimpleNamespace(
    hook_name="h", path="fc", where="hook h at fc", current=SimpleNamespace(within="")
)


def test_another_structure_is_a_problem() -> None:
    x = torch.ones(2, 3)
    findings = TrialSink()
    assert findings.guard(SITE, lambda value: (value,))(x) is x
    assert findings.guard(SITE, lambda value: {"b": value["a"]})({"a": x}) == {"a": x}
    assert [what for _, what in findings.problems] == [
        "the action changes the type from Tensor to tuple",
        "the action changes the members of the dict",
    ]


def test_captures_are_kept_without_their_graph() -> None:
    findings = TrialSink()
    keep: Any = findings.keeper(SITE)
    keep((torch.ones(2, requires_grad=True) * 2, {"a": torch.ones(3)}))
    ((first, second),) = (firing.values() for firing in findings.captured["h", "fc"])
    assert first.shape == (2,)
    assert second.shape == (3,)
    assert not first.requires_grad


IMAGES = ((torch.zeros(2, 1, 8, 8),), {})
PICTURES = ((torch.zeros(2, 3, 64, 64),), {})


def pictured() -> nn.Module:
    """A small model of images."""
    torch.manual_seed(0)
    layers = {
        "conv": nn.Conv2d(1, 4, 3, padding=1),
        "relu": nn.ReLU(),
        "flat": nn.Flatten(),
        "fc": nn.Linear(256, 10),
    }
    return nn.Sequential(OrderedDict(layers))


class OfTheUser(nn.Sequential):
    """Its forward may do anything."""


def test_only_a_small_model_is_run_with_data() -> None:
    assert is_small(pictured(), IMAGES)
    assert not is_small(pictured(), ((torch.zeros(2, 1, 100, 100),), {}))
    assert not is_small(resnet18(), PICTURES)


def test_unknown_modules_run_with_fake_tensors() -> None:
    linear = nn.Linear(2, 2)
    tensor = ((torch.zeros(1, 2),), {})
    assert is_small(nn.Sequential(linear), tensor)
    hooked = nn.Linear(2, 2)
    patched = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, args, output: None)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    meta = nn.Linear(2, 2, device="meta")
    for model in (OfTheUser(linear), hooked, patched, normed, meta):
        assert not is_small(model, tensor), model
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    assert not is_small(linear, tensor)
    handle.remove()


HOOKS: list[dict[str, Any]] = [
    {"hook": "forward", "action": "capture"},
    {"hook": "forward", "action": "add_bias", "value": 0.5},
    {"hook": "backward", "action": "stats"},
    {"hook": "output_grad", "action": "clamp", "min": 0},
    {"hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 1},
    {"hook": "saved_tensors", "action": "offload", "to": "disk"},
    {"hook": "forward", "action": "noise", "std": 1},
    {"hook": "forward", "action": "check", "max": -1, "policy": "error"},
    {"hook": "forward", "action": "add_bias", "value": [1, 2, 3]},
    {"hook": "forward", "action": "scale", "factor": 2, "index": "..., 7000"},
]


def test_the_plan_is_that_of_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(model: nn.Module, example: Any, hooks: list[dict[str, Any]]) -> tuple[Any, ...]:
        spec = {f"h{number}": {"select": "fc", **hook} for number, hook in enumerate(hooks)}
        try:
            plan = hookrun.compile({"hooks": spec}, model, example=example)
        except CompileError as error:
            return (str(error),)
        return plan.hooks, plan.unchecked

    model = pictured()

    def outcomes() -> list[tuple[Any, ...]]:
        together = [[hook] for hook in HOOKS] + [HOOKS[:-2], HOOKS[-2:]]
        return [outcome(model, IMAGES, hooks) for hooks in together]

    quick = outcomes()
    monkeypatch.setattr(proving, "is_small", lambda *args: False)
    assert quick == outcomes()
    assert [len(each) for each in quick] == [2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 2, 1]
    assert all(f"hooks.h{number}" in quick[-1][0] for number in (0, 1)), "both mistakes"


def test_a_user_s_function_is_called_with_fake_tensors_only() -> None:
    seen = list[Tensor]()

    def own(x: Tensor) -> Tensor:
        seen.append(x)
        return x * 2

    model = nn.Sequential(nn.Linear(2, 2))
    compile_one(model, ((torch.zeros(1, 2),), {}), select="0", action="replace", value=own)
    assert seen
    assert all(type(x).__name__ == "FakeTensor" for x in seen)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    "value", [torch.ones(2, requires_grad=True) * 2, {"cache": [torch.ones(2)]}, (nn.Linear(1, 1),)]
)
def test_other_attributes_of_a_module_are_no_error(value: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].kept = value
    plan = compile_one(model, ((torch.zeros(1, 2),), {}), select="0", action="capture")
    assert plan.unchecked is None
    assert model[0].kept is value


def test_a_model_that_cannot_be_copied_is_unchecked() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].kept = threading.Lock()
    plan = compile_one(model, ((torch.zeros(1, 2),), {}), select="0", action="capture")
    assert "cannot pickle" in str(plan.unchecked)
