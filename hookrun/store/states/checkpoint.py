"""Checkpoints: a model's state dict as one safetensors file, replaced atomically."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from hookrun.store.background import Background
from hookrun.store.captures.tensor_file import unstorable, write_tensors
from hookrun.store.files import StoreError, make_folder, replacing

_ALIASES = "aliases"
_APPLIED = "applied"


def save(
    model: nn.Module,
    path: str | Path,
    writer: Background | None = None,
    *,
    applied: Iterable[str] = (),
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model's state dict; an old file at `path` stays until the new one is complete.

    writer:  writes the file, in the background if the state dict is not too large; None: it is written now
    applied: the identities of the hooks that changed the model at installation, for the file's metadata
    state:   the whole state dict of a model that is sharded over several ranks; None: the model's own

    Tied weights are stored once, under one name; the file's metadata has the other names.
    StoreError if an entry is not a tensor that a file can hold, or if the disk refuses.
    """
    path = Path(path)
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in (model.state_dict() if state is None else state).items():
        kind = type(tensor).__name__
        problem = unstorable(tensor) if isinstance(tensor, Tensor) else f"it is a {kind}, not a tensor"
        if problem:
            raise StoreError(f"cannot save {name!r} of the model in {path}: {problem}")
        # Two names of one tensor are equal in all of these; other overlapping views are stored separately.
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        same = first.setdefault(identity, name)
        if same == name:
            stored[name] = tensor
        else:
            aliases[name] = same
    metadata = {_ALIASES: aliases, _APPLIED: sorted(applied)}
    texts = {key: json.dumps(value) for key, value in metadata.items() if value}

    def write(tensors: Mapping[str, Tensor]) -> None:
        make_folder(path.parent, parents=False)
        with replacing(path) as file:  # without a hash: that of the last file is in the manifest
            write_tensors(file, tensors, texts)

    if writer is None:
        write(stored)
    else:
        writer.write(stored, write)
