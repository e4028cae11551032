"""Compilers and wrappers: hooks that can be compiled give one graph, others are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hookrun

INPUT = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    """Has names as in attention, a tuple output and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.pair = Pair()
        self.act = nn.ReLU()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, extra = self.pair(self.act(self.first(x)), shift=0.5)
        return self.head(x + extra["more"])


class Pair(nn.Module):
    def forward(self, x: Tensor, *, shift: float) -> tuple[Tensor, dict[str, Tensor]]:
        return x + shift, {"more": x * 2}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


POINTWISE: dict[str, dict[str, Any]] = {
    "scale": {"select": "first", "hook": "forward", "action": "scale", "factor": 3},
    "scale by a list": {"select": "first", "hook": "forward", "action": "scale", "factor": [1, 2, 3, 4]},
    "scale an input": {"select": "head", "hook": "forward_pre", "action": "scale", "factor": 3},
    "scale a keyword input": {"select": "pair", "hook": "forward_pre", "action": "scale", "factor": 2, "target": "[0]"},
    "clamp": {"select": "act", "hook": "forward", "action": "clamp", "min": 0, "max": 0.1},
    "clamp widely": {"select": "first", "hook": "forward", "action": "clamp", "min": -1e5, "max": 0.1},
    "add_bias": {"select": "{first,head}", "hook": "forward", "action": "add_bias", "value": 1},
    "trainable": {"select": "first", "hook": "forward", "action": "add_bias", "value": 1, "trainable": True},
    "replace a part": {"select": "first", "hook": "forward", "action": "replace", "value": 2, "index": "..., 0:2"},
    "target": {"select": "pair", "hook": "forward", "action": "scale", "factor": 2, "target": "[1].more"},
    "every member": {"select": "pair", "hook": "forward", "action": "scale", "factor": 2},
    "clip_norm": {"select": "pair", "hook": "forward", "action": "clip_norm", "max_norm": 0.1},
    "linear": {"select": "first", "hook": "forward", "action": "linear"},
    "output_grad": {"select": "first", "hook": "output_grad", "action": "clamp", "min": -0.01, "max": 0.01},
    "grad": {"select": "first", "hook": "grad", "action": "scale", "factor": 2},
    "post_accumulate_grad": {"select": "first", "hook": "post_accumulate_grad", "action": "clip_norm", "max_norm": 0.1},
    "seen gradients": {"select": "first", "hook": "grad", "action": "capture"},
    "freeze": {"select": "first", "hook": "apply", "action": "freeze"},
}  # fmt: skip


