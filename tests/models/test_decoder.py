"""model=decoder: the modules that one may hook, padding on either side, and the weights of a GPT-2."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hookrun
from hookrun.errors import SpecError
from hookrun.models import build, origin
from hookrun.spec.experiment import Model

OF_A_BLOCK = [
    "ln1",
    "attn",
    *(f"attn.{name}" for name in ("q", "k", "v", "scores", "pattern", "z", "heads", "out")),
    *("resid_mid", "ln2", "mlp", "mlp.pre", "mlp.act", "mlp.out", "resid_post"),
]


def made(vocab_size: int | None = 20, length: int | None = 12, **args: Any) -> nn.Module:
    model = build(
        Model(name="decoder", args=args),
        sample_shape=None,
        num_classes=None,
        trust=frozenset(),
        vocab_size=vocab_size,
        length=length,
    )
    return model.eval()


def problem(**args: Any) -> str:
    with pytest.raises(SpecError) as error:
        made(**args)
    return str(error.value)


def scrambled(model: nn.Module) -> nn.Module:
    """Weights large enough that a mistake shows."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model


def test_every_place_is_a_module_in_the_order_in_which_it_runs() -> None:
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
def test_a_prompt_in_a_padded_batch_gives_what_it_gives_alone(positions: str, mlp: bool) -> None:
    model = scrambled(made(positions=positions, mlp=mlp))
    ids = torch.randint(20, (3, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 10, dtype=torch.int64)
    mask[1, 6:], mask[2, :4] = 0, 0
    batch = model(ids, attention_mask=mask)
    for row, part in enumerate((slice(0, 10), slice(0, 6), slice(4, 10))):
        torch.testing.assert_close(batch[row, part], model(ids[row : row + 1, part])[0], atol=1e-5, rtol=1e-5)
    assert batch.isfinite().all()
    later = ids.clone()
    later[:, 7:] = 0
    torch.testing.assert_close(model(later)[:, :7], model(ids)[:, :7])  # nothing looks ahead
    moved = model(ids, position_ids=torch.arange(10)[None] + 2)
    same = torch.allclose(moved, model(ids), atol=1e-4)
    assert same is (positions == "rotary")  # which knows distances only


def test_what_the_modules_show_is_what_the_model_computes_with() -> None:
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
    q, k, v = seen["q"], seen["k"], seen["v"]
    assert q.shape == (1, 8, 4, 16) and seen["heads"].shape == (1, 8, 4, 64)
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


def test_sizes_come_from_the_data_or_are_asked_for_and_what_cannot_be_is_refused() -> None:
    assert "the data set's samples are not of tokens" in problem(vocab_size=None, length=None)
    assert "width 10 is not a multiple of heads 4" in problem(width=10)
    assert "even width of each head" in problem(width=12, positions="rotary")
    assert "GiB of memory are free" in problem(width=2**20, layers=256)
    assert "did you mean 'layers'" in problem(layer=3)
    with pytest.raises(ValueError, match="13 tokens, and the decoder has 12 positions"):
        made()(torch.zeros(1, 13, dtype=torch.int64))
    copy.deepcopy(made())


@pytest.fixture
def gpt2(tmp_path: Path) -> tuple[nn.Module, Path]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=4,
        layer_norm_epsilon=1e-3,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = scrambled(transformers.GPT2LMHeadModel(config).eval())
    model.save_pretrained(tmp_path / "gpt2")
    return model, tmp_path / "gpt2"


def test_a_folder_of_gpt2_gives_its_numbers_alone_and_padded(gpt2: tuple[nn.Module, Path]) -> None:
    theirs, folder = gpt2
    ours = made(path=str(folder))
    ids = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[1, 6:], mask[2, :4] = 0, 0

    def logits(**mask: Tensor) -> Tensor:
        return theirs(ids, **mask).logits

    torch.testing.assert_close(ours(ids), logits(), atol=1e-5, rtol=1e-5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = logits(attention_mask=mask, position_ids=positions)
    found = ours(ids, attention_mask=mask)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)
    assert origin(Model(name="decoder", args={"path": str(folder)})) == str(folder.resolve())
    assert "which" in problem(path=str(folder), width=32) and "decides" in problem(path=str(folder), width=32)


def test_a_folder_that_is_not_a_whole_gpt2_is_refused_with_what_is_wrong(
    gpt2: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    folder = gpt2[1]
    assert "there is no folder" in problem(path=str(tmp_path / "nothing"))
    config = json.loads((folder / "config.json").read_text())

    def changed(**keys: object) -> str:
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        return problem(path=str(folder))

    assert "a model of type 'llama'" in changed(model_type="llama")
    assert "activation_function: 'swish'" in changed(activation_function="swish")
    assert "of other shapes" in changed(n_inner=7)
    assert "of other shapes" in changed(n_embd=2**20, n_head=2)  # no memory is taken for it
    assert "layers: found 1000000000" in changed(n_layer=10**9)
    assert "layer_norm_epsilon" in changed(layer_norm_epsilon="tiny")
    (folder / "config.json").write_text("[" * 100_000)
    assert "cannot be read" in problem(path=str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("transformer.h.1.mlp.c_fc.bias")
    save_file(tensors, folder / "model.safetensors")
    assert "has no tensor 'h.1.mlp.c_fc.bias'" in problem(path=str(folder))
    (folder / "model.safetensors").write_bytes(b"not tensors")
    assert "cannot be read as safetensors" in problem(path=str(folder))
