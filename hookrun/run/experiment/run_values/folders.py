"""Reads a folder of SAELens: cfg.json and sae_weights.safetensors."""

from __future__ import annotations

from pathlib import Path

from hookrun.engine.actions.autoencoders import CONFIG, WEIGHTS, Autoencoder, AutoencoderConfig
from hookrun.engine.validation import parse
from hookrun.errors import HookrunError, shortened
from hookrun.store.captures.tensor_file import read_tensors
from hookrun.store.files import is_file, near, read_json


def read_autoencoder(folder: Path) -> Autoencoder:
    """The autoencoder in a folder. HookrunError if there is none, or it is not one that is computed as SAELens does."""
    for path in (folder / CONFIG, folder / WEIGHTS):
        if not is_file(path) or path.is_symlink():
            raise HookrunError(
                f"{folder} has no file {path.name}: sae.save_model(FOLDER) in SAELens writes it; a pickle (.pt), which "
                "could run code, is not read, and no link is followed: copy a folder with links by cp -rL"
                f"{near(folder, f'*/{CONFIG}')}"
            )
    content = read_json(folder / CONFIG)
    if not isinstance(content, dict):
        raise HookrunError(f"{folder / CONFIG} holds no mapping")
    config, problems = parse(AutoencoderConfig, content, "")
    if config is None:
        mistakes = [shortened(f"{each.where}: {each.what}", 500).removeprefix(": ") for each in problems]
        raise HookrunError(f"{folder / CONFIG}: {'; '.join(mistakes)}")
    tensors, _ = read_tensors(folder / WEIGHTS)
    try:
        return Autoencoder.of(config, tensors)
    except ValueError as error:
        raise HookrunError(f"{folder / WEIGHTS}: {error}") from error
