"""`weight`: a parameter as its module's forward reads it, compared with a hand-written functional_call."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hooking import one_hook
from small_nets import Net
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.errors import CompileError, HookError

pytestmark = pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")

X = torch.linspace(-1, 1, 15).reshape(5, 3)


in_graphs = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.12 compiles no edited parameters")


class Through(torch.autograd.Function):
    """The second tensor with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor) -> Tensor:
        return new.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def tripled_rows(p: Tensor) -> Tensor:
    new = p.clone()
    new[:2] = p[:2] * 3
    return new


def without_row(p: Tensor) -> Tensor:
    new = p.detach().clone()
    new[0] = 0
    return Through.apply(p, new)


def rounded(value: Tensor) -> Tensor:
    return value.detach().round(decimals=1)


EDITS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "scale": ({"action": "scale", "factor": 0.3}, lambda p: p * 0.3),
    "clamp": ({"action": "clamp", "min": -0.1, "max": 0.1}, lambda p: p.clamp(-0.1, 0.1)),
    "add_bias": ({"action": "add_bias", "value": [1, 2, 3]}, lambda p: p + torch.tensor([1.0, 2.0, 3.0])),
    "replace": ({"action": "replace", "value": 0.5}, lambda p: Through.apply(p, torch.full_like(p, 0.5))),
    "clip_norm": (
        {"action": "clip_norm", "max_norm": 0.3},
        lambda p: p * (0.3 / (torch.linalg.vector_norm(p) + 1e-6)).clamp_max(1),
    ),
    "python": ({"action": "python", "function": rounded}, lambda p: Through.apply(p, rounded(p))),
    "index": ({"action": "scale", "factor": 3, "index": ":2"}, tripled_rows),
    "index, replace": ({"action": "replace", "value": 0, "index": "0"}, without_row),
}


@pytest.mark.parametrize("name", EDITS)
def test_outputs_are_those_of_functional_call(name: str) -> None:
    hook, edit = EDITS[name]
    model = net()
    plain = net()
    with hooked(model, **hook):
        found = results(model, lambda: model(X))
        of_parameters = functional_call(model, {"0.weight": plain[0].weight.detach() * 2}, X)
    expected = results(plain, lambda: functional_call(plain, {"0.weight": edit(plain[0].weight)}, X))
    require_equal(found, expected)
    twice = plain[0].weight.detach() * 2
    assert torch.equal(of_parameters, functional_call(plain, {"0.weight": edit(twice)}, X))


@pytest.mark.parametrize("kind", ["bfloat16", "autocast", "inference"])
def test_precisions_are_those_of_functional_call(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = net().to(dtype)
    plain = net().to(dtype)
    inside = torch.inference_mode(kind == "inference")
    with inside, torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        with hooked(model, action="scale", factor=0.3):
            found = model(X.to(dtype))
        assert torch.equal(found, functional_call(plain, {"0.weight": plain[0].weight * 0.3}, X.to(dtype)))


def test_the_stored_parameter_is_trained() -> None:
    model = net()
    plain = net()
    ours = torch.optim.SGD(model.parameters(), 0.1)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    with hooked(model, action="scale", factor=0.3) as hooks:
        for _ in range(3):
            results(model, lambda: model(X))
            ours.step()
            results(plain, lambda: functional_call(plain, {"0.weight": plain[0].weight * 0.3}, X))
            theirs.step()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(X), plain(X))
            require_equal(list(copied.state_dict().values()), list(plain.state_dict().values()))
        assert hooks.sites[0].firings == 3


def tied() -> Net:
    torch.manual_seed(0)
    embed = nn.Embedding(7, 4)
    head = nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    return Net(lambda m, ids: m.head(m.embed(ids)), embed=embed, head=head)


