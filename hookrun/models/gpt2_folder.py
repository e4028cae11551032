"""Reads sizes and weights for the decoder from a transformers folder with a GPT-2, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookrun.errors import Problem, SpecError, listed, reason
from hookrun.models.arguments import ModelCall, given

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookrun.spec.experiment import Model

WHERE = "model.args.path"
CONFIG, ONE_FILE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_MOST_BYTES = 2**24  # of a JSON file
_SHOWN = 6

# Key of a GPT-2's config.json -> argument of the decoder, and its default if the file has no such key.
_SIZES = {
    "vocab_size": ("vocab_size", 50257),
    "n_positions": ("length", 1024),
    "n_embd": ("width", 768),
    "n_layer": ("layers", 12),
    "n_head": ("heads", 12),
    "n_inner": ("mlp_width", None),
}
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
# Features that the decoder does not have -> the value that turns them off.
_PLAIN = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


@dataclass(frozen=True)
class _Loading:
    """Builds the decoder and loads its weights from the folder; called with the decoder's arguments."""

    folder: Path
    epsilon: float

    def __call__(self, **args: Any) -> nn.Module:
        """The decoder with its weights. Raises SpecError if a tensor is missing or has another shape."""
        import torch
        from torch import nn

        from hookrun.models.decoder import Decoder

        # On the meta device: sizes come from a file, and memory is allocated only for tensors that exist.
        with torch.device("meta"):
            decoder = Decoder(**args)
        for module in decoder.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = self.epsilon
        decoder.load_state_dict(_tensors(decoder, self.folder), assign=True)
        return decoder


def prepare(config: Model) -> ModelCall:
    """The decoder with the sizes and weights of the folder `model.args.path`.

    Raises SpecError if the folder does not exist or has another model, and for given sizes that the folder decides.
    """
    asked = given(config.args)
    folder = Path(str(asked.pop("path"))).expanduser().absolute()
    found = _config(folder)
    sizes = _arguments(folder, found)
    problems = [
        Problem(
            f"model.args.{name}", f"found {value!r}, which {folder / CONFIG} decides", "leave it out, or null"
        )
        for name, value in asked.items()
        if value is not None and value != sizes.get(name, _DEFAULTS.get(name))
    ]
    try:
        epsilon = float(found.get("layer_norm_epsilon", 1e-5))
    except (TypeError, ValueError) as error:
        what = f"{folder / CONFIG} has layer_norm_epsilon {found['layer_norm_epsilon']!r}"
        raise SpecError([Problem(WHERE, what, "correct the file")]) from error
    return ModelCall(_Loading(folder, epsilon), sizes, tuple(problems))


_DEFAULTS = {"mlp": True, "positions": "learned"}


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        hint = "give the folder into which transformers saved a GPT-2, by save_pretrained or a download"
        raise SpecError([Problem(WHERE, f"there is no folder {folder}", hint)])
    config = _json(folder / CONFIG)
    if config.get("model_type") != "gpt2":
        what = (
            f"{folder} holds a model of type {config.get('model_type')!r}, and the decoder loads GPT-2 only"
        )
        raise SpecError([Problem(WHERE, what, "use model=transformers for it")])
    return config


