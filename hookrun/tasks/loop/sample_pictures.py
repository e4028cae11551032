"""Makes small pictures of samples, with which the report shows inputs of the model."""

from __future__ import annotations

import base64
import io
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

MOST_SIDE = 64
"""The largest side in pixels; a larger picture is downsampled by averaging."""
LARGEST = 2**26
"""The largest number of elements of a sample from which a picture is made."""


def picture_of(value: object) -> str | None:
    """A sample [H, W], [1, H, W] or [3, H, W] as a PNG in base64; None if it is not an image.

    Its smallest value becomes black (0), its largest white (255).
    """
    if not isinstance(value, Tensor) or value.is_complex() or not 0 < value.numel() <= LARGEST:
        return None
    image = value.detach().cpu().float()
    image = image[None] if image.dim() == 2 else image
    if image.dim() != 3 or image.shape[0] not in (1, 3) or min(image.shape[1:]) < 2:
        return None
    image = image.nan_to_num(0.0, 0.0, 0.0)
    block = -(-max(image.shape[1:]) // MOST_SIDE)
    if block > 1:
        image = F.avg_pool2d(image, block, ceil_mode=True)
    low, high = image.aminmax()
    grey = ((image - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    array = grey[0].numpy() if len(grey) == 1 else grey.permute(1, 2, 0).contiguous().numpy()
    return _png(array.tobytes(), array.shape)


@lru_cache(maxsize=1024)  # the jobs of a sweep show many samples again
def _png(pixels: bytes, shape: tuple[int, ...]) -> str:
    """An image [H, W] or [H, W, 3] of uint8 as a PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(np.frombuffer(pixels, np.uint8).reshape(shape)).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")
