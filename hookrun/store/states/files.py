"""The folder `checkpoints/`: weights, each a safetensors file, and resumable states, without pickle.

A state of the run is a folder `state_000001` of two files.
`tensors.safetensors` holds the tensors, `state.json` everything else, with a checksum of the tensors' file and of its
own content. A state is written under another name and renamed, so that it is complete or absent. Damage by the disk is
detected when it is read.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from hookrun.errors import shortened
from hookrun.store.background import Background
from hookrun.store.captures.tensor_file import Crc32, open_tensors, read_tensor, unstorable, write_tensors
from hookrun.store.files import (
    StoreError,
    make_folder,
    names_inside,
    new_file,
    new_folder,
    os_errors,
    os_reason,
    read_json,
    replacing,
)
from hookrun.store.format import CHECKPOINTS, encode
from hookrun.store.manifest import hashed
from hookrun.store.states.tree import unflatten

FILES = TENSORS, STATE = "tensors.safetensors", "state.json"
VERSION = 3
LEAST_KEPT = 2
"""The minimum number of states kept during a run: the newest one may be damaged."""

SECONDS = 30.0
"""A task that does not train saves a state at least this often."""

_NAME = re.compile(r"state_(\d{6}|[1-9]\d{6,11})")
_ALIASES = "aliases"
_APPLIED = "applied"


@dataclass(frozen=True)
class SavedState:
    """A state that was read.

    path:   its folder
    about:  the run that it belongs to: a mapping of plain values
    tree:   what was saved, tensors on the CPU
    digest: a checksum of all of it
    """

    path: Path
    about: Mapping[str, Any]
    tree: Mapping[str, Any]
    digest: str = ""

    def part(self, name: str) -> Any:
        """One part of what was saved. StoreError where it is missing."""
        if name not in self.tree:
            raise StoreError(f"{self.path} holds no {name!r}: it was not written by a run of this kind")
        return self.tree[name]


def write_state(
    run: Path, about: str, values: Any, tensors: Mapping[str, Tensor], *, keep: int = LEAST_KEPT
) -> Path:
    """Write a new state of the run in `run`, and remove all but the newest `keep` states.

    about:           what a reader has to know before restoring: the JSON of a mapping of plain values
    values, tensors: the content, from `flatten`

    Returns the state's folder. StoreError if writing fails; earlier states are unchanged then.
    """
    folder = run / CHECKPOINTS
    names = state_names(run)
    number = int(names[-1].removeprefix("state_")) + 1 if names else 1
    path = folder / f"state_{number:06d}"
    try:
        folder.mkdir(exist_ok=True)  # but not the run directory, which may have been removed
        with new_folder(path) as aside:
            crc = Crc32()
            with new_file(aside / TENSORS) as file:
                size = write_tensors(file, tensors, digest=crc)
            head = f'"version": {VERSION}, "about": {about}, "tree": {encode(values)}'
            text = f'{{{head}, "crc32": "{crc.hexdigest()}", "bytes": {size}}}'
            text = f'{{"digest": "{_digest(text)}", {text[1:]}'
            with new_file(aside / STATE) as file:
                file.write(text.encode("ascii"))
    except OSError as error:
        kept = f"{names[-1]} before it is kept" if names else "there is none before it"
        raise StoreError(f"cannot write {path}: {os_reason(error)}; {kept}") from error
    for old in [*names, path.name][: -max(keep, LEAST_KEPT)]:
        shutil.rmtree(folder / old, ignore_errors=True)  # a state too many does no harm
    return path


def newest_state(run: Path) -> tuple[SavedState | None, dict[str, str]]:
    """The newest undamaged state (None if there is none), and name -> fault for each newer one.

    States are untrusted input: nothing outside the directory is read and no code is run.
    """
    damaged: dict[str, str] = {}
    for name in reversed(state_names(run)):
        try:
            return read_state(run, name), damaged
        except StoreError as error:
            damaged[name] = str(error)
    return None, damaged


def remove_states(run: Path) -> None:
    """Remove every state, since the run has ended. StoreError if that fails."""
    for name in state_names(run):
        path = run / CHECKPOINTS / name
        with os_errors(f"cannot remove {path}"):
            shutil.rmtree(path)
    with suppress(OSError):
        (run / CHECKPOINTS).rmdir()  # succeeds only if the folder is empty


def remove_unfinished(run: Path, damaged: Iterable[str]) -> None:
    """Remove damaged states, and unfinished ones that a killed process left."""
    folder = run / CHECKPOINTS
    if folder.is_symlink():
        return
    for path in (*folder.glob(".state_*.tmp"), *(folder / name for name in damaged)):
        shutil.rmtree(path, ignore_errors=True)  # it does no harm


def read_state(run: Path, name: str) -> SavedState:
    """The state with this name. StoreError if it is damaged or of another version."""
    path = run / CHECKPOINTS / name
    try:
        content = read_json(path / STATE, run)
        version = content.get("version") if isinstance(content, dict) else None
        if version == VERSION:
            return _whole(path, run, content)
    except (ValueError, KeyError, StoreError, SafetensorError) as error:
        raise StoreError(f"{path} is damaged: {shortened(str(error), 1_000)}") from error
    fault = "is damaged"
    if type(version) is int:
        writer = "an earlier" if version < VERSION else "a later"
        fault = f"was written by {writer} hookrun, which can resume the run"
    raise StoreError(
        f"{path} {fault}: it is of version {version!r:.20}, and this hookrun reads version {VERSION}"
    )


def _whole(path: Path, run: Path, content: dict[str, Any]) -> SavedState:
    """The state whose file of values has this content. ValueError if either file was changed."""
    known = content.pop("digest", None)
    digest = _digest(encode(content))
    if known != digest or not isinstance(content.get("about"), dict):
        raise ValueError(f"the content of {STATE} was changed")
    file = path / TENSORS
    if hashed(file, run, Crc32()) != (content.get("bytes"), content.get("crc32")):
        raise ValueError(f"the content of {TENSORS} was changed")
    with open_tensors(file, run) as tensors:
        tree = unflatten(content["tree"], partial(read_tensor, tensors))
        if not isinstance(tree, dict):
            raise ValueError(f"it holds a {type(tree).__name__}")
        return SavedState(path, content["about"], tree, digest)


def _digest(text: str) -> str:
    return f"{zlib.crc32(text.encode('ascii')):08x}"


def state_names(run: Path) -> list[str]:
    """The names of the states in the run directory, the oldest first, damaged ones too."""
    if (run / CHECKPOINTS).is_symlink():
        return []
    return names_inside(run / CHECKPOINTS, _NAME, folders=True)


def save_weights(
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
        writer.write(path.name, stored, write)