def trained(call: Any, model: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    output = call(INPUT)
    output.square().sum().backward()
    return output.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("name", POINTWISE)
def test_compiling_after_installation_gives_one_graph_with_the_same_values(
    model: nn.Module, name: str
) -> None:
    with hookrun.hooked(model, {"h": POINTWISE[name]}) as hooks:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        expected = trained(model, model)
        fired = dict(hooks.fired)
        found = trained(compiled, model)
        assert graphs() == 1
        trained(compiled, model)
        assert graphs() == 1
    torch.testing.assert_close(found, expected)
    runs = 1 if POINTWISE[name]["hook"] == "apply" else 3
    assert hooks.fired == {key: count * runs for key, count in fired.items()}


def test_a_schedule_compiles_once(model: nn.Module) -> None:
    """Step and epoch are tensors in the graph; each mode of the model has its own graph, as without hooks."""
    hooks_of = {
        "a": {**POINTWISE["scale"], "when": {"step": {"start": 1, "every": 2}}},
        "b": {**POINTWISE["clamp"], "when": {"epoch": [1], "mode": "train"}},
        "c": {**POINTWISE["output_grad"], "when": {"step": 2}},
    }
    with hookrun.hooked(model, hooks_of) as hooks:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for epoch in range(2):
            for step in range(4):
                before = dict(hooks.fired)
                expected = trained(model, model)
                eagerly = dict(hooks.fired)
                torch.testing.assert_close(trained(compiled, model), expected)
                for key, count in eagerly.items():
                    assert hooks.fired[key] - count == count - before[key], (epoch, step, key)
                hooks.step()
            hooks.epoch()
        assert graphs() == 1
        model.eval()
        torch.testing.assert_close(compiled(INPUT), model(INPUT))
        assert graphs() == 2


def test_inductor_gives_the_same_values(model: nn.Module) -> None:
    chosen = ("scale by a list", "clamp", "target", "output_grad")
    hooks_of = {f"h{number}": POINTWISE[name] for number, name in enumerate(chosen)}
    with hookrun.hooked(model, hooks_of) as hooks:
        compiled = hooks.compile(fullgraph=True)
        torch.testing.assert_close(trained(compiled, model), trained(model, model))


def test_after_the_block_the_compiled_model_runs_without_hooks(model: nn.Module) -> None:
    bare = model(INPUT)
    with hookrun.hooked(model, {"h": POINTWISE["scale"]}):
        compiled = torch.compile(model, backend="eager")
        hooked = compiled(INPUT)
    assert not torch.equal(hooked, bare)
    torch.testing.assert_close(compiled(INPUT), bare)


class Broken(Net):
    """torch.compile splits it into several graphs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        torch._dynamo.graph_break()
        return self.head(x)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Net, Broken])
def test_hooks_compile_does_not_reuse_a_graph_of_another_model_of_the_class(kind: type[nn.Module]) -> None:
    """torch's guards do not look at hooks, so torch.compile would reuse the graph of a model without hooks."""
    one, two, three = kind(), kind(), kind()
    torch.compile(one, backend="eager")(INPUT)
    compiled = list[Any]()
    with (
        hookrun.hooked(two, {"h": {**POINTWISE["scale"], "select": "head"}}) as first,
        hookrun.hooked(three, {"h": {**POINTWISE["clamp"], "select": "head"}}) as second,
    ):
        for model, hooks in ((two, first), (three, second)):
            compiled.append(hooks.compile(backend="eager"))
            torch.testing.assert_close(compiled[-1](INPUT), model(INPUT))
            assert hooks.fired["h", "head"] == 2
        torch.testing.assert_close(compiled[0](INPUT), two(INPUT))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "capture": ({"hook": "forward", "action": "capture"}, "passes values to Python"),
    "stats": ({"hook": "output_grad", "action": "stats"}, "passes values to Python"),
    "check": ({"hook": "forward_pre", "action": "check"}, "passes values to Python"),
    "noise": ({"hook": "forward", "action": "noise"}, "draws from a generator of its own"),
    "backward": ({"hook": "backward", "action": "scale", "factor": 2}, "autograd nodes of its own"),
    "backward_pre": ({"hook": "backward_pre", "action": "scale", "factor": 2}, "autograd nodes of its own"),
    "saved_tensors": ({"hook": "saved_tensors", "action": "cast", "dtype": "bfloat16"}, "the compiler itself decides"),
    "call": ({"hook": "forward", "action": "scale", "factor": 2, "when": {"call": 0}}, "is evaluated at each call"),
    "probability": (
        {"hook": "forward", "action": "scale", "factor": 2, "when": {"probability": 0.5}},
        "is evaluated at each call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_that_cannot_be_compiled_is_refused_with_the_reason(
    model: nn.Module, name: str, fullgraph: bool
) -> None:
    hook, reason = REFUSED[name]
    with hookrun.hooked(model, {"fine": POINTWISE["scale"], "h": {"select": "act", **hook}}) as hooks:
        with pytest.raises(hookrun.CompileError, match=reason) as caught:
            torch.compile(model, backend="eager", fullgraph=fullgraph)(INPUT)
        with pytest.raises(hookrun.CompileError, match=reason):
            hooks.compile()
    assert [problem.where.split(".")[1] for problem in caught.value.errors] == ["h"]
    assert "fine" not in str(caught.value)


def test_all_hooks_that_cannot_be_compiled_are_reported_at_once(model: nn.Module) -> None:
    hooks_of = {f"h{number}": {"select": "act", **hook} for number, (hook, _) in enumerate(REFUSED.values())}
    with hookrun.hooked(model, hooks_of) as hooks, pytest.raises(hookrun.CompileError) as caught:
        hooks.compile()
    assert len(caught.value.errors) == len(REFUSED)


def test_hooks_on_a_compiled_model_are_refused(model: nn.Module) -> None:
    hook = {"h": POINTWISE["scale"]}
    with pytest.raises(hookrun.CompileError, match="already compiled module"):
        hookrun.compile(hook, torch.compile(model, backend="eager"))
    model.compile(backend="eager")
    with pytest.raises(hookrun.CompileError, match="already compiled module"):
        hookrun.compile(hook, model)


def test_a_model_compiled_in_place_runs_its_hooks_and_refuses_new_ones(model: nn.Module) -> None:
    plan = hookrun.compile({"h": POINTWISE["scale"]}, model)
    with plan.install(model) as hooks:
        expected = model(INPUT)
        model.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(model(INPUT), expected)
        assert hooks.fired["h", "first"] == 2
    with pytest.raises(hookrun.CompileError, match="already compiled module"):
        plan.install(model).__enter__()


def test_a_hook_on_a_compiled_module_inside_a_model_is_refused(model: nn.Module) -> None:
    model.pair = torch.compile(nn.Sequential(nn.ReLU()), backend="eager")
    with pytest.raises(hookrun.CompileError, match="pair: an already compiled module"):
        hookrun.compile({"h": {"select": "type:ReLU", "hook": "forward", "action": "capture"}}, model)
    hookrun.compile({"h": {"select": "first", "hook": "forward", "action": "capture"}}, model)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, INPUT)])
