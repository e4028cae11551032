"""Blocks, norm, unembedding and projections are found, or what is not found is told; a norm with a fixed scale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import normal
from observed_decoders import decoder
from torch import Tensor, nn

from hookrun.engine.spec.selector import parse_selector
from hookrun.engine.values.tensors import computable
from hookrun.errors import CompileError, HookrunError
from hookrun.studies.lens.contributions import frozen, rounding
from hookrun.studies.lens.places import HeadsPlace, Places, find_places


def found(model: nn.Module, *, by_head: bool = False, **given: Any) -> Places:
    usual = dict.fromkeys(("residual", "final_norm", "unembed", "heads"))
    return find_places(model, **{**usual, **given}, by_head=by_head)


def refused(model: nn.Module, **given: Any) -> dict[str, str]:
    """Key path -> what is wrong there."""
    with pytest.raises(CompileError) as error:
        found(model, **given)
    return {each.where: f"{each.what}; {each.hint}" for each in error.value.errors}


class Plain(nn.Module):
    """A decoder without a config, whose blocks hold what is given."""

    def __init__(self, count: int = 2, name: str = "layers", **children: nn.Module) -> None:
        super().__init__()
        body = nn.Module()
        blocks = [nn.ModuleDict({"attn": nn.ModuleDict(children)}) for _ in range(count)]
        body.add_module(name, nn.ModuleList(blocks))
        body.norm = nn.LayerNorm(4)
        self.model, self.lm_head = body, nn.Linear(4, 9, bias=False)


def test_known_decoders_need_no_places() -> None:
    ours = found(decoder(), by_head=True)
    assert ours.blocks == ("blocks.0", "blocks.1")
    assert ours.final_norm == "ln_final"
    assert ours.unembed == "unembed"
    heads = HeadsPlace("blocks.0.attn.heads", "blocks.0.attn.out", "blocks.0.attn.out.bias", 2)
    assert ours.heads[0] == heads
    assert heads.by_output
    assert found(decoder()).heads == ()
    for bias in (True, False):
        theirs = Plain(o_proj=nn.Linear(8, 4, bias=bias))
        theirs.config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4)  # type: ignore[assignment]
        places = found(theirs, by_head=True)
        path = "model.layers.1.attn.o_proj"
        assert places.blocks == ("model.layers.0", "model.layers.1")
        assert places.final_norm == "model.norm"
        assert places.unembed == "lm_head"
        assert not places.heads[1].by_output
        assert places.heads[1] == HeadsPlace(path, path, f"{path}.bias" if bias else "", 4)


def test_names_that_are_given_go_before_those_that_are_usual() -> None:
    places = found(
        decoder(layers=3), residual=parse_selector("blocks[1:]"), final_norm="blocks.0.ln1",
        unembed="blocks.0.mlp.pre", heads=parse_selector("**.attn.heads"), by_head=True,
    )  # fmt: skip
    assert places.blocks == ("blocks.1", "blocks.2")
    assert places.final_norm == "blocks.0.ln1"
    assert places.unembed == "blocks.0.mlp.pre"
    assert len(places.heads) == 2
    inner = Plain(layers=nn.ModuleList([nn.Identity()]))
    assert found(inner).blocks == ("model.layers.0", "model.layers.1"), "a list in a block is none of blocks"
    assert found(Plain(name="h")).blocks == ("model.h.0", "model.h.1")


def test_all_that_is_not_found_is_told_at_once() -> None:
    said = refused(decoder(), residual=parse_selector("blocs[:]"), final_norm="ln_finl", unembed="ln_final")
    assert set(said) == {"task.residual", "task.final_norm", "task.unembed"}
    assert "'blocs[:]' matches no module" in said["task.residual"]
    assert "no module 'ln_finl'" in said["task.final_norm"]
    assert "ln_final" in said["task.final_norm"]
    assert "no weight [vocabulary, width]" in said["task.unembed"]
    nothing = refused(nn.Sequential(nn.Linear(2, 2)))
    assert "looked for a list called blocks" in nothing["task.residual"]
    assert "no output embedding" in nothing["task.unembed"]
    without = Plain()
    del without.model.norm
    assert "no final norm beside its blocks in model" in refused(without)["task.final_norm"]


def test_two_lists_that_could_be_the_blocks_are_refused() -> None:
    two = Plain()
    two.model.add_module("h", nn.ModuleList([nn.Identity()]))
    assert "found model.layers, model.h" in refused(two)["task.residual"]
    two.config = SimpleNamespace(n_layer=1)  # type: ignore[assignment]
    assert found(two).blocks == ("model.h.0",)
    two.config = SimpleNamespace(is_encoder_decoder=True)  # type: ignore[assignment]
    assert "is an encoder-decoder" in refused(two)["task.name"]


def test_a_wrong_projection_is_told_for_its_block() -> None:
    wrong = refused(decoder(), heads=parse_selector("**.mlp.out"), by_head=True)["task.heads"]
    assert "mlp.out does not take the heads of an attention" in wrong
    first = refused(decoder(), heads=parse_selector("blocks.0.attn.heads"), by_head=True)["task.heads"]
    assert first.startswith("blocks.1: looked for one match, found none")
    assert "found none" in refused(Plain(), by_head=True)["task.heads"]
    narrow = Plain(o_proj=nn.Linear(6, 4))
    narrow.config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4)  # type: ignore[assignment]
    assert "o_proj does not take the heads" in refused(narrow, by_head=True)["task.heads"]
    both = Plain(o_proj=nn.Linear(4, 4), dense=nn.Linear(4, 4))
    assert (
        "model.layers.1.attn.o_proj, model.layers.1.attn.dense" in refused(both, by_head=True)["task.heads"]
    )


X = normal(4, 8) * 3 + 1


class Gemma(nn.Module):
    """An RMSNorm that multiplies by 1 + weight, with its epsilon under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.variance_epsilon, self.weight = 0.1, nn.Parameter(normal(8))

    def forward(self, x: Tensor) -> Tensor:
        spread = (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return x * spread * (1 + self.weight)


def drawn(module: nn.Module) -> nn.Module:
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed)
    return module


