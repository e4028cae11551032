"""The action `offload`."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hookrun.actions.base import Action, Edit, HookSite, Packed
from hookrun.errors import HookrunError, reason
from hookrun.hook_types import SAVED_TENSORS
from hookrun.values.tensors import as_real, holds_data

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

    def undo(held: Tensor | None) -> Tensor:
        return held.to(device)  # type: ignore[union-attr]  # it is the tensor handed over below

    return Packed(x.detach().to("cpu"), undo)


def _to_disk(x: Tensor) -> Packed | None:
    return Packed(None, _OnDisk(x.detach())) if holds_data(x) else None


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not when a forked child frees its copy
        Path(path).unlink(missing_ok=True)


class _OnDisk:
    """A tensor in a file that is deleted with this object; calling the object reads the tensor."""

    def __init__(self, x: Tensor) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self.device = x.device
        real, self._restored = as_real(x)
        self.path = tempfile.gettempdir()
        try:
            descriptor, self.path = tempfile.mkstemp(prefix="hookrun-saved-", suffix=".safetensors")
            os.close(descriptor)
            weakref.finalize(self, _remove, self.path, os.getpid())
            save_file({"tensor": real.cpu().contiguous()}, self.path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or self.path) from error
        except SafetensorError as error:
            raise HookrunError(
                f"cannot write {self.path}: {reason(error)}; set TMPDIR to another folder"
            ) from error

    def __call__(self, held: Tensor | None) -> Tensor:
        from safetensors.torch import load_file

        return self._restored(load_file(self.path)["tensor"].to(self.device))
