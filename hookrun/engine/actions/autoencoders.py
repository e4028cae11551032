"""The sparse autoencoders of SAELens: what their cfg.json says, which tensors they have, and their formulas."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hookrun.engine.trust.callables import tensor_digest
from hookrun.errors import listed

if TYPE_CHECKING:
    from torch import Tensor, dtype

BIASES: Mapping[str, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
"""The architectures that are read -> the names of their tensors [d_sae]."""

_FOLD = "fold it into the weights in SAELens (sae.{0}), and save the autoencoder again"
_UNREAD = {
    "expected_average_only_in": _FOLD.format("fold_activation_norm_scaling_factor(factor)"),
    "covariance_whitening": _FOLD.format("fold_activation_whitening(...)"),
}
"""Normalisations by numbers that the folder does not hold -> what to do."""

_EPSILON = 1e-5

Size = Annotated[int, Field(ge=1, le=10**8)]


def _normalisation(raw: Any) -> Any:
    """Earlier versions wrote true, false or null."""
    if raw is None or isinstance(raw, bool):
        raw = "expected_average_only_in" if raw else "none"
    if isinstance(raw, str) and raw in _UNREAD:
        raise ValueError(
            f"normalize_activations is {raw}, by numbers that the folder does not hold: {_UNREAD[raw]}"
        )
    return raw


def _dtype_name(raw: Any) -> Any:
    return raw.removeprefix("torch.") if isinstance(raw, str) else raw


class AutoencoderConfig(BaseModel):
    """The keys of cfg.json on which the formulas depend, in the words of every version of SAELens; others are ignored.

    d_in, d_sae: how many elements a vector has, and how many features
    k:           of topk: how many features of a vector are kept
    rescale_acts_by_decoder_norm: of topk: features are compared as if each row of W_dec had norm 1
    hook_name:   where it was trained, in TransformerLens's names
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", populate_by_name=True)

    architecture: Literal["standard", "topk", "jumprelu", "gated"] = "standard"
    d_in: Size
    d_sae: Size
    dtype: Annotated[Literal["float64", "float32", "float16", "bfloat16"], BeforeValidator(_dtype_name)] = (
        "float32"
    )
    apply_b_dec_to_input: bool = True
    normalize_activations: Annotated[
        Literal["none", "constant_norm_rescale", "layer_norm"], BeforeValidator(_normalisation)
    ] = "none"
    reshape_activations: Literal["none", "hook_z"] = "none"
    activation_fn: Annotated[
        Literal["relu", "topk"], Field(validation_alias=AliasChoices("activation_fn", "activation_fn_str"))
    ] = "relu"
    finetuning_scaling_factor: bool | None = None
    k: Size | None = None
    rescale_acts_by_decoder_norm: bool = False
    hook_name: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, raw: Any) -> Any:
        """Where the keys stood in earlier versions, or stand now."""
        if not isinstance(raw, dict):
            return raw
        new = dict(raw)
        metadata = raw.get("metadata")
        if isinstance(metadata, dict):
            new.setdefault("hook_name", metadata.get("hook_name") or "")
        name = new.setdefault("hook_name", raw.get("hook_point") or "")
        if isinstance(name, str) and "hook_z" in name:
            new.setdefault("reshape_activations", "hook_z")
        arguments = raw.get("activation_fn_kwargs")
        if isinstance(arguments, dict) and "k" in arguments:
            new.setdefault("k", arguments["k"])
        return new

    @model_validator(mode="after")
    def _is_consistent(self) -> AutoencoderConfig:
        if self.activation_fn == "topk" and self.architecture not in ("standard", "topk"):
            raise ValueError(
                f"activation_fn is topk, which does not go with architecture {self.architecture}"
            )
        if self.keeps_largest and (self.k is None or self.k > self.d_sae):
            raise ValueError(f"k is {self.k}, expected how many of the {self.d_sae} features are kept")
        return self

    @property
    def keeps_largest(self) -> bool:
        """Whether it is of the architecture topk; earlier versions named the activation function only."""
        return "topk" in (self.architecture, self.activation_fn)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of each tensor -> its shape."""
        shapes: dict[str, tuple[int, ...]] = {
            "W_enc": (self.d_in, self.d_sae),
            "W_dec": (self.d_sae, self.d_in),
            "b_dec": (self.d_in,),
        }
        return shapes | dict.fromkeys(BIASES[self.architecture], (self.d_sae,))


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
        factor = given.pop("finetuning_scaling_factor", None)
        factor = given.pop("scaling_factor", factor)
        shapes = config.shapes()
        found = {name: tuple(tensor.shape) for name, tensor in given.items()}
        if found != shapes:
            raise ValueError(
                f"found {_listed_shapes(found)}; cfg.json says {config.architecture} with d_in {config.d_in} and "
                f"d_sae {config.d_sae}, which has {_listed_shapes(shapes)}"
            )
        if factor is not None and not bool((factor == 1).all()):
            if not config.finetuning_scaling_factor or tuple(factor.shape) != (config.d_sae,):
                raise ValueError(
                    f"found a scaling_factor {list(factor.shape)} and finetuning_scaling_factor: "
                    f"{config.finetuning_scaling_factor}, expected one factor for each feature and true"
                )
            given["W_dec"] = factor.unsqueeze(1) * given["W_dec"]
        computing = getattr(torch, config.dtype)
        digests = list[str]()
        for name, tensor in sorted(given.items()):
            if not tensor.is_floating_point():
                raise ValueError(f"{name} is of {tensor.dtype}, expected floating-point numbers")
            given[name] = tensor.to(computing)
            if not bool(given[name].isfinite().all()):
                raise ValueError(f"{name} holds numbers that are not finite in {config.dtype}")
            digests.append(tensor_digest(given[name]))
        content = json.dumps([config.model_dump(), digests], sort_keys=True)
        return cls(config, given, hashlib.sha256(content.encode()).hexdigest())

    @property
    def dtype(self) -> dtype:
        """In which it computes."""
        return self.tensors["W_enc"].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of W_enc: [d_in, d_sae]."""
        return tuple(self.tensors["W_enc"].shape)

    def encode(self, x: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The features [..., d_sae] of vectors [..., d_in], and a function from features to a tensor like x.

        weights: its tensors on the device of x
        """
        flat = self._vectors(x)
        normal, undo = self._normalised(flat)
        if self.config.apply_b_dec_to_input:
            normal = normal - weights["b_dec"]
        features = self._activated(normal @ weights["W_enc"], weights)

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
        trained = f"; it was trained at {self.config.hook_name}" if self.config.hook_name else ""
        raise ValueError(
            f"the tensor has shape {list(x.shape)}, and the autoencoder takes vectors of d_in = {width} elements in "
            f"the last dimension{trained}"
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

    def _activated(self, product: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The features from x @ W_enc."""
        if self.config.architecture == "gated":
            is_open = product + weights["b_gate"] > 0
            return is_open * (product * weights["r_mag"].exp() + weights["b_mag"]).relu()
        before = product + weights["b_enc"]
        if self.config.architecture == "jumprelu":
            return before.relu() * (before > weights["threshold"])
        if not self.config.keeps_largest:
            return before.relu()
        if self.config.rescale_acts_by_decoder_norm:
            before = before * weights["W_dec"].norm(dim=-1)
        largest = before.topk(self.config.k, dim=-1, sorted=False)
        return before.new_zeros(before.shape).scatter(-1, largest.indices, largest.values.relu())


def _listed_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return listed([f"{name} {list(shape)}" for name, shape in sorted(shapes.items())], 8)
