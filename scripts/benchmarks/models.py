"""The measured models, each with an input; all copies of a model have the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Subject:
    """A model and its input.

    make:     creates the model; called once for each way
    x:        the input
    argument: the name of the forward's argument
    repeated: leaves that run more than once in a forward
    """

    make: Callable[[], Any]
    x: Any
    argument: str
    repeated: frozenset[str] = frozenset()


def leaves(model: Any, cls: type | None = None) -> list[tuple[str, Any]]:
    """The modules without children, by name, in order."""
    found = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    return [(name, module) for name, module in found if cls is None or isinstance(module, cls)]


def running(subject: Subject) -> list[str]:
    """The names of the leaves that run, in the order of their first calls."""
    model, found = subject.make(), dict[str, None]()
    for name, module in leaves(model):
        module.register_forward_hook(lambda module, args, output, name=name: found.setdefault(name))
    model(subject.x)
    return list(found)


def mlp(width: int = 64, batch: int = 32) -> Subject:
    """8 Linear layers with ReLU between them, 15 leaves: so small that the time is mostly dispatch."""
    import torch
    from torch import nn

    def make() -> Any:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    torch.manual_seed(1)
    return Subject(make, torch.randn(batch, width), "input")


def resnet18() -> Subject:
    """8 images of 224x224; 52 leaves, of which 8 ReLUs run twice."""
    import torch
    from torchvision.models import resnet18 as of_torchvision

    def make() -> Any:
        torch.manual_seed(0)
        return of_torchvision(num_classes=10).eval()

    torch.manual_seed(1)
    repeated = frozenset(f"layer{layer}.{block}.relu" for layer in range(1, 5) for block in range(2))
    return Subject(make, torch.randn(8, 3, 224, 224), "x", repeated)


def gpt2(layers: int = 4, length: int = 64) -> Subject:
    """A random GPT-2 and one prompt; 41 leaves run (the dropout modules of its attention do not)."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    def make() -> Any:
        torch.manual_seed(0)
        config = GPT2Config(n_layer=layers, use_cache=False)
        config.architectures = ["GPT2LMHeadModel"]
        return GPT2LMHeadModel(config).eval()

    torch.manual_seed(1)
    return Subject(make, torch.randint(0, 50257, (1, length)), "input_ids")
