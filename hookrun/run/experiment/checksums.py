"""The form of a value and a checksum of its content, by which runs and ranks tell whether they have the same."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookrun.store.captures.tensor_file import dtype_name, unstorable

_WHOLE = 2**20
"""Bytes. Of a larger tensor only `_BLOCKS` evenly spaced blocks are read, together as many bytes."""

_BLOCKS = 16

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def crc_of(content: bytes) -> str:
    """The CRC-32 of the bytes, as eight digits."""
    return f"{zlib.crc32(content):08x}"


def content_of(value: Any) -> tuple[str, str]:
    """The form of a value, such as its dtype and shape, and the CRC-32 of its content.

    Of a large tensor only evenly spaced blocks are read.
    """
    if isinstance(value, np.ndarray):
        content = b"" if value.dtype.hasobject else value.tobytes()
        return f"{value.dtype} {list(value.shape)}", crc_of(content)
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if not isinstance(value, Tensor):
        return type(value).__name__, ""
    form = f"{dtype_name(value.dtype)} {list(value.shape)}"
    if unstorable(value):
        return form, ""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    read = plain.reshape(-1).view(torch.uint8)
    if len(read) > _WHOLE:
        blocks = read[: len(read) // _BLOCKS * _BLOCKS].view(_BLOCKS, -1)
        read = blocks[:, : _WHOLE // _BLOCKS]
    return form, crc_of(read.cpu().numpy().tobytes())
