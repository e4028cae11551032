"""Passes of torch.export, fake tensors and torch.func through a hooked model leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hookrun
from hookrun.runtime.snapshot import held
from hookrun.values.tensors import holds_data

X = torch.linspace(-1, 1, 12).reshape(4, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


def on(action: str, hook: str = "forward", **keys: Any) -> dict[str, Any]:
    return {"h": {"select": ["0", "2"], "hook": hook, "action": action, **keys}}


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
    with hookrun.hooked(model, together(EDITS, edits), effects=True):
        expected = model(X)
    with hookrun.hooked(model, together(EDITS, edits), effects=True) as hooks:
        TRACES[trace](model)
        found = model(X)
        assert type(found) is Tensor and holds_data(found)
        if "noise" not in edits:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert all(isinstance(number, int) for counts in hooks.effects.values() for number in counts)


@pytest.mark.filterwarnings("ignore")  # torch's warnings about its own tracing
@pytest.mark.parametrize(("trace", "observers"), OBSERVED)
def test_captures_and_records_can_be_read_after_a_trace(
    trace: str, observers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()
    before = len(list(fired_by_hand(model)))
    with hookrun.hooked(model, together(OBSERVERS, observers)) as hooks:
        try:
            TRACES[trace](model)
        except hookrun.HookrunError as error:
            assert "hook 'h" in str(error) and "on 0" in str(error)
        model(X).sum().backward()
        records = hooks.records
        values = [kept for captured in hooks.captures.values() for kept in captured.values()]
    assert before == 2
    for kept in values:
        assert kept, "the real run is captured"
        for tensor in (each for value in kept for each in held(value)):
            assert not isinstance(tensor, FakeTensor) and holds_data(tensor)
            assert torch.isfinite(tensor.float()).all() and tensor.clone().numel() == tensor.numel()
    for record in records:
        assert not any(isinstance(value, Tensor) for value in record.values())


def fired_by_hand(model: nn.Module) -> list[Tensor]:
    seen = list[Tensor]()
    handles = [model[n].register_forward_hook(lambda _m, _a, y: seen.append(y)) for n in (0, 2)]  # type: ignore[index]
    model(X)
    for handle in handles:
        handle.remove()
    return seen


def test_a_capture_under_vmap_has_the_mapped_dimension_first() -> None:
    model = net()
    with hookrun.hooked(model, on("capture")) as hooks:
        torch.vmap(model)(X)
        torch.vmap(torch.vmap(model))(torch.stack((X, 2 * X)))
        torch.vmap(model, in_dims=1)(X.t())
    first, nested, other = hooks.captures["h"]["0"]
    expected = model[0](X).detach()  # type: ignore[index]
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(nested[0], expected)
    assert nested.shape == (2, 4, 3)
    torch.testing.assert_close(other, expected)


def test_a_capture_under_grad_is_the_value_detached() -> None:
    model = net()
    with hookrun.hooked(model, on("capture")) as hooks:
        torch.func.grad(lambda x: model(x).sum())(X)
        torch.vmap(torch.func.grad(lambda x: model(x).sum()))(X)
    expected = model[0](X).detach()  # type: ignore[index]
    for kept in hooks.captures["h"]["0"]:
        assert not kept.requires_grad
        torch.testing.assert_close(kept, expected)


def test_a_record_under_vmap_has_one_number_per_mapped_element() -> None:
    model = net()
    with hookrun.hooked(model, on("stats", of=["mean"])) as hooks:
        torch.vmap(model)(X)
    expected = model[0](X).mean(1).tolist()  # type: ignore[index]
    assert hooks.records[0]["mean"] == pytest.approx(expected)


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_a_check_under_vmap_checks_each_mapped_element(policy: str) -> None:
    model = net()
    with hookrun.hooked(model, on("check", max=-100.0, policy=policy)) as hooks:
        if policy == "error":
            with pytest.raises(hookrun.CheckFailed, match="at most -100"):
                torch.vmap(model)(X)
        else:
            torch.vmap(model)(X)
        assert hooks.records[0]["ok"] is False and hooks.records[0]["largest"] > -100


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
def test_a_backward_hook_under_torch_func_is_an_error_that_says_so(hook: str, trace: str) -> None:
    model = net()
    with (
        hookrun.hooked(model, on("capture", hook=hook)),
        pytest.raises(
            hookrun.HookError, match=r"hook 'h' \(backward.*on 0: .*torch\.func.*loss\.backward\(\)"
        ),
    ):
        TRACES[trace](model)


def test_samples_drawn_during_a_trace_are_drawn_again_afterwards() -> None:
    model = net()
    with hookrun.hooked(model, on("capture", keep={"reservoir": 2})) as hooks:
        hooks.samples, hooks.population = range(4), 4
        fake_run(model)
        model(X)
    (kept,) = hooks.captures["h"]["0"]
    assert type(kept) is Tensor and kept.shape == (2, 3)


def test_meta_tensors_are_captured_and_statistics_of_them_are_refused() -> None:
    model = net().to("meta")
    with hookrun.hooked(model, on("capture")) as hooks:
        model(X.to("meta"))
    assert hooks.captures["h"]["0"][0].is_meta and hooks.captures["h"]["0"][0].shape == (4, 3)
    with (
        hookrun.hooked(model, on("stats")),
        pytest.raises(hookrun.HookError, match=r"hook 'h'.*on 0.*meta tensor has no values"),
    ):
        model(X.to("meta"))
