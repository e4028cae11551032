"""Checkpoints: a model's state dict as one safetensors file, replaced atomically."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from hookrun.store.captures.tensor_file import NoDigest, open_tensors, read_tensor, unstorable, write_tensors
from hookrun.store.files import StoreError, make_inside, replacing
from hookrun.store.format import decode

_ALIASES = "aliases"
_APPLIED = "applied"


@dataclass(frozen=True)
class WeightsFile:
    """The content of a checkpoint that is to be written to `path`.

    tensors: name -> tensor, shared tensors once
    texts:   the metadata of the file
    """

    path: Path
    tensors: Mapping[str, Tensor]
    texts: Mapping[str, str]

    @property
    def bytes(self) -> int:
        """The total size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copied(self) -> WeightsFile:
        """The same with copies of the tensors on the CPU: training may go on."""
        copies = {name: each.detach().to("cpu", copy=True) for name, each in self.tensors.items()}
        return replace(self, tensors=copies)

    def write(self) -> None:
        """Write the file; an old one stays until it is complete. StoreError if the disk refuses."""
        make_inside(self.path.parent)
        tensors = {name: [each] for name, each in self.tensors.items()}
        with replacing(self.path) as file:
            # without a hash: that of the last file is in the manifest
            write_tensors(file, tensors, self.texts or None, NoDigest())


def save(
    model: nn.Module,
    path: str | Path,
    *,
    applied: Iterable[str] = (),
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model's state dict; an old file at `path` stays until the new one is complete.

    See `checkpoint_of`. StoreError if the file cannot be written.
    """
    checkpoint_of(model, path, applied=applied, state=state).write()


def checkpoint_of(
    model: nn.Module,
    path: str | Path,
    *,
    applied: Iterable[str] = (),
    state: Mapping[str, Tensor] | None = None,
) -> WeightsFile:
    """Collect the content of a checkpoint from the model's state dict.

    applied: the identities of the hooks that changed the model at installation, for the file's metadata
    state:   the whole state dict of a model that is sharded over several ranks; None: the model's own

    Tied weights are stored once, under one name; the file's metadata has the other names.
    StoreError if an entry is not a tensor that a file can hold.
    """
    path = Path(path)
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in (model.state_dict() if state is None else state).items():
        found = type(tensor).__name__
        problem = unstorable(tensor) if isinstance(tensor, Tensor) else f"it is a {found}, not a tensor"
        if problem:
            raise StoreError(f"cannot save {name!r} of the model in {path}: {problem}")
        same = first.setdefault(_identity(tensor), name)
        if same == name:
            stored[name] = tensor
        else:
            aliases[name] = same
    kept = {_ALIASES: aliases, _APPLIED: sorted(applied)}
    return WeightsFile(path, stored, {key: json.dumps(value) for key, value in kept.items() if value})


def read(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint, on the CPU; tied weights are tied again.

    Any safetensors file may be read. StoreError if it is missing or broken.
    """
    path = Path(path).absolute()
    if not path.is_file():
        raise StoreError(f"there is no checkpoint {path}")
    with open_tensors(path.resolve()) as file:
        state = {name: read_tensor(file, name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        stored = (file.metadata() or {}).get(_ALIASES, "{}")
    return state | {name: state[same] for name, same in _aliases(path, stored, state).items()}


def _aliases(path: Path, stored: str, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the name that its tensor is stored under."""
    try:
        aliases = decode(stored.encode())
    except ValueError as error:
        raise StoreError(f"{path} does not say which names share a tensor: {error}") from error
    if not isinstance(aliases, dict):
        raise StoreError(f"{path} does not say which names share a tensor: found a {type(aliases).__name__}")
    for same in aliases.values():
        if not isinstance(same, str) or same not in state:
            raise StoreError(f"{path} names {same!r:.300} as shared, but does not hold it")
    return aliases


def _identity(tensor: Tensor) -> object:
    """A key that is equal for two names of one tensor. Other overlapping views are stored separately."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
