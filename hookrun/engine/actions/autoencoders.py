"""The sparse autoencoders of SAELens: what their cfg.json says, which tensors they have, and their formulas."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hookrun.engine.trust.callables import tensor_digest
from hookrun.errors import shortened

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "cfg.json"
WEIGHTS = "sae_weights.safetensors"
"""The files of a folder."""

BIASES: Mapping[str, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
"""Architecture -> the names of its tensors [d_sae]."""

_FACTORS = frozenset({"scaling_factor", "finetuning_scaling_factor"})
"""Tensors of earlier versions, which wrote them also where nothing was scaled."""

_ELSEWHERE = ("expected_average_only_in", "covariance_whitening")
"""Normalisations by numbers that are not in the folder."""

_RENAMED = {"activation_fn_str": "activation_fn", "hook_point": "hook_name"}

_EPSILON = 1e-5

Size = Annotated[int, Field(ge=1, le=10**8)]


class AutoencoderConfig(BaseModel):
    """The keys of cfg.json on which the formulas depend, in the words of every version of SAELens; others are ignored.

    d_in, d_sae: how many elements a vector has, and how many features
    k:           of topk: how many features of a vector are kept
    rescale_acts_by_decoder_norm: of topk: features are compared as if each row of W_dec had norm 1
    hook_name:   where it was trained, in TransformerLens's names
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    architecture: Literal["standard", "topk", "jumprelu", "gated"] = "standard"
    d_in: Size
    d_sae: Size
    dtype: Literal["float64", "float32", "float16", "bfloat16"] = "float32"
    apply_b_dec_to_input: bool = True
    normalize_activations: Literal["none", "constant_norm_rescale", "layer_norm"] = "none"
    reshape_activations: Literal["none", "hook_z"] = "none"
    activation_fn: Literal["relu", "topk"] = "relu"
    k: Size = 0
    rescale_acts_by_decoder_norm: bool = False
    hook_name: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The keys as version 6 writes them, with what stands in other sections."""
        new = {_RENAMED.get(key, key): value for key, value in raw.items()}
        for section in ("metadata", "activation_fn_kwargs"):
            inside = new.get(section)
            if isinstance(inside, dict):
                new = inside | new
        name = new["hook_name"] = str(new.get("hook_name") or "")
        new.setdefault("reshape_activations", "hook_z" if "hook_z" in name else "none")
        new["dtype"] = str(new.get("dtype", "float32")).removeprefix("torch.")
        if new.get("activation_fn") == "topk":
            new["architecture"] = "topk"
        kind = new.get("normalize_activations")
        if kind is None or isinstance(kind, bool):  # true, false and null of earlier versions
            kind = new["normalize_activations"] = "expected_average_only_in" if kind else "none"
        if kind in _ELSEWHERE:
            raise ValueError(
                f"normalize_activations is {kind}, by numbers that the folder does not hold: fold them into the "
                "weights in SAELens (sae.fold_activation_norm_scaling_factor, sae.fold_activation_whitening), and "
                "save it again"
            )
        return new

    @model_validator(mode="after")
    def _keeps_some(self) -> AutoencoderConfig:
        if self.architecture == "topk" and not 1 <= self.k <= self.d_sae:
            raise ValueError(f"k is {self.k}, expected how many of the {self.d_sae} features topk keeps")
        return self


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """A sparse autoencoder.

    tensors: those of its architecture by name, in the dtype in which it computes
    digest:  a hash of its configuration and its tensors
    """

    config: AutoencoderConfig
    tensors: Mapping[str, Tensor]
    digest: str

    @classmethod
    def of(cls, config: AutoencoderConfig, tensors: Mapping[str, Tensor]) -> Autoencoder:
        """Of the tensors of a file. ValueError if they do not fit the configuration, or are not finite."""
        import torch

        given = dict(tensors)
        for name in given.keys() & _FACTORS:
            if bool((given[name] == 1).all()):
                del given[name]
        width, count = config.d_in, config.d_sae
        shapes = {"W_enc": [width, count], "W_dec": [count, width], "b_dec": [width]}
        shapes |= {name: [count] for name in BIASES[config.architecture]}
        found = {name: list(tensor.shape) for name, tensor in given.items()}
        if found != shapes:
            raise ValueError(
                f"found {shortened(str(found), 500)}; with d_in {width} and d_sae {count} the architecture "
                f"{config.architecture} has {shapes}"
            )
        for name, tensor in sorted(given.items()):
            given[name] = tensor.to(getattr(torch, config.dtype))
            if not tensor.is_floating_point() or not bool(given[name].isfinite().all()):
                raise ValueError(
                    f"{name}, of {tensor.dtype}, must hold finite floating-point numbers, also in {config.dtype}"
                )
        digests = [tensor_digest(given[name]) for name in sorted(given)]
        content = json.dumps([config.model_dump(), digests])
        return cls(config, given, hashlib.sha256(content.encode()).hexdigest())

    def encode(self, x: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The features [..., d_sae] of vectors [..., d_in], and a function from features to a tensor like x.

        weights: its tensors on the device of x
        """
        flat = self._vectors(x)
        normal, undo = self._normalised(flat)
        if self.config.apply_b_dec_to_input:
            normal = normal - weights["b_dec"]
        features = self._activated(normal, weights)

        def decode(features: Tensor) -> Tensor:
            if self.config.rescale_acts_by_decoder_norm:
                features = features * (1 / weights["W_dec"].norm(dim=-1))
            return undo(features @ weights["W_dec"] + weights["b_dec"]).reshape(x.shape)

        return features, decode

    def _vectors(self, x: Tensor) -> Tensor:
        """x as [..., d_in]: of an autoencoder of heads, x may also be [..., heads, width]."""
        width = self.config.d_in
        if x.shape[-1:] == (width,):
            return x
        if self.config.reshape_activations == "hook_z" and x.shape[-2:].numel() == width and x.dim() > 1:
            return x.flatten(-2)
        raise ValueError(
            f"the tensor has shape {list(x.shape)}, and the autoencoder takes vectors of d_in = {width} elements in "
            f"the last dimension; it was trained at {shortened(self.config.hook_name) or 'an unknown place'}"
        )

    def _normalised(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """x as the encoder takes it, and the inverse for what the decoder makes."""
        match self.config.normalize_activations:
            case "constant_norm_rescale":
                factor = self.config.d_in**0.5 / x.norm(dim=-1, keepdim=True)
                return x * factor, lambda decoded: decoded / factor
            case "layer_norm":
                mean = x.mean(dim=-1, keepdim=True)
                centred = x - mean
                deviation = centred.std(dim=-1, keepdim=True)
                return centred / (deviation + _EPSILON), lambda decoded: decoded * deviation + mean
        return x, lambda decoded: decoded

    def _activated(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The features of normalised vectors; in the order of SAELens's operations, so that they round alike."""
        if self.config.architecture == "gated":
            is_open = x @ weights["W_enc"] + weights["b_gate"] > 0
            magnitudes = x @ (weights["W_enc"] * weights["r_mag"].exp()) + weights["b_mag"]
            return is_open * magnitudes.relu()
        before = x @ weights["W_enc"] + weights["b_enc"]
        if self.config.architecture == "jumprelu":
            return before.relu() * (before > weights["threshold"])
        if self.config.architecture == "standard":
            return before.relu()
        if self.config.rescale_acts_by_decoder_norm:
            before = before * weights["W_dec"].norm(dim=-1)
        largest = before.topk(self.config.k, dim=-1, sorted=False)
        return before.new_zeros(before.shape).scatter(-1, largest.indices, largest.values.relu())
