"""Hooks on positions and attention heads of language models do the same as on the CPU, also in generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from joint_outcomes import assert_equal, tensors_of
from language_models import batch, random_model
from safetensors.torch import save_file
from torch import Tensor

import hookrun

pytest.importorskip("transformers")

WIDTH = 32
PLACES = {
    # model -> a block, its attention's output projection, where the heads are the input
    "gpt2": ("transformer.h.1", "transformer.h.0.attn.c_proj"),
    "llama": ("model.layers.1", "model.layers.0.self_attn.o_proj"),
}
ON_BLOCK: dict[str, dict[str, Any]] = {
    "capture": {"action": "capture", "tokens": "all"},
    "last": {"action": "capture", "tokens": -1},
    "stats": {"action": "stats", "tokens": [0, -1]},
    "bias": {"action": "add_bias", "value": {"file": "direction.safetensors"}, "tokens": -1},
    "project": {"action": "project", "direction": {"file": "direction.safetensors"}, "tokens": "1:"},
    "scale": {"action": "scale", "factor": 0.5, "tokens": [1, 3]},
    "some": {"action": "scale", "factor": 2, "tokens": -2, "when": {"value": {"of": "mean", "above": 0}}},
}
ON_HEADS: dict[str, dict[str, Any]] = {
    "scale": {"action": "scale", "factor": 0.0, "heads": [1, 3]},
    "bias": {"action": "add_bias", "value": 0.5, "heads": 0, "tokens": -1},
    "stats": {"action": "stats", "heads": 2},
    "capture": {"action": "capture", "heads": [0, 2], "tokens": "all"},
}
PHASES: dict[str, dict[str, Any]] = {
    "prompt": {"action": "scale", "factor": 1.5, "tokens": {"phase": "prompt"}},
    "generation": {"action": "scale", "factor": 1.5, "tokens": {"phase": "generation"}},
    "captured": {"action": "capture", "tokens": {"phase": "generation"}},
}


@pytest.fixture(autouse=True)
def _direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))
    save_file({"direction": direction}, "direction.safetensors")


@pytest.mark.parametrize("keys", ON_BLOCK)
@pytest.mark.parametrize("name", PLACES)
def test_a_hook_on_positions_of_a_block(name: str, keys: str, device: torch.device) -> None:
    block, _ = PLACES[name]
    assert_same(name, {"select": block, "hook": "forward", **ON_BLOCK[keys]}, device)


@pytest.mark.parametrize("keys", ON_HEADS)
@pytest.mark.parametrize("name", PLACES)
def test_a_hook_on_heads(name: str, keys: str, device: torch.device) -> None:
    _, projection = PLACES[name]
    assert_same(name, {"select": projection, "hook": "forward_pre", **ON_HEADS[keys]}, device)


@pytest.mark.parametrize("keys", PHASES)
@pytest.mark.parametrize("name", PLACES)
def test_a_generation_with_a_cache(name: str, keys: str, device: torch.device) -> None:
    block, _ = PLACES[name]
    assert_same(name, {"select": block, "hook": "forward", **PHASES[keys]}, device, generates=True)


def seen(name: str, hook: dict[str, Any], device: torch.device | str, *, generates: bool = False) -> Any:
    """The outputs of a forward pass or of a generation under one hook, and what the hook has kept."""
    attention = "sdpa" if name == "llama" else "eager"
    model = random_model(name, attention).to(device)
    inputs = {key: value.to(device) for key, value in batch(name).items()}
    with torch.no_grad(), hookrun.hooked(model, {"h": hook}) as hooks:
        if generates:
            found: dict[str, Tensor] = model.generate(  # type: ignore[operator]
                **inputs,
                max_new_tokens=4,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                output_scores=True,
                return_dict_in_generate=True,
            )
            outputs = {"tokens": found["sequences"].cpu(), "scores": [each.cpu() for each in found["scores"]]}
        else:
            outputs = {"logits": model(**inputs).logits.cpu()}
        kept = {
            module: [tensors_of(each) for each in of] for module, of in hooks.captures.get("h", {}).items()
        }
        return {
            "outputs": outputs,
            "captures": kept,
            "records": list(hooks.records),
            "fired": dict(hooks.fired),
        }


def assert_same(name: str, hook: dict[str, Any], device: torch.device, *, generates: bool = False) -> None:
    found = seen(name, hook, device, generates=generates)
    assert sum(found["fired"].values()) > 0
    assert_equal(found, seen(name, hook, "cpu", generates=generates), tolerance=1e-4)