@pytest.mark.parametrize("readers", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_each_reader_of_a_tied_weight_has_its_own_edit(readers: list[str]) -> None:
    model = tied()
    ids = torch.arange(6)
    weight = model.embed.weight
    read = [weight * 0.5 if name in readers else weight for name in ("embed.weight", "head.weight")]
    expected = nn.functional.linear(nn.functional.embedding(ids, read[0]), read[1])
    with hooked(model, readers if len(readers) == 1 else "**.weight", action="scale", factor=0.5) as hooks:
        assert torch.equal(model(ids), expected)
    assert [site.path for site in hooks.sites] == readers


@pytest.mark.parametrize("select", ["0.weight", "0"])
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_parametrized_weight_is_edited_once(name: str, select: str) -> None:
    model = net()
    getattr(parametrizations, name)(model[0])
    plain = copy.deepcopy(model)

    def by_hand() -> Tensor:
        bias = plain[0].bias * (0.5 if select == "0" else 1)
        return plain[2](torch.relu(nn.functional.linear(X, plain[0].weight * 0.5, bias)))

    with hooked(model, select, action="scale", factor=0.5):
        found = results(model, lambda: model(X))
    require_equal(found, results(plain, by_hand))
    assert torch.equal(model(X), plain(X))  # spectral_norm counts the reads


def test_what_the_forward_does_not_read_is_refused() -> None:
    model = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(CompileError, match="computes 'weight' from it, which is what the forward reads"):
        hookrun.compile(one_hook("0.weight_orig", "weight", "print"), model)
    model = net()
    parametrizations.orthogonal(model[0])
    refused = pytest.raises(HookError, match=r"leave out torch.nn.utils.parametrize.cached")
    with hooked(model, action="scale", factor=2), parametrize.cached(), refused:
        model(X)
    with hooked(model, "2.weight", action="scale", factor=2):
        prune.l1_unstructured(model[2], "weight", 0.5)
        with pytest.raises(HookError, match="no such parameter now"):
            model(X)


def test_recurrent_layers_keep_their_own_weights() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4)
    x = torch.ones(2, 5, 3)
    plain = copy.deepcopy(model)
    before = model(x)[0]
    with hooked(model, "weight_ih_l0", action="scale", factor=2):
        found = results(model, lambda: model(x)[0])
        copy.deepcopy(model)
    edited = {"weight_ih_l0": plain.weight_ih_l0 * 2}
    require_equal(found, results(plain, lambda: functional_call(plain, edited, (x,))[0]))
    assert torch.equal(model(x)[0], before)


