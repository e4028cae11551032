"""A small language model of transformers with its tokenizer, as a folder that from_pretrained reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_tokenizers import tokenizer_folder


def checkpoint(folder: Path, kind: str = "gpt2") -> str:
    """The folder of a model with random weights, large enough that an edit shows, and of its tokenizer."""
    import transformers

    tokenizer_folder(folder, "words")
    sizes: dict[str, Any] = {"vocab_size": 10, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    if kind == "t5":
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, **sizes
        )
        made: type = transformers.T5ForConditionalGeneration
    else:
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **sizes)
        made = transformers.GPT2LMHeadModel
    torch.manual_seed(0)
    model = made(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return str(folder)
