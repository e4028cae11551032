"""Decoders to test, and the error where one cannot be made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookrun.errors import SpecError
from hookrun.models import build
from hookrun.models.settings import Model


def made(vocab_size: int | None = 20, length: int | None = 12, **args: Any) -> nn.Module:
    model = build(
        Model(name="decoder", args=args), sample_shape=None, num_classes=None, trust=frozenset(),
        vocab_size=vocab_size, length=length,
    )  # fmt: skip
    return model.eval()


def problem(**args: Any) -> str:
    with pytest.raises(SpecError) as error:
        made(**args)
    return str(error.value)


def scrambled(model: nn.Module) -> nn.Module:
    """Weights large enough that a mistake shows."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model
