"""None, nested, quantized, float8 and dual tensors, and batched gradients: right, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hooking import one_hook
from small_nets import Net
from torch import Tensor, nn
from torch.autograd import forward_ad

import hookrun

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:.torch.jit.script. is deprecated",  # by torch's forward mode
)

X = torch.linspace(-1, 1, 12).reshape(3, 4)


# ---- None --------------------------------------------------------------------------------------------------------

NEEDS_WEIGHTS = (True, False, False, True)


def attention() -> Net:
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    return Net(lambda m, x, weights: m.layer(x, x, x, need_weights=weights)[0], layer=layer)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"index": ":, 0"},
        {"dtype": "float16"},
        {"reduce": "mean"},
        {"max_bytes": 10**6},
        {"keep": {"every": 2}},
    ],
    ids=str,
)
def test_entry_i_of_a_capture_is_that_of_call_i(keys: dict[str, Any]) -> None:
    model = attention()
    with hookrun.hooked(model, one_hook("layer", target="[1]", **keys)) as hooks:
        for needed in NEEDS_WEIGHTS:
            hooks.samples = [0, 1]
            model(torch.randn(2, 3, 4), needed)
    assert [entry is not None for entry in hooks.captures["h"]["layer"]] == list(NEEDS_WEIGHTS)


def test_under_tokens_a_none_has_neither_an_entry_nor_rows() -> None:
    model = attention()
    with hookrun.hooked(model, one_hook("layer", target="[1]", tokens={"query": "all"})) as hooks:
        for needed in NEEDS_WEIGHTS:
            hooks.tokens(torch.arange(6).reshape(2, 3))
            model(torch.randn(2, 3, 4), needed)
    entries = hooks.captures["h"]["layer"]
    assert len(torch.cat(list(entries))) == len(entries.sample_ids) == 12


# ---- float8 ------------------------------------------------------------------------------------------------------

OF_8_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


def edited(action: str, keys: dict[str, Any], x: Tensor) -> Tensor:
    with hookrun.hooked(nn.Identity(), one_hook("", action=action, **keys), effects=True) as hooks:
        new: Tensor = hooks._model(x)
    assert hooks.fired == {("h", ""): 1}
    return new


@pytest.mark.parametrize("dtype", OF_8_BITS, ids=str)
@pytest.mark.parametrize(
    ("action", "keys"),
    [
        ("scale", {"factor": 0.3}),
        ("scale", {"factor": 0.3, "index": "..., 0"}),
        ("scale", {"factor": 0.3, "when": {"value": {"of": "std", "above": 0.2}}}),
        ("clamp", {"min": -0.1, "max": [0.1, 0.2, 0.3, 0.4]}),
        ("add_bias", {"value": [1, 2, 3, 4]}),
        ("noise", {"std": 0.5, "seed": 1}),
        ("clip_norm", {"max_norm": 1}),
        ("quantize", {"bits": 2}),
        ("project", {"direction": [1, 1, 0, 0]}),
        ("replace", {"value": 0.1}),
    ],
    ids=str,
)
def test_a_float8_tensor_is_edited_in_float32(action: str, keys: dict[str, Any], dtype: torch.dtype) -> None:
    x = X.to(dtype)
    new = edited(action, keys, x)
    expected = edited(action, keys, x.float())
    assert new.dtype == dtype
    assert torch.equal(new.float(), expected.to(dtype).float())


@pytest.mark.parametrize("dtype", OF_8_BITS, ids=str)
def test_a_float8_tensor_is_captured_as_it_is(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    spec = {
        "whole": {"select": "", "hook": "forward", "action": "capture"},
        "mean": {"select": "", "hook": "forward", "action": "capture", "reduce": "mean"},
        "top": {"select": "", "hook": "forward", "action": "capture", "reduce": {"topk": 2}},
    }
    with hookrun.hooked(nn.Identity(), spec) as hooks:
        hooks._model(x)
    kept = {name: modules[""][0] for name, modules in hooks.captures.items()}
    assert kept["whole"].dtype == dtype
    assert torch.equal(kept["whole"].view(torch.uint8), x.view(torch.uint8))
    assert torch.equal(kept["mean"], x.float().mean(1))
    assert torch.equal(kept["top"].values, x.float().topk(2).values)


# ---- nested ------------------------------------------------------------------------------------------------------

PADDED = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]).bool()


def encoder() -> nn.TransformerEncoder:
    """In eval mode it computes with nested tensors of strided layout if there is a padding mask."""
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).eval()


def encoded(model: nn.Module) -> Tensor:
    x = torch.linspace(-2, 2, 32).reshape(2, 4, 4)
    with torch.no_grad():
        output: Tensor = model(x, src_key_padding_mask=PADDED)
    return output


@pytest.mark.parametrize(
    ("action", "by_hand"),
    [
        ({"action": "scale", "factor": 2.0}, lambda x: x * 2),
        ({"action": "add_bias", "value": 1.0}, lambda x: x + 1),
        ({"action": "python", "function": lambda x: x.tanh()}, lambda x: x.tanh()),
    ],
)
def test_a_nested_tensor_is_edited_where_torch_can_do_it(action: dict[str, Any], by_hand: Any) -> None:
    with hookrun.hooked(encoder(), one_hook("layers.0", "forward", **action), effects=True) as hooks:
        found = encoded(hooks._model)
    model = encoder()
    model.layers[0].register_forward_hook(lambda module, args, output: by_hand(output))
    assert torch.equal(found, encoded(model))
    assert hooks.effects["h", "layers.0"] == (24, 24)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_observers_see_the_elements_of_a_nested_tensor(layout: torch.layout, capsys: Any) -> None:
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    model = nn.Sequential(nn.Identity())
    every = torch.cat(parts)
    at = {"select": "0", "hook": "forward"}
    spec = {
        "stats": {**at, "action": "stats", "of": ["mean", "norm", "max", "numel"]},
        "check": {**at, "action": "check", "max": every.max().item() / 2, "policy": "warn"},
        "shape": {**at, "action": "print"},
        "value": {**at, "action": "print", "what": "value"},
    }
    with hookrun.hooked(model, spec) as hooks:
        model(torch.nested.nested_tensor(parts, layout=layout))
    stats, shape, value, check = sorted(
        hooks.records, key=lambda record: ["stats", "shape", "value", "check"].index(record["hook"])
    )
    assert stats["mean"] == pytest.approx(every.mean().item(), abs=1e-6)
    assert stats["norm"] == pytest.approx(every.norm().item())
    assert stats["max"] == every.max()
    assert stats["numel"] == 20
    assert check["largest"] == every.max()
    assert shape["shape"] == [2, None, 4]
    assert [len(part) for part in value["value"]] == [2, 3]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize(
    "keys", [{"action": "clip_norm", "max_norm": 1}, {"action": "capture", "reduce": {"topk": 2}}], ids=str
)
def test_a_nested_tensor_refuses_in_words(layout: torch.layout, keys: Any) -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.nested.nested_tensor([X, X[:1]], layout=layout)
    with (
        pytest.raises(
            hookrun.HookError, match=r"'h' \(.* on 0: torch cannot compute this on a nested tensor"
        ),
        hookrun.hooked(model, one_hook("0", "forward", **keys)),
    ):
        model(x)


@pytest.mark.parametrize("hook", ["grad", "optimizer_step_pre"])
def test_a_sparse_gradient_refuses_in_words(hook: str) -> None:
    model = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with (
        pytest.raises(hookrun.HookError, match=r"on weight: torch cannot .* a sparse tensor .* sparse=False"),
        hookrun.hooked(model, one_hook("weight", hook, action="clamp", max=0.5)),
    ):
        model(torch.tensor([1])).sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_matrix_of_sparse_rows_is_refused_in_words() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse_csr()

    with (
        pytest.raises(hookrun.HookError, match="on 0: torch cannot compute this on a sparse tensor"),
        hookrun.hooked(model := nn.Sequential(Layer()), one_hook("0", "forward", action="stats")),
    ):
        model(torch.eye(2))


def test_what_is_wrong_beside_a_sparse_tensor_is_told() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return x, torch.eye(2).to_sparse()

    model = nn.Sequential(Layer(5, 2))
    with (
        pytest.raises(hookrun.HookError, match="cannot be multiplied"),
        hookrun.hooked(model, one_hook("0", "forward", action="linear", target=0)),
    ):
        model(torch.ones(4, 3))


@pytest.mark.parametrize(
    ("hook", "action"),
    [("backward", {"action": "stats"}), ("output_grad", {"action": "scale", "factor": 2})],
    ids=str,
)
def test_nested_gradients_that_torch_cannot_hook_are_refused(hook: str, action: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.nested.nested_tensor([X, X[:1]])
    with (
        pytest.raises(hookrun.HookError, match="on 0: torch cannot compute this on a nested tensor"),
        hookrun.hooked(model, one_hook("0", hook, **action)),
    ):
        torch.nested.to_padded_tensor(model(x), 0.0).sum().backward()


# ---- quantized ---------------------------------------------------------------------------------------------------

QUANTIZED: dict[str, Callable[[], Tensor]] = {
    "qint8": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    "quint8": lambda: torch.quantize_per_tensor(X, 0.1, 10, torch.quint8),
    "qint32": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint32),
    "per channel": lambda: torch.quantize_per_channel(
        X, torch.full((3,), 0.1), torch.zeros(3).int(), 0, torch.qint8
    ),
}


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning", "ignore:.*quant:UserWarning")
def test_a_captured_quantized_tensor_can_be_read(kind: str, tmp_path: Path, capsys: Any) -> None:
    model = nn.Sequential(nn.Identity())
    x = QUANTIZED[kind]()
    spec = {**one_hook("0"), "p": {"select": "0", "hook": "forward", "action": "print", "what": "value"}}
    with hookrun.hooked(model, spec) as hooks:
        expected = [model(x).dequantize() for _ in range(3)]
    for entry in hooks.captures["h"]["0"]:
        assert torch.equal(entry.dequantize(), expected[0])
    torch.testing.assert_close(torch.tensor(hooks.records[0]["value"]), expected[0])
    captured = {"select": "0", "hook": "forward", "action": "capture", "batch_dim": 0}
    with hookrun.record(model, {"h": captured}, tmp_path / "run"):
        model(x)
    assert torch.equal(hookrun.open_run(tmp_path / "run").captures["h"]["0"][:], expected[0])


# ---- forward-mode differentiation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys", [{}, {"index": "..., 0"}, {"index": ":, [0, 2]"}, {"max_bytes": 10**6}], ids=str
)
@pytest.mark.parametrize("trained", [True, False])
def test_a_capture_in_forward_mode_has_no_tangent(keys: dict[str, Any], trained: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity()).requires_grad_(trained)
    spec = {name: one_hook(select, **keys)["h"] for name, select in (("first", "0"), ("last", "1"))}
    with hookrun.hooked(model, spec) as hooks, forward_ad.dual_level():
        for _ in range(4):  # the third copy is the first one that is made on write
            output = model(forward_ad.make_dual(X, X))
        entries = [*hooks.captures["first"]["0"], *hooks.captures["last"]["1"]]
        assert len(entries) == 8
        for entry in entries:
            assert forward_ad.unpack_dual(entry).tangent is None
        for entry in entries:
            assert not entry.requires_grad
        torch.testing.assert_close(forward_ad.unpack_dual(output).tangent, X @ model[0].weight.T)


# ---- batched gradients -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*found no tensor for its action")
@pytest.mark.parametrize("hook", ["output_grad", "backward"])
@pytest.mark.parametrize("action", ["capture", "stats", "check", "print"])
def test_an_observer_says_that_gradients_are_batched(hook: str, action: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    expected = torch.autograd.functional.jacobian(model, X)
    with (
        hookrun.hooked(model, one_hook("1", hook, action)) as hooks,
        pytest.warns(hookrun.HookrunWarning, match=r"'h' .* on 1: gradients are batched"),
    ):
        found = torch.autograd.functional.jacobian(model, X, vectorize=True)
    torch.testing.assert_close(found, expected)
    assert not hooks.records
    assert not hooks.captures.get("h", {}).get("1")


def test_an_edit_of_batched_gradients_is_that_of_each() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    spec = one_hook("1", "output_grad", "clip_norm", max_norm=0.5)
    with hookrun.hooked(model, spec, effects=True):
        one_by_one = torch.autograd.functional.jacobian(model, X)
        together = torch.autograd.functional.jacobian(model, X, vectorize=True)
    torch.testing.assert_close(together, one_by_one)