def test_a_scripted_or_traced_model_is_refused(make: Any) -> None:
    scripted = make(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(hookrun.CompileError, match="scripted module runs without Python hooks"):
        hookrun.compile({"h": {"select": "0", "hook": "forward", "action": "capture"}}, scripted)


def test_data_parallel_is_refused_with_advice(model: nn.Module) -> None:
    with pytest.raises(hookrun.CompileError, match=r"DataParallel(.|\n)*use DistributedDataParallel"):
        hookrun.compile({"h": {"select": "**.first", **POINTWISE["scale"]}}, nn.DataParallel(model))


EXPORTABLE = [name for name in POINTWISE if "grad" not in name and name != "freeze"]


# `linear` reads the module's arguments.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTABLE)
def test_an_exported_program_contains_the_hooks(model: nn.Module, name: str, strict: bool) -> None:
    bare = model(INPUT)
    with hookrun.hooked(model, {"h": POINTWISE[name]}), torch.no_grad():
        expected = model(INPUT)
        program = torch.export.export(model.eval(), (INPUT,), strict=strict)
    torch.testing.assert_close(program.module()(INPUT), expected)
    assert (expected - bare).norm() > 1e-3 or name == "linear"  # `linear` computes the same as the layer


def test_a_distributed_wrapper_takes_the_hooks_of_the_model_inside(model: nn.Module, tmp_path: Any) -> None:
    """The module inside DistributedDataParallel is hooked, under the names that it has in the wrapper."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        hooks_of = {
            "seen": {"select": "module.first", "hook": "forward", "action": "capture"},
            "clip": {"select": "module.head", "hook": "grad", "action": "clamp", "min": -0.01, "max": 0.01},
        }
        with hookrun.hooked(wrapped, hooks_of) as hooks:
            wrapped(INPUT).square().sum().backward()
        torch.testing.assert_close(hooks.captures["seen"]["module.first"][0], model.first(INPUT).detach())
        assert model.head.weight.grad.abs().max() <= 0.01
        assert hooks.fired["clip", "module.head.weight"] == 1
    finally:
        dist.destroy_process_group()
