"""Hooks are in one compiled graph or refused with the reason; a trace of a hooked model leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from hooking import captured, one_hook
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hookrun
from hookrun.engine.runtime.snapshot import held
from hookrun.engine.values.containers import tensors
from hookrun.engine.values.tensors import holds_data

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


@pytest.mark.parametrize("name", POINTWISE)
def test_compiling_after_installation_gives_one_graph(model: nn.Module, name: str) -> None:
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


SEVERAL = ("pair", "nested", "views")
APART = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.12 cannot compile a copy of each of several outputs: an error"
)


class Outputs(nn.Module):
    """Its outputs are its input, a view of it, or computed from one another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        if self.kind in ("input", "reshaped"):
            return x if self.kind == "input" else x.view(-1)
        y = x * 2
        return {"pair": (y, y * 3), "nested": {"z": [y * 3], "y": y}, "views": (y, y.view(-1))}[self.kind]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize(
    "kind", ["input", "reshaped", *(pytest.param(each, marks=APART) for each in SEVERAL)]
)
@pytest.mark.parametrize("way", ["root", "hooks.compile", "submodule"])
def test_a_compiled_output_grad_sees_only_later_uses(kind: str, way: str) -> None:
    inside = way == "submodule"
    model = nn.Sequential(Outputs(kind)) if inside else Outputs(kind)
    with hookrun.hooked(model, one_hook("0" if inside else "", "output_grad", "scale", factor=10)) as hooks:
        compiled = (
            hooks.compile(backend="aot_eager")
            if way == "hooks.compile"
            else torch.compile(model, backend="aot_eager")
        )
        grads = list[Tensor | None]()
        counts = list[int]()
        for call in (model, compiled):
            x = INPUT.clone().requires_grad_()
            sum((out * (2 + n)).sum() for n, out in enumerate(tensors(call(x)))).backward()
            grads.append(x.grad)
            counts.append(hooks.sites[0].firings)
    torch.testing.assert_close(grads[1], grads[0])
    assert counts[1] == 2 * counts[0]


