"""The multi-layer perceptron: linear layers and ReLU in turns."""

from __future__ import annotations
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import nn
from hookrun.models import build, names, own_names
from hookrun.models.decoder import Decoder
from hookrun.models.language import TransformersArgs
from hookrun.spec.experiment import Model
from hookrun.models.mlp import MLP


def test_mlp_has_linear_and_relu_in_turns_and_ends_in_fc() -> None:
    model = MLP(64, 10, (7, 5))
    assert [(name, type(m).__name__) for name, m in model.named_modules() if not list(m.children())] == [
        ("flatten", "Flatten"),
        ("layers.0", "Linear"),
        ("layers.1", "ReLU"),
        ("layers.2", "Linear"),
        ("layers.3", "ReLU"),
        ("fc", "Linear"),
    ]
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_mlp_without_hidden_layers_is_linear() -> None:
    model = MLP(6, 10, ())
    assert list(dict(model.named_parameters())) == ["fc.weight", "fc.bias"]
    assert model(torch.rand(2, 6)).shape == (2, 10)
