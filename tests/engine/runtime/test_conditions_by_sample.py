"""`when: {value: …}` is what a hand-written hook does that selects the samples by a statistic of their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from draws import normal
from small_nets import Net
from torch import Tensor, nn

import hookrun
from hookrun.engine.actions.stats import SIZES, Statistic, measuring
from hookrun.errors import CompileError, HookError, SpecError

INPUT = normal(6, 4)
INPUT[1] *= 10
INPUT[3, 2] = torch.nan
HALF = {"of": "norm", "above": 2}
STATISTICS = [name for name in get_args(Statistic) if name not in SIZES]


def passing() -> Net:
    return Net(lambda _, x: x * 1)


def net() -> nn.Sequential:
    return nn.Sequential(passing(), nn.Sigmoid())


def hooked(model: nn.Module, when: Any, example: Tensor | None = INPUT, **keys: Any) -> Any:
    hook = {"select": "0", "hook": "forward", "when": when, **keys}
    given = None if example is None else ((example,), {})
    return hookrun.compile({"h": hook}, model, example=given).install(model)


def run(when: Any, x: Tensor, **keys: Any) -> Tensor:
    model = nn.Sequential(passing())
    with hooked(model, when, x, **keys):
        return model(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch 2.12 counts row by row
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_rows_equal_the_action_stats(name: Any) -> None:
    of_row = torch.stack([torch.as_tensor(measuring((name,))(row)[name]).float() for row in INPUT])
    bound = float(of_row[~of_row.isnan()].median())
    for side, holds in (("above", of_row > bound), ("below", of_row < bound)):
        expected = torch.where(holds[:, None], INPUT * 3, INPUT)
        output = run({"value": {"of": name, side: bound}}, INPUT, action="scale", factor=3)
        assert torch.equal(output.nan_to_num(7), expected.nan_to_num(7)), side


EDITS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "scale": ({"factor": 3}, lambda x: x * 3),
    "replace": ({"value": 0}, torch.zeros_like),
    "root": ({"action": torch.sqrt}, torch.sqrt),  # of negative numbers NaN, as is its gradient
}


@pytest.mark.parametrize("name", EDITS)
def test_rows_without_the_condition_keep_their_values(name: str) -> None:
    keys, by_hand = EDITS[name]
    x = (INPUT.nan_to_num(1) - 0.5).requires_grad_()
    weight = normal(6, 4, seed=1)
    holds = x.detach().mean(1) > 0.2
    for root in (False, True):
        given = x.detach().abs().mul(holds[:, None] * 2 - 1).requires_grad_() if root else x
        chosen = given.detach().mean(1) > 0.2
        expected = given.clone()
        expected[chosen] = by_hand(given[chosen])
        when = {"value": {"of": "mean", "above": 0.2}}
        output = run(when, given, **{"action": name, **keys})
        assert torch.equal(output.nan_to_num(7), expected.nan_to_num(7))
        grads = [torch.autograd.grad((y * weight).nansum(), given)[0] for y in (output, expected)]
        assert torch.equal(*[grad.nan_to_num(7) for grad in grads]), root


def test_each_sample_draws_the_same_noise_whichever_others_hold() -> None:
    noisy = run({}, INPUT, action="noise", seed=1)
    some = run({"value": HALF}, INPUT, action="noise", seed=1)
    expected = torch.where(INPUT.norm(dim=1, keepdim=True) > 2, noisy, INPUT)
    assert torch.equal(some.nan_to_num(7), expected.nan_to_num(7))


def test_the_condition_is_on_the_part_that_the_action_sees() -> None:
    output = run({"value": {"of": "max", "above": 0}}, INPUT, action="replace", value=0, index=":, 1:3")
    expected = INPUT.clone()
    holds = INPUT[:, 1:3].max(1).values > 0
    expected[holds, 1:3] = 0
    assert torch.equal(output.nan_to_num(7), expected.nan_to_num(7))


def test_gradients_are_edited_by_sample_too() -> None:
    model = net()
    x = INPUT.nan_to_num().requires_grad_()
    weight = normal(6, 4, seed=2)
    with hooked(model, {"value": HALF}, x, hook="output_grad", action="scale", factor=5):
        (grad,) = torch.autograd.grad((model(x) * weight).sum(), x)
    (plain,) = torch.autograd.grad((model(x) * weight).sum(), x)
    assert torch.equal(grad, plain)  # no row has a gradient of norm 2
    with hooked(
        model, {"value": {"of": "norm", "above": 0.3}}, x, hook="output_grad", action="scale", factor=5
    ):
        (grad,) = torch.autograd.grad((model(x) * weight).sum(), x)
    torch.testing.assert_close(grad, torch.where((plain.norm(dim=1) > 0.3)[:, None], plain * 5, plain))


def test_captures_name_their_samples() -> None:
    model = net()
    holds = INPUT.norm(dim=1) > 2
    hook = {"select": "0", "hook": "forward", "when": {"value": HALF}}
    few = {**hook, "keep": {"every": 2}, "action": "capture"}
    hooks = {"c": {**hook, "action": "capture"}, "few": few, "s": {**hook, "action": "stats", "of": "mean"}}
    with hookrun.hooked(model, hooks) as installed:
        for numbers in ([7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6]):
            installed.samples = torch.tensor(numbers)
            model(INPUT)
        kept = installed.captures["c"]["0"]
        few_kept = installed.captures["few"]["0"]
        records = installed.records
        model(INPUT * 0)
    assert torch.equal(torch.cat(list(kept)), torch.cat([INPUT[holds]] * 2))
    rows = torch.arange(6)[holds]
    assert kept.sample_ids.tolist() == [*(rows + 7).tolist(), *(rows + 1).tolist()]
    assert (few_kept.sample_ids % 2 == 0).all()
    assert len(few_kept.sample_ids)
    assert records[0]["mean"] == pytest.approx(float(INPUT[holds].mean()))
    assert installed.fired["s", "0"] == 3
    assert len(records) == 2


class Root(nn.Module):
    """A module of the user's own with an infinite derivative: NaN for negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, context: Any) -> Tensor:
        context.record("rows", len(x))
        return self.factor * x.sqrt()