NORMS = [nn.LayerNorm(8), nn.LayerNorm(8, eps=0.5), nn.LayerNorm(8, bias=False), nn.RMSNorm(8), Gemma()]
NORMS += [nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8, eps=0.2)]


@torch.no_grad()
@pytest.mark.parametrize("module", NORMS)
def test_a_frozen_norm_is_linear(module: nn.Module) -> None:
    found = frozen("ln", drawn(module), X, module(X))
    bias = 0 if found.bias is None else found.bias
    parts = [normal(4, 8, seed=5), normal(4, 8, seed=6)]
    parts.append(X - parts[0] - parts[1])
    torch.testing.assert_close(sum(map(found, parts)) + bias, module(X))
    torch.testing.assert_close(found(2 * parts[0]), 2 * found(parts[0]))
    assert found.scale.shape == (4, 1)


@torch.no_grad()
def test_low_precision_is_computed_in_float32() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        module = drawn(nn.LayerNorm(8)).to(dtype)
        found = frozen("ln", module, X.to(dtype), module(X.to(dtype)))
        assert found.scale.dtype is computable(X.to(dtype)).dtype is expected
    one = rounding(torch.float32, torch.ones(2, 3))
    two = rounding(torch.float64, torch.ones(2, 3))
    half = rounding(torch.bfloat16, torch.ones(2, 3))
    assert one.shape == (2, 1)
    assert torch.equal(one, two)
    assert (half > one).all()


@torch.no_grad()
def test_what_computes_something_else_is_refused() -> None:
    for module in (
        nn.Linear(8, 8), nn.Identity(), nn.Sequential(nn.LayerNorm(8), nn.Tanh()), nn.Linear(8, 3),
    ):  # fmt: skip
        with pytest.raises(HookrunError, match=r"ln \(\w+\) computes neither LayerNorm nor RMSNorm"):
            frozen("ln", module, X, module(X))
    bad = X.clone()
    bad[2, 0] = torch.nan
    with pytest.raises(HookrunError, match=r"ln \(LayerNorm\) returned 8 NaN of 32 elements"):
        frozen("ln", nn.LayerNorm(8), bad, nn.LayerNorm(8)(bad))
