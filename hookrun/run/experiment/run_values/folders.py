"""Reads a folder of SAELens: cfg.json and sae_weights.safetensors."""

from __future__ import annotations

import re
from pathlib import Path

from hookrun.engine.actions.autoencoders import Autoencoder, AutoencoderConfig
from hookrun.engine.validation import parse
from hookrun.errors import HookrunError, listed, shortened
from hookrun.store.captures.tensor_file import read_tensors
from hookrun.store.files import names_inside, read_json

CONFIG = "cfg.json"
WEIGHTS = "sae_weights.safetensors"
_PICKLE = re.compile(r".*\.(pt|pth|bin|pkl|ckpt)")
_SAVE = "load it in SAELens and save it by sae.save_model(FOLDER)"


def read_autoencoder(folder: Path) -> Autoencoder:
    """The autoencoder in a folder. HookrunError if there is none, or it is not one that is computed as SAELens does."""
    if not folder.is_dir():
        raise HookrunError(f"there is no folder {folder}")
    _require_files(folder)
    path = folder / CONFIG
    content = read_json(path)
    if not isinstance(content, dict):
        raise HookrunError(f"{path} holds no mapping: it is not the configuration of an autoencoder")
    config, problems = parse(AutoencoderConfig, content, "")
    if config is None:
        mistakes = [shortened(f"{each.where}: {each.what}".removeprefix(": "), 400) for each in problems]
        raise HookrunError(f"{path}: {'; '.join(mistakes)}")
    tensors, _ = read_tensors(folder / WEIGHTS)
    try:
        return Autoencoder.of(config, tensors)
    except ValueError as error:
        raise HookrunError(f"{folder / WEIGHTS}: {error}") from error


def _require_files(folder: Path) -> None:
    """HookrunError unless both files are there, and no links."""
    for name in (CONFIG, WEIGHTS):
        path = folder / name
        if path.is_symlink():
            raise HookrunError(
                f"{path} is a link, which could lead to any file: copy the folder with what its links lead to, "
                "as cp -rL does"
            )
        if path.is_file():
            continue
        pickles = names_inside(folder, _PICKLE)
        if pickles:
            raise HookrunError(
                f"{folder} has no {name}, and {listed(pickles, 4)}, a pickle, which could run code: {_SAVE}"
            )
        raise HookrunError(f"{folder} has no {name}: it is not a folder that SAELens has written")
