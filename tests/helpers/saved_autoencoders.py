"""Folders of sparse autoencoders as SAELens writes them, and its formulas by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WIDTH, COUNT, KEPT = 6, 16, 5
CONFIG: Mapping[str, Any] = {
    "d_in": WIDTH,
    "d_sae": COUNT,
    "dtype": "float32",
    "device": "cpu",
    "apply_b_dec_to_input": True,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {"sae_lens_version": "6.0.0", "hook_name": "blocks.1.hook_resid_post"},
    "architecture": "standard",
}
"""cfg.json of version 6."""

BIASES = {
    "standard": ["b_enc"],
    "topk": ["b_enc"],
    "jumprelu": ["b_enc", "threshold"],
    "gated": ["b_gate", "b_mag", "r_mag"],
}


def tensors_of(architecture: str = "standard", seed: int = 0) -> dict[str, Tensor]:
    """Random weights."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"W_enc": (WIDTH, COUNT), "W_dec": (COUNT, WIDTH), "b_dec": (WIDTH,)}
    shapes |= {name: (COUNT,) for name in BIASES[architecture]}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def saved(folder: Path, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
    """Write a folder. config: keys of cfg.json that differ; None takes one away."""
    folder.mkdir(exist_ok=True)
    content = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    tensors = tensors_of(content.get("architecture", "standard")) if tensors is None else tensors
    save_file(dict(tensors), folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(content))
    return folder


def encoded(x: Tensor, w: Mapping[str, Tensor], architecture: str = "standard") -> Tensor:
    """The features of vectors from which b_dec was subtracted."""
    before = x @ w["W_enc"]
    if architecture == "gated":
        magnitudes = torch.relu(x @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"])
        return (before + w["b_gate"] > 0) * magnitudes
    before = before + w["b_enc"]
    if architecture == "jumprelu":
        return torch.relu(before) * (before > w["threshold"])
    if architecture == "topk":
        least = before.sort(-1, descending=True).values[..., KEPT - 1 : KEPT]
        return torch.relu(before) * (before >= least)
    return torch.relu(before)


def features_of(x: Tensor, w: Mapping[str, Tensor], architecture: str = "standard") -> Tensor:
    """The features under `apply_b_dec_to_input: true`."""
    return encoded(x - w["b_dec"], w, architecture)


def decoded(features: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """The reconstruction."""
    return features @ w["W_dec"] + w["b_dec"]
