"""Small models of transformers with random weights, and the error where one cannot be made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookrun.errors import SpecError
from hookrun.models import build
from hookrun.models.settings import Model

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": None,
}  # fmt: skip


GROUPED = {**SIZES, "num_key_value_heads": 2}


GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": None, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma": {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
    "gemma2": {**GROUPED, "head_dim": 8},  # which bounds its scores
    "bert": SIZES,
    "t5": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": None},
        "decoder_start_token_id": 0,
    },
}


KINDS = {"bert": "masked_lm", "t5": "seq2seq_lm"}


T5 = "t5"


def made(attention: str = "eager", vocab_size: int | None = 40, **args: Any) -> nn.Module:
    return build(
        Model(name="transformers", args={"attention": attention, **args}), sample_shape=None, num_classes=3,
        trust=frozenset(), vocab_size=vocab_size, length=10,
    ).eval()  # fmt: skip


def random_model(name: str, attention: str, **args: Any) -> nn.Module:
    torch.manual_seed(0)
    config = {**ARCHITECTURES[name], "model_type": name}
    asked: dict[str, Any] = {"class": KINDS.get(name, "causal_lm"), **args}
    model = made(attention, config=config, **asked)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # large enough that a mistake shows
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data.add_(noise.to(parameter.dtype))
    return model


def batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    mask = torch.ones(3, 10, dtype=torch.int64)
    mask[1, 6:] = 0
    mask[2, :3] = 0
    inputs = {"input_ids": torch.randint(40, (3, 10), generator=generator), "attention_mask": mask}
    return inputs | ({"labels": torch.randint(40, (3, 5), generator=generator)} if name == T5 else {})


def problem(**args: Any) -> str:
    with pytest.raises(SpecError) as error:
        made(**args)
    return str(error.value)
