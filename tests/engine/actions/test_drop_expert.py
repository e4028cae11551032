"""`drop_expert`: a token's weights of some experts become 0."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from mixtures import Mixture, drop_by_hand, random_mixture, tokens
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun

Spec = dict[str, dict[str, Any]]


def dropping(*experts: int, **keys: Any) -> Spec:
    hook = {"select": "**.experts", "hook": "forward_pre", "action": "drop_expert", "experts": list(experts)}
    return {"drop": {**hook, **keys}}


def small() -> tuple[Mixture, Tensor]:
    torch.manual_seed(3)
    return Mixture(), torch.randn(2, 3, 4)


def plan_of(model: nn.Module, spec: Spec, x: Tensor) -> str:
    return str(hookrun.compile(spec, model, example=((x,), {})))


def mistake(model: nn.Module, spec: Spec, x: Tensor) -> str:
    with pytest.raises(hookrun.HookrunError) as error:
        plan_of(model, spec, x)
    return re.sub(r"\s+", " ", str(error.value))


@pytest.mark.parametrize(
    ("name", "renormalize"),
    [("mixtral", True), ("mixtral", False), ("qwen2_moe", False), ("deepseek_v3", True)],
)
def test_it_equals_a_block_written_by_hand(name: str, *, renormalize: bool) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = random_mixture(name)
    inputs = tokens()
    plain = model(**inputs).logits
    spec = dropping(1, 3, renormalize=renormalize)
    plan = hookrun.compile(spec, model, example=((), inputs))
    assert re.search(r"takes indices at \[1\], weights of \d experts at \[2\]", str(plan))
    with plan.install(model):
        dropped = model(**inputs).logits
    drop_by_hand(model, {1, 3}, renormalize=renormalize)
    assert_close(dropped, model(**inputs).logits)
    assert not torch.allclose(dropped, plain, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_weights_keep_their_sum_unless_none_is_left(dtype: torch.dtype) -> None:
    weights = torch.tensor([[0.5, 0.25], [0.5, 0.25], [0.5, 0.25], [0.3, 0.1]], dtype=dtype)
    indices = torch.tensor([[1, 0], [0, 2], [1, 3], [0, 2]])
    model = nn.Sequential(Passing())
    with hookrun.hooked(model, dropping(1, 3, select="0")):
        _, seen = model[0](indices, weights)
    expected = torch.tensor([[0, 0.75], [0.5, 0.25], [0, 0], [0.3, 0.1]], dtype=dtype)
    assert torch.equal(seen, expected)
    assert seen.dtype == dtype


class Passing(nn.Module):
    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return args


def test_gradients_are_those_of_the_same_formula() -> None:
    model, x = small()
    with hookrun.hooked(model, dropping(0, 2)):
        model(x).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    _, shares, chosen = model.router(x)
    kept = shares * ((chosen != 0) & (chosen != 2))
    left = kept.sum(-1, keepdim=True)
    kept = torch.where(left > 0, kept * shares.sum(-1, keepdim=True) / left.clamp(min=1e-9), kept)
    model.experts(x, chosen=chosen, shares=kept).square().sum().backward()
    for new, parameter in zip(found, model.parameters(), strict=True):
        assert_close(new, parameter.grad)


def test_arguments_by_name_are_told_and_shown() -> None:
    model, x = small()
    shown = plan_of(model, dropping(0), x)
    assert "drop: takes indices at chosen, weights of 5 experts at shares, on experts" in shown


def test_it_can_act_on_the_output_of_a_router() -> None:
    model, x = small()
    with hookrun.hooked(model, dropping(1, 4)):
        expected = model(x)
    with hookrun.hooked(model, dropping(1, 4, select="router", hook="forward")):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("keys", [{"index": "1"}, {"index": "1, :, 0:1"}], ids=str)
def test_an_index_limits_it_to_a_part_of_the_weights(keys: dict[str, Any]) -> None:
    model, x = small()
    captures = {"seen": {"select": "experts", "hook": "forward_pre", "action": "capture", "target": "shares"}}
    with hookrun.hooked(model, captures) as plain:
        model(x)
    (before,) = plain.captures["seen"]["experts"]
    with hookrun.hooked(model, dropping(0, 1, 2) | captures) as hooks:
        model(x)
    (whole,) = hooks.captures["seen"]["experts"]
    with hookrun.hooked(model, dropping(0, 1, 2, **keys) | captures) as hooks:
        model(x)
    (part,) = hooks.captures["seen"]["experts"]
    expected = before.clone()
    place = (1, slice(None), slice(0, 1)) if "0:1" in keys["index"] else (1,)
    expected[place] = whole[place]
    assert torch.equal(part, expected)
    assert not torch.equal(part, whole)


def test_the_last_token_alone_can_be_dropped() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), Mixture())
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    plain = model(ids)
    with hookrun.hooked(model, dropping(0, 1, 2)):
        everywhere = model(ids)
    with hookrun.hooked(model, dropping(0, 1, 2, tokens=-1)) as hooks:
        hooks.tokens(ids)
        last = model(ids)
    assert_close(last[:, :-1], plain[:, :-1])
    assert_close(last[:, -1], everywhere[:, -1])


def test_the_changed_weights_are_counted() -> None:
    model, x = small()
    with hookrun.compile(dropping(1, renormalize=False), model).install(model, effects=True) as hooks:
        model(x)
    _, shares, chosen = model.router(x)
    (site,) = hooks.sites
    assert (int(site.changed), site.total) == (int((chosen == 1).sum()), shares.numel())


def test_one_graph_holds_it_with_its_schedule() -> None:
    model, x = small()
    spec = dropping(0, 1, when={"step": {"start": 1}})
    with hookrun.hooked(model, spec) as hooks:
        expected = [model(x), hooks.step(), model(x)]
    with hookrun.hooked(model, spec) as hooks:
        compiled = hooks.compile(backend="eager", fullgraph=True)
        found = [compiled(x), hooks.step(), compiled(x)]
    assert_close(found[0], expected[0])
    assert_close(found[2], expected[2])
    assert not torch.allclose(found[0], found[2])


def test_an_expert_that_does_not_exist_is_refused() -> None:
    model, x = small()
    text = mistake(model, dropping(2, 5), x)
    assert "drop_expert on experts: there is no expert 5: it has 5, numbered from 0" in text


def test_a_list_of_modules_tells_how_many_experts_there_are() -> None:
    model = nn.Sequential(Passing())
    model[0].experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(hookrun.CompileError, match="there is no expert 3: it has 3"):
        hookrun.compile(dropping(3, select="0"), model)


def test_a_mask_of_the_chosen_experts_is_refused() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.experts((x > 0).long(), x)[1]

    model = Masked()
    model.experts = Passing()
    model.experts.num_experts = 4
    x = torch.rand(3, 4)
    assert "k less than the number of experts" in mistake(model, dropping(1), x)
    assert "takes indices at [0], weights of 4 experts at [1]" in plan_of(
        model, dropping(1, indices="[0]"), x
    )


def test_a_module_without_indices_is_refused() -> None:
    model, x = small()
    text = mistake(model, dropping(1, select=""), x)
    assert "does not have the indices of the chosen experts with their weights" in text
    assert "name them with `indices` and `weights`" in text
    assert "action: scale, factor: 0" in text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"indices": "shares"}, "indices: 'shares' is float32 [2, 3, 2]: expected whole numbers [tokens, k]"),
        ({"weights": "[0]"}, "weights: '[0]' is float32 [2, 3, 4]: expected whole"),
        (
            {"indices": "shares", "weights": "chosen"},
            "indices: 'shares' is float32 [2, 3, 2] and weights: 'chosen' is int64 [2, 3, 2]: expected whole",
        ),
    ],
)
def test_a_tensor_that_is_named_wrongly_is_refused(keys: dict[str, Any], said: str) -> None:
    model, x = small()
    assert said in mistake(model, dropping(0, **keys), x)


def test_more_chosen_experts_than_there_are_are_refused() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.experts((x > 0).long(), x)[1]

    model = Masked()
    model.experts = Passing()
    for count, is_refused in ((4, False), (3, True)):
        model.experts.num_experts = count
        spec = dropping(1, indices="[0]")
        text = (
            mistake(model, spec, torch.rand(3, 4)) if is_refused else plan_of(model, spec, torch.rand(3, 4))
        )
        assert ("k at most the number of experts" in text) == is_refused


def test_several_possible_tensors_must_be_named() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            numbers = torch.arange(x.numel()).view(x.shape)
            return self.experts(numbers, x, x + 1)[1]

    model = Twice()
    model.experts = Passing()
    x = torch.rand(3, 2)
    text = mistake(model, dropping(1), x)
    assert "say indices: '[0]', weights: '[1]' or indices: '[0]', weights: '[2]'" in text
    assert "takes indices at [0], weights of an unknown number of experts at [2]" in plan_of(
        model, dropping(1, weights="[2]"), x
    )
    assert "'[7]' is not in the tuple" in mistake(model, dropping(1, weights="[7]"), x)


class Gate(nn.Module):
    """A router that says by its scores alone how many experts there are."""

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, indices = scores.softmax(-1).topk(2)
        return scores, weights, indices


def test_scores_of_a_router_tell_the_number_of_experts() -> None:
    model = nn.Sequential(Gate())
    router = {"select": "0", "hook": "forward"}
    assert "weights of 4 experts" in plan_of(model, dropping(3, **router), torch.randn(5, 4))
    assert "there is no expert 4: it has 4" in mistake(model, dropping(4, **router), torch.randn(5, 4))