class Recursive(nn.Module):
    """Calls itself, and checks that a call reads one tensor before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
        self.error: type[BaseException] | None = None

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        read = self.w
        x = self(x, depth - 1) if depth else x
        if self.error is not None:
            raise self.error
        assert self.w is read
        return x * read


def test_nested_calls_have_an_edit_each() -> None:
    model = Recursive()
    hooks = {
        "noise": {"select": "w", "hook": "weight", "action": "noise", "seed": 1},
        "seen": {"select": "w", "hook": "weight", "action": "capture"},
    }
    with hookrun.hooked(model, hooks) as installed:
        outputs = [model(torch.ones(())) for _ in range(2)]
        seen = torch.stack(list(installed.captures["seen"]["w"]))
    assert len(set(seen.tolist())) == 6
    torch.testing.assert_close(torch.stack(outputs), seen.reshape(2, 3).prod(1))
    with hooked(model, "w", action="scale", factor=2, when={"call": [1]}):
        assert model(torch.ones(())) == 16


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_after_an_exception_the_module_reads_its_own_parameter(error: type[BaseException]) -> None:
    model = Recursive()

    def fail() -> None:
        model.error = error
        with pytest.raises(error):
            model(torch.ones(()))
        model.error = None

    with hooked(model, "w", action="scale", factor=2, when={"step": [0]}) as hooks:
        for expected in (64, 8):
            fail()
            assert model(torch.ones(())) == expected
            assert model.w is model._parameters["w"]
            hooks.step()
    with hooked(model, "w", action="scale", factor=2):
        fail()
    assert model.w is model._parameters["w"]


def test_two_threads_in_one_module_are_refused() -> None:
    inside = threading.Event()
    go_on = threading.Event()

    def waits(model: Any, x: Tensor) -> Tensor:
        if not inside.is_set():
            inside.set()
            go_on.wait(60)
        return x * model.w

    model = Net(waits, w=nn.Parameter(torch.ones(2)))
    with hooked(model, "w", action="scale", factor=2), ThreadPoolExecutor(1) as pool:
        output = pool.submit(model, torch.ones(2))
        inside.wait(60)
        with pytest.raises(HookError, match="two threads call the module at the same time"):
            model(torch.ones(2))
        go_on.set()
        assert output.result().tolist() == model(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_call_reads_the_same_noise(reentrant: bool) -> None:
    x = X.clone().requires_grad_()
    hooks = {
        "noise": {"select": "**.weight", "hook": "weight", "action": "noise"},
        "constant": {"select": "0.bias", "hook": "weight", "action": "replace", "value": 1},
    }
    found = list[list[Tensor]]()
    for run in (lambda m: m(x), lambda m: checkpoint(m, x, use_reentrant=reentrant)):
        model = net()
        with hookrun.hooked(model, hooks) as installed:
            found += [results(model, lambda run=run, model=model: run(model)) for _ in range(2)]  # type: ignore[misc]
        assert [site.firings for site in installed.sites] == [2, 2, 2]
    require_equal(found[0], found[2])
    require_equal(found[1], found[3])
    assert not torch.equal(found[0][0], found[1][0])


@in_graphs
@pytest.mark.parametrize("name", ["scale", "replace", "clip_norm", "index", "index, replace"])
def test_the_edit_is_part_of_one_compiled_graph(name: str) -> None:
    torch._dynamo.reset()
    model = net()
    with hooked(model, **EDITS[name][0]) as hooks:
        eager = results(model, lambda: model(X))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        require_equal(results(model, lambda: compiled(X)), eager)
        assert hooks.sites[0].firings == 2
    assert "weight" not in vars(model[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("which", ["noise", "parametrized", "recursive"])
def test_a_compiled_graph_refuses_what_it_cannot_hold(which: str) -> None:
    torch._dynamo.reset()
    model = Recursive() if which == "recursive" else net()
    if which == "parametrized":
        parametrizations.orthogonal(model[0])
    hook = {"action": "noise"} if which == "noise" else {"action": "scale", "factor": 2}
    with (
        hooked(model, {"path": "**", "exclude": "2"}, **hook),
        pytest.raises(CompileError, match="a graph cannot contain"),
    ):
        torch.compile(model, backend="aot_eager")(X)
    assert "w" not in vars(model)


def test_a_torch_that_would_lose_the_parameter_compiles_no_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookrun.engine.plan.plan._LOSES_PARAMETERS", True)
    torch._dynamo.reset()
    model = net()
    with hooked(model, action="scale", factor=2), pytest.raises(CompileError, match=r"in torch 2\.12"):
        torch.compile(model, backend="aot_eager")(X)
    assert "weight" in model[0]._parameters


@in_graphs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_an_exception_between_graphs_leaves_nothing() -> None:
    def broken(model: Any, x: Tensor) -> Tensor:
        x = x * model.w
        torch._dynamo.graph_break()
        if model.fails:
            raise ValueError
        return x * model.w

    torch._dynamo.reset()
    model = Net(broken, w=nn.Parameter(torch.ones(3)))
    model.fails = False
    with hooked(model, "w", action="scale", factor=2):
        compiled = torch.compile(model, backend="aot_eager")
        assert torch.equal(compiled(X), X * 4)
        model.fails = True
        with pytest.raises(ValueError):
            compiled(X)
        model.fails = False
        assert torch.equal(model(X), X * 4)
    assert model.w is model._parameters["w"]


def test_gradients_of_samples_pass_through_a_constant() -> None:
    model = net()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, given, x).square().sum()

    with hooked(model, action="replace", value=0.5):
        of_batch = torch.func.grad(loss)(parameters, X)["0.weight"]
        of_samples = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X)["0.weight"]
    assert of_batch.any()
    torch.testing.assert_close(of_samples.sum(0), of_batch)


def test_two_installations_edit_one_after_the_other() -> None:
    model = net()
    plain = net()
    parametrizations.orthogonal(model[2])
    both = ["0.weight", "2.weight"]
    scale = {"action": "scale"}
    with hooked(model, both, **scale, factor=2), hooked(model, both, **scale, factor=3):
        found = model(X)
    weight = model[2].weight * 2 * 3
    inner = functional_call(plain[0], {"weight": plain[0].weight * 2 * 3}, X)
    assert torch.equal(found, nn.functional.linear(torch.relu(inner), weight, model[2].bias))
    assert not {"weight", "parametrizations"} & (vars(model[0]).keys() | vars(model[2]).keys())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def hooked(model: nn.Module, select: Any = "0.weight", **hook: Any) -> Any:
    return hookrun.hooked(model, one_hook(select, "weight", **hook))


def results(model: nn.Module, call: Callable[[], Tensor]) -> list[Tensor]:
    """The output, then the gradient of each parameter."""
    model.zero_grad()
    output = call()
    output.square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def require_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for pair in zip(found, expected, strict=True):
        assert torch.equal(*pair)
