"""model=decoder: a module at every point to hook, and padding on either side."""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import made, problem, scrambled

import hookrun

OF_A_BLOCK = [
    "ln1",
    "attn",
    *(f"attn.{name}" for name in ("q", "k", "v", "scores", "pattern", "z", "heads", "out")),
    *("resid_mid", "ln2", "mlp", "mlp.pre", "mlp.act", "mlp.out", "resid_post"),
]


def test_every_point_is_a_module_in_the_order_of_computation() -> None:
    names = [name for name, _ in made(layers=1).named_modules()]
    assert names == [
        *("", "embed", "pos_embed", "blocks", "blocks.0"),
        *(f"blocks.0.{name}" for name in OF_A_BLOCK),
        *("ln_final", "unembed"),
    ]
    attention_only = {name for name, _ in made(layers=1, mlp=False, positions="rotary").named_modules()}
    gone = {"pos_embed", *(f"blocks.0.{name}" for name in OF_A_BLOCK if "mlp" in name or "mid" in name)}
    assert attention_only == set(names) - gone - {"blocks.0.ln2"}


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("mlp", [True, False])
def test_padding_does_not_change_the_results_of_a_prompt(positions: str, mlp: bool) -> None:
    model = scrambled(made(positions=positions, mlp=mlp))
    ids = torch.randint(20, (3, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 10, dtype=torch.int64)
    mask[1, 6:] = 0
    mask[2, :4] = 0
    batch = model(ids, attention_mask=mask)
    for row, part in enumerate((slice(0, 10), slice(0, 6), slice(4, 10))):
        torch.testing.assert_close(batch[row, part], model(ids[row : row + 1, part])[0], atol=1e-5, rtol=1e-5)
    assert batch.isfinite().all()
    later = ids.clone()
    later[:, 7:] = 0
    torch.testing.assert_close(model(later)[:, :7], model(ids)[:, :7])  # no token attends to a later one
    moved = model(ids, position_ids=torch.arange(10)[None] + 2)
    same = torch.allclose(moved, model(ids), atol=1e-4)
    assert same is (positions == "rotary")  # which depends on distances only


def test_the_modules_outputs_are_the_values_that_the_model_uses() -> None:
    model = scrambled(made(layers=1))
    paths = ("q", "k", "v", "scores", "pattern", "z", "heads", "out")
    hooks = {
        name: {"select": f"blocks.0.attn.{name}", "hook": "forward", "action": "capture"} for name in paths
    }
    hooks["ln1"] = {"select": "blocks.0.ln1", "hook": "forward", "action": "capture"}
    hooks["mid"] = {"select": "blocks.0.resid_mid", "hook": "forward_pre", "action": "capture"}
    with hookrun.hooked(model, hooks) as installed, torch.no_grad():
        model(torch.arange(8)[None])
        seen = {name: next(iter(each.values()))[0] for name, each in installed.captures.items()}
    q = seen["q"]
    k = seen["k"]
    v = seen["v"]
    assert q.shape == (1, 8, 4, 16)
    assert seen["heads"].shape == (1, 8, 4, 64)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    torch.testing.assert_close(seen["scores"], scores.masked_fill(future, torch.finfo(torch.float32).min))
    torch.testing.assert_close(seen["pattern"], seen["scores"].softmax(-1))
    z = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(seen["z"], z.transpose(1, 2))
    attn = model.get_submodule("blocks.0.attn")
    torch.testing.assert_close(
        seen["out"], seen["z"].flatten(2) @ attn.heads.weight.flatten(0, 1) + attn.out.bias
    )
    torch.testing.assert_close(seen["heads"].sum(2) + attn.out.bias, seen["out"])


def test_impossible_sizes_are_refused() -> None:
    assert "the data set's samples are not of tokens" in problem(vocab_size=None, length=None)
    assert "width 10 is not a multiple of heads 4" in problem(width=10)
    assert "even width of each head" in problem(width=12, positions="rotary")
    assert "GiB of memory are free" in problem(width=2**20, layers=1)
    assert "did you mean 'layers'" in problem(layer=3)
    with pytest.raises(ValueError, match="13 tokens, and the decoder has 12 positions"):
        made()(torch.zeros(1, 13, dtype=torch.int64))
    copy.deepcopy(made())


def test_a_folder_of_gpt2_is_refused_with_its_reader() -> None:
    assert "model.args.path" in problem(path="gpt2")
    assert "model=transformers" in problem(path="gpt2")
    assert made(path=None, width=None, layers=None).config.hidden_size == 64