@pytest.mark.parametrize("kind", ["pair", "reshaped"])
def test_a_shared_output_cannot_be_written_in_a_graph(kind: str) -> None:
    class Writes(Outputs):
        def __init__(self) -> None:
            super().__init__(kind)
            self.inner = Outputs(kind)

        def forward(self, x: Tensor) -> Any:
            return next(tensors(self.inner(x * 1))).mul_(2)

    model = Writes()
    with (
        hookrun.hooked(model, one_hook("inner", "output_grad", "scale", factor=10)),
        pytest.raises(RuntimeError, match="is a view and is being modified in"),
    ):
        torch.compile(model, backend="aot_eager", fullgraph=True)(INPUT.clone().requires_grad_())


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
def test_hooks_compile_reuses_no_graph_of_another_model(kind: type[nn.Module]) -> None:
    """torch's guards do not look at hooks, so torch.compile would reuse the graph of a model without hooks."""
    one = kind()
    two = kind()
    three = kind()
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
    "capture": ({"hook": "output_grad", "action": "capture"}, "passes values to Python"),
    "print": ({"hook": "forward", "action": "print"}, "passes values to Python"),
    "quantiles": ({"hook": "forward", "action": "stats", "of": [{"quantiles": [0.5]}]}, "computes quantiles, which"),
    "noise": ({"hook": "forward", "action": "noise"}, "draws from a generator of its own"),
    "backward": ({"hook": "backward", "action": "scale", "factor": 2}, "autograd nodes of its own"),
    "backward_pre": ({"hook": "backward_pre", "action": "scale", "factor": 2}, "autograd nodes of its own"),
    "saved_tensors": ({"hook": "saved_tensors", "action": "cast", "dtype": "bfloat16"}, "the compiler itself decides"),
    "call": ({"hook": "forward", "action": "scale", "factor": 2, "when": {"call": 0}}, r"h\.when\.call: .*only once"),
    "probability": (
        {"hook": "forward", "action": "scale", "factor": 2, "when": {"probability": 0.5}},
        r"h\.when\.probability: .*only once",
    ),
    "python": ({"hook": "forward", "action": lambda value: value}, "hooks.h: .*runs your own Python"),
    "skip": ({"hook": "forward", "action": "skip", "when": {"mode": "train"}}, "decides at each call whether"),
    "value": (
        {"hook": "forward", "action": "scale", "factor": lambda value: value},
        r"hooks\.h\.factor: .*calls a function of yours",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_that_cannot_be_compiled_is_refused(model: nn.Module, name: str, fullgraph: bool) -> None:
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
    compiled = torch.compile(model, backend="eager")
    model.compile(backend="eager")
    for each in (compiled, model):
        with pytest.raises(hookrun.CompileError, match="already compiled module"):
            hookrun.compile({"h": POINTWISE["scale"]}, each)


def test_a_model_compiled_in_place_refuses_new_hooks(model: nn.Module) -> None:
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
        hookrun.compile(one_hook("type:ReLU"), model)
    hookrun.compile(one_hook("first"), model)


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


X = torch.linspace(-1, 1, 12).reshape(4, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


def on(action: str, hook: str = "forward", **keys: Any) -> dict[str, Any]:
    return one_hook(["0", "2"], hook, action, **keys)


TRACES: dict[str, Callable[[nn.Module], object]] = {
    "export": lambda model: torch.export.export(model, (X,)),
    "fake tensors": lambda model: fake_run(model),
    "make_fx with real values": lambda model: make_fx(lambda x: model(x))(X),
    "make_fx": lambda model: make_fx(lambda x: model(x), tracing_mode="fake", _allow_non_fake_inputs=True)(X),
    "make_fx, symbolic": lambda model: make_fx(
        lambda x: model(x), tracing_mode="symbolic", _allow_non_fake_inputs=True
    )(X),
    "functionalize": lambda model: torch.func.functionalize(lambda x: model(x))(X),
    "vmap": lambda model: torch.vmap(model)(X),
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "vmap of grad": lambda model: torch.vmap(torch.func.grad(lambda x: model(x).sum()))(X),
    "jvp": lambda model: torch.func.jvp(model, (X,), (X,)),
    "jacrev": lambda model: torch.func.jacrev(lambda x: model(x))(X[0]),
    "hessian": lambda model: torch.func.hessian(lambda x: model(x).sum())(X[0]),
    "functional_call": lambda model: torch.func.grad(
        lambda parameters: torch.func.functional_call(model, parameters, (X,)).sum()
    )({name: parameter.detach() for name, parameter in model.named_parameters()}),
}
EDITS: dict[str, dict[str, Any]] = {
    "add_bias": on("add_bias", value=[0.5, 1.0, 2.0]),
    "add_bias, a number": on("add_bias", value=0.5),
    "replace": on("replace", value=[0.5, 1.0, 2.0]),
    "scale": on("scale", factor=1.5),
    "clamp": on("clamp", min=-0.1, max=0.2),
    "noise": on("noise", std=0.1),
}
OBSERVERS: dict[str, dict[str, Any]] = {
    "capture": on("capture"),
    "capture, mean": on("capture", reduce="mean"),
    "capture, project": on("capture", reduce={"project": 2}),
    "capture, dtype": on("capture", dtype="float16"),
    "capture, max_bytes": on("capture", max_bytes=10_000),
    "capture, index": on("capture", index="..., 0"),
    "stats": on("stats"),
    "check": on("check", policy="warn", max=1e-9),
    "check, error": on("check"),
    "print": on("print", what="stats"),
    "forward_pre": on("capture", hook="forward_pre"),
    "output_grad": on("capture", hook="output_grad"),
}


def fake_run(model: nn.Module) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(mode.from_tensor(X))


@cache
def traces_generators() -> bool:
    try:
        make_fx(lambda x: x.clone().normal_(generator=torch.Generator()))(X)
    except NotImplementedError:
        return False
    return True


def draws_where_vmap_refuses_it(trace: str, edit: str) -> bool:
    return edit == "noise" and trace.startswith(("vmap", "hessian", "jac"))


SLOW = ("export", "make_fx, symbolic")  # several hooks are traced at once
EDITED = [
    *(
        (trace, [edit])
        for trace in TRACES
        for edit in EDITS
        if trace not in SLOW and not draws_where_vmap_refuses_it(trace, edit)
    ),
    *(
        (trace, edits)
        for trace in SLOW
        for edits in (["clamp", "scale", "add_bias", "add_bias, a number"], ["replace"], ["noise"])
    ),
]
OBSERVED = [
    *((trace, [observer]) for trace in TRACES if trace not in SLOW for observer in OBSERVERS),
    *((trace, list(OBSERVERS)) for trace in SLOW),
]


def together(specs: dict[str, dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """The hooks of these names, as hooks h0, h1, … of one specification."""
    return {f"h{number}": specs[name]["h"] for number, name in enumerate(names)}


@pytest.mark.filterwarnings("ignore")  # torch's warnings about its own tracing
@pytest.mark.parametrize(("trace", "edits"), EDITED)
def test_edits_work_on_real_values_after_a_trace(trace: str, edits: list[str]) -> None:
    model = net()
    spec = together(EDITS, edits)
    with hookrun.hooked(model, spec):
        expected = model(X)
    with hookrun.hooked(model, spec, effects=True) as hooks:
        if "noise" in edits and trace.startswith(("export", "make_fx")) and not traces_generators():
            said = r"hook 'h0' \(forward, noise\) on 0: .* from torch 2.13 on"
            with pytest.raises(hookrun.HookError, match=said):
                TRACES[trace](model)
        else:
            TRACES[trace](model)
        found = model(X)
        assert type(found) is Tensor
        assert holds_data(found)
        assert "noise" in edits or torch.equal(found, expected)
        assert all(isinstance(number, int) for counts in hooks.effects.values() for number in counts)


@pytest.mark.filterwarnings("ignore")  # torch's warnings about its own tracing
@pytest.mark.parametrize(("trace", "observers"), OBSERVED)
def test_captures_can_be_read_after_a_trace(
    trace: str, observers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()
    with hookrun.hooked(model, together(OBSERVERS, observers)) as hooks:
        try:
            TRACES[trace](model)
        except hookrun.HookrunError as error:
            assert "hook 'h" in str(error)
            assert "on 0" in str(error)
        model(X).sum().backward()
        records = hooks.records
        values = [kept for captures in hooks.captures.values() for kept in captures.values()]
    assert all(values), "the real run is captured"
    for tensor in held(values):
        assert not isinstance(tensor, FakeTensor)
        assert holds_data(tensor)
        assert torch.isfinite(tensor.float()).all()
        assert tensor.clone().numel() == tensor.numel()
    assert not any(isinstance(value, Tensor) for record in records for value in record.values())


def test_a_capture_under_vmap_has_the_mapped_dimension_first() -> None:
    model = net()
    with hookrun.hooked(model, on("capture")) as hooks:
        torch.vmap(model)(X)
        torch.vmap(torch.vmap(model))(torch.stack((X, 2 * X)))
        torch.vmap(model, in_dims=1)(X.t())
    first, nested, other = hooks.captures["h"]["0"]
    assert nested.shape == (2, 4, 3)
    torch.testing.assert_close([first, nested[0], other], [model[0](X).detach()] * 3)  # type: ignore[index]


def test_a_capture_under_grad_is_the_value_detached() -> None:
    model = net()
    with hookrun.hooked(model, on("capture")) as hooks:
        TRACES["grad"](model)
        TRACES["vmap of grad"](model)
    kept = list(hooks.captures["h"]["0"])
    for value in kept:
        assert not value.requires_grad
    torch.testing.assert_close(kept, [model[0](X).detach()] * 2)  # type: ignore[index]


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_a_check_under_vmap_checks_each_mapped_element(policy: str) -> None:
    model = net()
    fails = pytest.raises(hookrun.CheckFailed, match="at most -100") if policy == "error" else nullcontext()
    with hookrun.hooked(model, on("check", max=-100.0, policy=policy)) as hooks:
        with fails:
            torch.vmap(model)(X)
        assert hooks.records[0]["ok"] is False
        assert hooks.records[0]["largest"] > -100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_an_export_adds_nothing_to_the_captures(strict: bool) -> None:
    model = net()
    with hookrun.hooked(model, on("add_bias", value=1.0) if strict else on("capture")) as hooks:
        torch.export.export(model, (X,), strict=strict)
        out = model(X)
    assert not isinstance(out, FakeTensor)
    if not strict:
        torch.testing.assert_close(hooks.captures["h"]["0"], [model[0](X).detach()])  # type: ignore[index]


@pytest.mark.parametrize("hook", ["backward", "backward_pre"])
@pytest.mark.parametrize("trace", ["grad", "vmap of grad", "jvp", "functional_call"])
def test_a_backward_hook_under_torch_func_is_an_error(hook: str, trace: str) -> None:
    model = net()
    said = r"hook 'h' \(backward.*on 0: .*torch\.func.*loss\.backward\(\)"
    with hookrun.hooked(model, on("capture", hook=hook)), pytest.raises(hookrun.HookError, match=said):
        TRACES[trace](model)


def test_samples_drawn_during_a_trace_are_drawn_again_afterwards() -> None:
    model = net()
    with hookrun.hooked(model, on("capture", keep={"reservoir": 2})) as hooks:
        hooks.samples, hooks.population = range(4), 4
        fake_run(model)
        model(X)
    (kept,) = hooks.captures["h"]["0"]
    assert type(kept) is Tensor
    assert kept.shape == (2, 3)


def test_statistics_of_meta_tensors_are_refused() -> None:
    model = net().to("meta")
    x = X.to("meta")
    (kept,) = captured(model, x, select="0")
    assert kept.is_meta
    assert kept.shape == (4, 3)
    said = r"hook 'h'.*on 0.*meta tensor has no values"
    with hookrun.hooked(model, on("stats")), pytest.raises(hookrun.HookError, match=said):
        model(x)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def trained(call: Any, model: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    output = call(INPUT)
    output.square().sum().backward()
    return output.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]
