"""The action `offload`."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hookrun.engine.actions.base import Action, Edit, HookSite, Packed
from hookrun.engine.hook_types import SAVED_TENSORS
from hookrun.engine.values.tensors import as_real, holds_data
from hookrun.errors import HookrunError, reason

if TYPE_CHECKING:
    from torch import Tensor


class Offload(Action):
    """Store saved tensors in CPU memory or on disk until the backward pass needs them.

    to: `cpu`, which leaves CPU tensors where they are; or `disk`, one temporary file for each tensor in the folder of
        the environment variable TMPDIR, removed when autograd frees the tensor

    The backward pass gets them on their device with the same elements; from disk they are contiguous. Tensors of every
    dtype are stored, such as the indices of a pooling layer and the mask of a dropout.
    """

    action_name = "offload"
    hook_types = frozenset({SAVED_TENSORS})
    does = "pack"
    to: Literal["cpu", "disk"]

    @property
    def any_dtype(self) -> bool:
        """True: integer and boolean tensors take memory too."""
        return True

    def build(self, site: HookSite) -> Edit:
        """A function from a saved tensor to its replacement in CPU memory or on disk."""
        return _to_cpu if self.to == "cpu" else _to_disk


def _to_cpu(x: Tensor) -> Packed | None:
    device = x.device
    if device.type == "cpu":
        return None

    from hookrun.engine.values.host_copies import copy_to_host

    copy = copy_to_host(x)

    def undo(held: Tensor | None) -> Tensor:
        copy.wait()
        return held.to(device, non_blocking=True)  # type: ignore[union-attr]  # it is the tensor handed over below

    return Packed(copy.tensor, undo, copy)


def _to_disk(x: Tensor) -> Packed | None:
    """The tensor in a file that is deleted together with the function that reads it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    if not holds_data(x):
        return None
    device, path = x.device, tempfile.gettempdir()
    real, restored = as_real(x.detach())

    def undo(held: Tensor | None) -> Tensor:
        return restored(load_file(path)["tensor"].to(device))

    try:
        descriptor, path = tempfile.mkstemp(prefix="hookrun-saved-", suffix=".safetensors")
        os.close(descriptor)
        weakref.finalize(undo, _remove, path, os.getpid())
        save_file({"tensor": real.cpu().contiguous()}, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or path) from error
    except SafetensorError as error:
        raise HookrunError(f"cannot write {path}: {reason(error)}; set TMPDIR to another folder") from error
    return Packed(None, undo)


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not when a forked child frees its copy
        Path(path).unlink(missing_ok=True)
