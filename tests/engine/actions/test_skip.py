"""`skip`: the model with the module left out, as torch's nn.Identity in its place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import small_nets
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hookrun

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
EXAMPLE = ((X,), {})
SKIP: dict[str, Any] = {"select": "layers.1", "hook": "forward", "action": "skip"}
INSIDE: dict[str, Any] = {"select": "layers.*.inner", "hook": "forward", "action": "capture"}


def double(model: nn.Module) -> Tensor:
    """The output with all parameters doubled by functional_call."""
    return torch.func.functional_call(
        model, {name: 2 * p.detach() for name, p in model.named_parameters()}, (X,)
    )


WAYS: dict[str, Callable[[nn.Module], Tensor]] = {
    "call": lambda model: model(X),
    "functional_call": double,
    "vmap": lambda model: torch.vmap(model)(X),
    "compile": lambda model: torch.compile(model, backend="eager", fullgraph=True)(X),
    "export": lambda model: torch.export.export(model, (X,)).module()(X),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_it_equals_the_model_with_an_identity_in_its_place(way: Callable[[nn.Module], Tensor]) -> None:
    model = Net()
    with hookrun.compile({"out": SKIP}, model, example=EXAMPLE).install(model, strict=True):
        assert_close(way(model), way(without(model)))
    torch.compiler.reset()
    assert "forward" not in vars(model.layers[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_those_without_it_also_under_checkpointing(reentrant: bool) -> None:
    x = X.clone().requires_grad_()
    model = Net(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))
    wanted = gradients(without(model), x)
    with hookrun.hooked(model, {"out": SKIP}) as hooks:
        found = gradients(model, x)
        assert hooks.fired["out", "layers.1"] == 1
    assert found.keys() == wanted.keys()
    assert_close(found, wanted)


def test_a_schedule_that_does_not_hold_calls_the_forward() -> None:
    model = Net()
    plain = model(X)
    skipped = without(model)(X)
    with hookrun.hooked(model, {"out": {**SKIP, "when": {"step": [0]}}, "seen": INSIDE}) as hooks:
        assert torch.equal(model(X), skipped)
        hooks.step()
        assert torch.equal(model(X), plain)
        with hooks.paused():
            assert torch.equal(model(X), plain)
    assert [hooks.fired["seen", f"layers.{number}.inner"] for number in (0, 1)] == [2, 1]


def test_the_plan_tells_of_a_hook_inside() -> None:
    model = Net()
    plan = hookrun.compile({"out": SKIP, "seen": INSIDE}, model, example=EXAMPLE)
    assert "seen: the example did not reach layers.1.inner under out" in str(plan)
    with plan.install(model, strict=True) as hooks:
        model(X)
    assert hooks.inactive == [("seen", "layers.1.inner", "never fired: out skips the module")]
    scheduled = {**SKIP, "when": {"step": [5]}}
    elsewhere = {"select": "unused.0", "hook": "forward", "action": "capture"}
    model.unused = nn.Sequential(nn.Linear(2, 2))
    with (
        pytest.raises(hookrun.HookrunError, match=r"out never fired on .*\nother never fired on unused"),
        hookrun.hooked(model, {"out": scheduled, "other": elsewhere}, strict=True),
    ):
        model(X)


def test_other_hooks_on_the_module_see_its_first_argument() -> None:
    model = Net()
    seen = list[Tensor]()
    wanted = model.layers[0](X)
    hooks = {
        "before": {"select": "layers.1", "hook": "forward_pre", "action": "scale", "factor": 3},
        "out": SKIP,
        "after": {"select": "layers.1", "hook": "forward", "action": "scale", "factor": 2},
    }
    with hookrun.hooked(model, hooks):
        handle = model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
        model(X)
        handle.remove()
    assert_close(seen, [6 * wanted])


class Odd(nn.Module):
    """What cannot be skipped."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        return self.output(x)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (lambda x: x[:, :3], r"changes the shape from \[5, 3\] to \[5, 8\]"),
        (lambda x: (x, None), "changes the type from tuple to"),
        (lambda x: x.double(), "changes the dtype"),
    ],
    ids=["shape", "tuple", "dtype"],
)
@pytest.mark.parametrize("when", [{}, {"when": {"step": [7]}}], ids=["always", "later"])
def test_an_output_of_another_form_is_refused_by_name(
    output: Callable[[Tensor], Any], why: str, when: dict[str, Any]
) -> None:
    model = small_nets.Net(lambda model, x: model.inner(x), inner=Odd(output))
    spec = {"out": {**SKIP, **when, "select": "inner"}}
    with pytest.raises(hookrun.CompileError, match=f"on inner: its first argument cannot be .*{why}"):
        hookrun.compile(spec, model, example=EXAMPLE)