def _arguments(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's arguments. Raises SpecError for a variant of GPT-2 that the decoder cannot compute."""
    from hookrun.models.arguments import checked
    from hookrun.models.decoder import Decoder

    odd = [f"{key}: {config[key]!r}" for key, plain in _PLAIN.items() if config.get(key, plain) != plain]
    activation = config.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        odd.append(f"activation_function: {activation!r}")
    if odd:
        what = f"{folder / CONFIG} has {', '.join(odd)}, which the decoder does not compute"
        raise SpecError([Problem(WHERE, what, "use model=transformers for it")])
    sizes = {ours: config.get(theirs, default) for theirs, (ours, default) in _SIZES.items()}
    args, problems = checked(Decoder, {**sizes, "activation": _ACTIVATIONS[activation]})
    if problems:
        found = "; ".join(f"{each.where.rpartition('.')[2]}: {each.what}" for each in problems)
        raise SpecError([Problem(WHERE, f"{folder / CONFIG} has sizes that do not work: {found}")])
    return args


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        found = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        what = f"{path} cannot be read: {reason(error)}"
        raise SpecError([Problem(WHERE, what, "give a folder that transformers wrote")]) from error
    if not isinstance(found, dict):
        raise SpecError([Problem(WHERE, f"{path} is not a JSON object of at most {_MOST_BYTES} bytes")])
    return found


def _tensors(decoder: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The value of each parameter, in memory of its own. Raises SpecError."""
    import torch

    there = _Tensors(folder)
    found = {name: there.ours(name, parameter) for name, parameter in decoder.named_parameters()}
    shapes = [
        f"{name} {list(found[name].shape)} where {list(parameter.shape)} is needed"
        for name, parameter in decoder.named_parameters()
        if found[name].shape != parameter.shape
    ]
    if shapes:
        what = f"{folder} has tensors of other shapes than its {CONFIG} says: {listed(shapes, _SHOWN)}"
        raise SpecError([Problem(WHERE, what, "give a folder that transformers wrote")])
    return {name: torch.empty(each.shape).copy_(each) for name, each in found.items()}


class _Tensors:
    """The tensors of a folder, under the names of the decoder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, dict[str, Tensor]] = {}
        index = folder / INDEX
        self._index: Mapping[str, Any] | None = None
        if not (folder / ONE_FILE).is_file() and index.is_file():
            places = _json(index).get("weight_map")
            self._index = places if isinstance(places, dict) else {}

    def ours(self, name: str, like: Tensor) -> Tensor:
        """The value of a parameter of the decoder. Raises SpecError if the folder does not have it."""
        if name in _WHOLE:
            return self._theirs(_WHOLE[name])
        if name == "unembed.weight":
            tied = self._find("lm_head.weight")
            return tied if tied is not None else self._theirs("wte.weight")
        _, number, place = name.split(".", 2)
        theirs, kind = place.rpartition(".")[0], place.rpartition(".")[2]
        block = f"h.{number}."
        if theirs in ("attn.q", "attn.k", "attn.v"):
            part = self._theirs(f"{block}attn.c_attn.{kind}")
            width = like.shape[0]
            start = "qkv".index(theirs[-1]) * width
            return part[
                ..., start : start + width
            ].t()  # theirs multiplies from the right; a bias stays as it is
        if theirs == "attn.heads":  # [width, width] -> [heads, width of a head, width]
            weight = self._theirs(f"{block}attn.c_proj.weight")
            return weight.reshape(like.shape) if weight.numel() == like.numel() else weight
        if theirs == "attn.out":
            return self._theirs(f"{block}attn.c_proj.bias")
        if theirs in ("mlp.pre", "mlp.out"):
            layer = "c_fc" if theirs == "mlp.pre" else "c_proj"
            return self._theirs(f"{block}mlp.{layer}.{kind}").t()
        return self._theirs(f"{block}{theirs.replace('ln', 'ln_')}.{kind}")

    def _theirs(self, name: str) -> Tensor:
        found = self._find(f"transformer.{name}")
        found = self._find(name) if found is None else found
        if found is None:
            what = f"{self._folder} has no tensor '{name}' in safetensors files"
            hint = "give a folder that transformers wrote with save_pretrained(..., safe_serialization=True)"
            raise SpecError([Problem(WHERE, what, hint)])
        return found

    def _find(self, name: str) -> Tensor | None:
        file = ONE_FILE
        if self._index is not None:
            file = str(self._index.get(name, ""))
            if not file or Path(file).name != file:  # a part is a file of the folder itself
                return None
        if file not in self._files:
            self._files[file] = self._read(self._folder / file)
        return self._files[file].get(name)

    def _read(self, path: Path) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        try:
            return load_file(path, device="cpu")
        except Exception as error:  # a file that is missing or damaged may raise anything
            what = f"{path} cannot be read as safetensors: {reason(error)}"
            hint = "only safetensors files are read; save the model again in that format"
            raise SpecError([Problem(WHERE, what, hint)]) from error


_WHOLE = {
    "embed.weight": "wte.weight",
    "pos_embed.weight": "wpe.weight",
    "ln_final.weight": "ln_f.weight",
    "ln_final.bias": "ln_f.bias",
}
