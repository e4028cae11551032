"""model=decoder with `path`: the weights of a GPT-2 saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from decoders import made, problem, scrambled
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hookrun.models import origin
from hookrun.spec.experiment import Model


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


def test_a_folder_of_gpt2_gives_transformers_results_alone_and_padded(gpt2: tuple[nn.Module, Path]) -> None:
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


def test_an_incomplete_or_wrong_folder_is_refused_with_the_reason(
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
    assert "of other shapes" in changed(n_embd=2**20, n_head=2)  # no memory is allocated for it
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