def test_an_own_function_gets_those_rows_only() -> None:
    model = net()
    x = INPUT.nan_to_num().abs()
    x[2:4] *= -1
    keys = {
        "hook": "forward",
        "action": "python",
        "function": Root,
        "when": {"value": {"of": "min", "above": 0}},
    }
    with hookrun.hooked(model, {"h": {"select": "0", **keys}}) as hooks:
        output = model(x)
        output.sum().backward()
        model(-x.abs())
        (factor,) = hooks.parameters()
    rows = x.min(1).values > 0
    expected = torch.where(rows[:, None], x.abs().sqrt(), x).requires_grad_()
    assert torch.equal(output, expected.sigmoid())
    (grad,) = torch.autograd.grad(expected.sigmoid().sum(), expected)
    torch.testing.assert_close(factor.grad, (grad * expected)[rows].sum(0).detach())
    assert [record["rows"] for record in hooks.records] == [int(rows.sum())]
    assert hooks.fired["h", "0"] == 2


OWN = {"action": "python", "function": Root}
LATER = {"tokens": {"position": 3, "missing": "skip"}}


@pytest.mark.parametrize(
    "keys",
    [
        {**OWN, "when": {"value": HALF}},
        {**OWN, **LATER},
        {"action": "add_bias", "value": [1.0] * 4, "trainable": True, **LATER},
    ],
    ids=["value", "tokens", "bias"],
)
def test_parameters_of_a_hook_without_rows_have_gradients_of_0(keys: dict[str, Any]) -> None:
    model = nn.Sequential(passing())
    x = torch.full((2, 3, 4), 0.1).requires_grad_()
    with hookrun.hooked(model, {"h": {"select": "0", "hook": "forward", **keys}}) as hooks:
        for given in (torch.ones(2, 4, 4), x):
            hooks.tokens(torch.zeros(given.shape[:2], dtype=torch.int64))
            output = model(given)
        output.sum().backward()
        (trained,) = hooks.parameters()
    assert trained.grad is not None
    assert not trained.grad.any(), "sharded gradients need one on every rank"
    assert torch.equal(output, x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2, 3, 4))


@pytest.mark.parametrize(
    "keys", [{"action": "scale", "factor": 3}, {"action": "project", "direction": [1, 0, 0, 1]}]
)
def test_a_graph_computes_the_same(keys: dict[str, Any]) -> None:
    model = net()
    with hooked(model, {"value": HALF, "step": {"start": 1}}, **keys) as hooks:
        compiled = hooks.compile(backend="eager", fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(INPUT).nan_to_num(7), model(INPUT).nan_to_num(7))
            hooks.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_keeps_its_form(dtype: torch.dtype) -> None:
    x = INPUT.nan_to_num().to(dtype)
    holds = x.abs().to(torch.promote_types(dtype, torch.complex64)).real.norm(dim=1) > 2
    output = run({"value": HALF}, x, action="scale", factor=2)
    assert output.dtype is dtype
    assert torch.equal(output, torch.where(holds[:, None], x * 2, x))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"value": {"of": "norm"}}, "above, below or both"),
        ({"value": {"of": "norm", "above": 2, "below": 2}}, "it never fires"),
        ({"value": {"of": "norm", "above": float("inf")}}, "it never fires"),
        ({"value": {"of": "numel", "above": 2}}, "the same for every sample"),
        ({"value": {"of": "nrm", "above": 2}}, "'nrm'"),
        ({"value": {"of": "norm", "above": float("nan")}}, "found nan"),
        ({"hook": "grad", "select": "0.weight", "action": "scale", "factor": 2}, "when.value: .*'grad' sees"),
        ({"action": "clip_norm", "max_norm": 1}, "clip_norm computes a row from the other rows"),
        ({"action": "skip"}, "skip acts on the whole call"),
        ({"action": "stop_forward"}, "stop_forward acts on the whole call"),
        ({"action": "quantize", "bits": 4}, "quantize computes a row from the other rows"),
        ({"action": "scale", "factor": 2, "index": "0:2"}, "`index` picks samples"),
        ({"action": "scale", "factor": 2, "index": "..., 0, 0"}, "`index` picks samples"),
        ({"select": "", "action": "scale", "factor": 2}, r"has shape \[\]"),
    ],
)
def test_what_cannot_choose_by_sample_is_refused(keys: dict[str, Any], text: str) -> None:
    class Summed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    model = Summed(nn.Linear(4, 4))
    value = keys.pop("value", HALF)
    with pytest.raises((SpecError, CompileError), match=text):
        hooked(model, {"value": value}, **(keys if "action" in keys else {"action": "capture"}))


def test_a_tensor_without_a_row_for_each_sample_is_refused() -> None:
    model = net()
    with hooked(model, {"value": HALF}, action="scale", factor=2) as hooks:
        hooks.samples = torch.arange(3)
        with pytest.raises(HookError, match="each sample of the 3"):
            model(INPUT)