def test_the_first_argument_may_be_given_by_keyword_in_any_order() -> None:
    inner = Odd(lambda x: 2 * x)
    model = small_nets.Net(lambda model, x: model.inner(mask=5 * x, x=x), inner=inner)
    with hookrun.hooked(model, {"out": {**SKIP, "select": "inner"}}):
        assert torch.equal(model(X), X)


@pytest.mark.parametrize("key", [{"index": "0"}, {"target": "a"}, {"tokens": {"position": 0}}], ids=str)
def test_a_part_of_a_call_cannot_be_skipped(key: dict[str, Any]) -> None:
    with pytest.raises(hookrun.CompileError, match="skip, which acts on the whole call of the module"):
        hookrun.compile({"out": {**SKIP, **key}}, Net())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_everything(way: Callable[[Net], Net]) -> None:
    model = Net()
    plain = model(X)
    names = list(model.state_dict())
    with hookrun.hooked(model, {"out": SKIP}):
        other = way(model)
        assert torch.equal(other(X), plain)
        assert not torch.equal(model(X), plain)
        other.layers[1].outer.weight.data.zero_()
        assert not torch.equal(other(X), plain), "it has a forward of its own"
        assert list(model.state_dict()) == names
    with hookrun.hooked(model, {"out": {**SKIP, "when": {"step": [1]}}}):
        shallow = copy.copy(model.layers[1])
        shallow._modules = {**shallow._modules, "outer": nn.Identity()}
        assert torch.equal(shallow(X), X + shallow.inner(X).relu())


def test_installations_may_end_in_any_order() -> None:
    model = Net()
    own = model.layers[1].forward = lambda x: x + 1
    first = hookrun.hooked(model, {"a": SKIP})
    second = hookrun.hooked(model, {"b": SKIP})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(model(X), without(model)(X))
    with pytest.raises(RuntimeError, match="shape"):
        model(X[:, :3])
    second.__exit__(None, None, None)
    assert vars(model.layers[1])["forward"] is own


def test_fast_paths_of_torch_do_not_go_around_it() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), hookrun.hooked(model, {"out": {**SKIP, "select": "0.linear1"}}):
        found = model(x)
    assert_close(found, without(model, "0.linear1").train()(x))


@pytest.mark.parametrize(("finds", "refused"), [(False, True), (True, False)])
def test_a_wrapper_that_waits_for_its_gradients_is_refused(finds: bool, refused: bool, monkeypatch) -> None:
    wrapper = SimpleNamespace(find_unused_parameters=finds, static_graph=False)
    monkeypatch.setattr(DistributedDataParallel, "_get_active_ddp_module", lambda: wrapper)
    model = Net()
    with hookrun.hooked(model, {"out": SKIP}):
        with pytest.raises(hookrun.HookError, match="find_unused_parameters") if refused else nullcontext():
            model(X)
        with torch.no_grad():
            model(X)


def test_a_cache_that_a_skipped_layer_did_not_fill_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=20
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor([[3, 4, 5]])
    spec = {"out": {**SKIP, "select": "model.layers.0"}}
    keys = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with hookrun.compile(spec, model, example=((), {"input_ids": ids})).install(model):
        assert model.generate(ids, use_cache=False, **keys).shape == (1, 6)
        with pytest.raises(hookrun.HookError, match=r"on model\.layers\.0: an earlier pass skipped it"):
            model.generate(ids, **keys)
    with hookrun.hooked(model, {"out": {**SKIP, "select": "model.layers.0.mlp"}}):
        cached = model.generate(ids, use_cache=True, **keys)
        computed = model.generate(ids, use_cache=False, **keys)
    assert torch.equal(cached, computed)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


def called(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class Net(nn.Module):
    def __init__(self, call: Callable[..., Any] = called) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head, self.call = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 3), call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


def without(model: nn.Module, path: str = "layers.1") -> nn.Module:
    """The model with nn.Identity in the place of a module."""
    other = copy.deepcopy(model)
    other.set_submodule(path, nn.Identity())
    return other


def gradients(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
