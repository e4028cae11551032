"""A small language model of transformers with its tokenizer, as a folder, and a bundle of a hook on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from small_tokenizers import tokenizer_folder

import hookrun
import hookrun.bundle


def checkpoint(folder: Path, kind: str = "gpt2") -> str:
    """The folder of a model with random weights, large enough that an edit shows, and of its tokenizer."""
    import transformers

    tokenizer_folder(folder, "words")
    sizes: dict[str, Any] = {"vocab_size": 10, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    if kind == "t5":
        sizes |= {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        config: Any = transformers.AutoConfig.for_model("t5", decoder_start_token_id=0, **sizes)
        kind_of_model: Any = transformers.AutoModelForSeq2SeqLM
    else:
        config = transformers.AutoConfig.for_model("gpt2", n_embd=16, n_layer=2, n_head=2, **sizes)
        kind_of_model = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind_of_model.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return str(folder)


def bundle_of(hook: dict[str, Any], model: str, folder: Path) -> str:
    """The folder of a bundle, made of a run of the model with this hook, `steer`."""
    import transformers

    kind = transformers.AutoConfig.from_pretrained(model).architectures[0]
    sample = {"input_ids": torch.tensor([3, 4, 5])}
    if kind.startswith("T5"):
        sample["labels"] = torch.tensor([4, 5])
    written = json.dumps({"hooks": {"steer": hook}})
    (folder / "experiment").mkdir()
    (folder / "experiment" / "steered.yaml").write_text(f"# @package _global_\n{written}")
    hookrun.run(
        "steered", ["task=predict"], config_dir=folder, run_dir=folder / "run", quiet=True,
        model=getattr(transformers, kind).from_pretrained(model), data=[sample] * 2,
    )  # fmt: skip
    assert hookrun.bundle.main([str(folder / "run"), str(folder / "bundle")]) == 0
    return str(folder / "bundle")
