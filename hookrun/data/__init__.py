"""Data sets by name: the closed registry; descriptions, without reading the data; samples in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hookrun.data.info import DataInfo, Split, TensorInfo
from hookrun.data.settings import Data
from hookrun.data.transforms import RANDOM, Transform, after_transforms, parse_transforms
from hookrun.engine.keys import GIVEN
from hookrun.engine.trust.load import DATA
from hookrun.engine.trust.load import load as load_trusted
from hookrun.engine.validation import validated
from hookrun.errors import Mistakes, SpecError, misnamed, refused_at

if TYPE_CHECKING:
    from hookrun.data.samples import Samples
    from hookrun.data.source import Source

__all__ = ["PYTHON", "DataInfo", "Split", "TensorInfo", "describe", "load", "names"]


PYTHON = "python"

# Name -> module and class, so that listing the names imports no torch, and a data set imports only what it needs.
_SOURCES: Mapping[str, tuple[str, str]] = {
    "digits": ("digits", "Digits"),
    "fake_images": ("generated", "FakeImages"),
    "tensors": ("tensors", "Tensors"),
    "image_folder": ("image_folder", "ImageFolder"),
    "imagenet": ("image_folder", "ImageNet"),
    "mnist": ("torchvision_sets", "MNIST"),
    "fashion_mnist": ("torchvision_sets", "FashionMNIST"),
    "cifar10": ("torchvision_sets", "CIFAR10"),
    "cifar100": ("torchvision_sets", "CIFAR100"),
    "text": ("text", "Text"),
    "prompts": ("prompts", "Prompts"),
    "repeated_tokens": ("generated", "RepeatedTokens"),
    "modular_addition": ("generated", "ModularAddition"),
    "names": ("generated", "NameSentences"),
}


def names() -> tuple[str, ...]:
    """The name of every data set."""
    return (*_SOURCES, PYTHON)


def describe(config: Data, split: Split = "train") -> DataInfo:
    """Shape, dtype and number of the samples of a split; nothing is downloaded, and images are not decoded.

    Raises SpecError with every mistake in the section: names, arguments, transforms, missing files.
    """
    from hookrun.data.collate import batched, collate_of

    mistakes = Mistakes()
    source = mistakes.tried(_source, config)
    transforms: dict[str, dict[str, Transform] | None] = {}
    for key in ("transforms", "train_transforms"):
        if getattr(config, key) is not None:
            transforms[key] = mistakes.tried(parse_transforms, getattr(config, key), f"data.{key}")
    collate = mistakes.tried(collate_of, config)
    if getattr(source, "padding", None) == "none" and config.samples_of_batch > 1:  # of sequences of tokens
        mistakes.note(
            "data.args.padding",
            f"none leaves samples as long as they are, and a batch of {config.batch_size} needs one length",
            "add data.batch_size=1, or pad them: left or right",
        )
    info = None if source is None else mistakes.tried(_readable(source.inspect), _root(config), split)
    mistakes.refuse()
    assert info is not None  # else there is a mistake
    described = info
    for key, steps in transforms.items():  # those of the other split have to fit too
        inputs = mistakes.tried(
            after_transforms, steps or {}, info.inputs, f"data.{key}", equal=not config.unstacked
        )
        if inputs is not None and key == _transforms_key(config, split):
            described = replace(info, inputs=inputs)
            if info.samples is not None and steps:
                described = replace(described, samples=_under(steps, info.samples))
    mistakes.refuse()
    assert collate is not None
    return batched(described, config, collate)


def load(config: Data, split: Split, *, seed: int) -> Samples:
    """The samples of a split under its transforms; their order and number are always the same.

    seed: of the experiment; only data generated with `args.seed: null` follows it.
    Raises SpecError for a mistake in what the split needs, and if a download fails or files are damaged.
    """
    key = _transforms_key(config, split)
    transforms = parse_transforms(getattr(config, key), f"data.{key}")
    samples = _readable(_source(config).open)(_root(config), split, seed)
    return _under(transforms, samples) if transforms else samples


def _under(transforms: Mapping[str, Transform], samples: Samples) -> Samples:
    from hookrun.data.samples import transformed

    made = transformed(samples, [transform.function for transform in transforms.values()])
    made.draws = not RANDOM.isdisjoint(transforms)
    return made


def _transforms_key(config: Data, split: Split) -> str:
    has_its_own = split == "train" and config.train_transforms is not None
    return "train_transforms" if has_its_own else "transforms"


def _root(config: Data) -> Path | None:
    return None if config.root is None else Path(config.root).expanduser().absolute()


def _source(config: Data) -> Source:
    """The data set with its arguments. Raises SpecError with every mistake that shows before any file is opened."""
    if config.name == PYTHON:
        from hookrun.data.own import FACTORY, OwnData

        factory = load_trusted(config.factory or "", DATA, FACTORY)
        return OwnData(factory=factory, args=config.args, as_given=config.has_own_collate)
    if config.name == GIVEN:
        from hookrun.data.given import GivenData

        return GivenData(args=config.args, as_given=config.has_own_collate)
    if config.name not in _SOURCES:
        raise SpecError([misnamed("data.name", f"unknown data set '{config.name}'", config.name, names())])
    module, name = _SOURCES[config.name]
    cls: type[Source] = getattr(import_module(f"{__name__}.{module}"), name)
    return validated(cls, config.args, "data.args")


def _unreadable(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


_readable = refused_at("data.root", "make it readable, or give another path", kinds=OSError, tell=_unreadable)
"""A decorator: SpecError for a file or folder that exists and cannot be read."""
