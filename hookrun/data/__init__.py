"""Data sets by name: the closed registry; descriptions, without reading the data; samples in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookrun.config.validation import Args, parse
from hookrun.data.info import DataInfo, InputsInfo, Split, TensorInfo
from hookrun.data.transforms import RANDOM, Pipeline, parse_transforms
from hookrun.errors import Problem, SpecError, nearest
from hookrun.spec.experiment import Data

if TYPE_CHECKING:
    from hookrun.data.samples import Samples
    from hookrun.data.source import Source

__all__ = ["PYTHON", "DataInfo", "Split", "TensorInfo", "describe", "load", "names", "transforms_draw"]


PYTHON = "python"

# Name -> module and constant, so that listing the names imports no torch, and a data set imports only what it needs.
_SOURCES: Mapping[str, tuple[str, str]] = {
    "digits": ("hookrun.data.digits", "DIGITS"),
    "fake_images": ("hookrun.data.fake_images", "FAKE_IMAGES"),
    "tensors": ("hookrun.data.tensors", "TENSORS"),
    "image_folder": ("hookrun.data.image_folder", "IMAGE_FOLDER"),
    "imagenet": ("hookrun.data.image_folder", "IMAGENET"),
    "mnist": ("hookrun.data.torchvision_sets", "MNIST"),
    "fashion_mnist": ("hookrun.data.torchvision_sets", "FASHION_MNIST"),
    "cifar10": ("hookrun.data.torchvision_sets", "CIFAR10"),
    "cifar100": ("hookrun.data.torchvision_sets", "CIFAR100"),
    "text": ("hookrun.data.text", "TEXT"),
    "prompts": ("hookrun.data.prompts", "PROMPTS"),
    "repeated_tokens": ("hookrun.data.repeated_tokens", "REPEATED_TOKENS"),
    "modular_addition": ("hookrun.data.modular_addition", "MODULAR_ADDITION"),
    "names": ("hookrun.data.name_sentences", "NAMES"),
}


def names() -> tuple[str, ...]:
    """The name of every data set."""
    return (*_SOURCES, PYTHON)


def describe(config: Data, split: Split = "train") -> DataInfo:
    """Shape, dtype and number of the samples of a split; nothing is downloaded, and images are not decoded.

    Raises SpecError with every mistake in the section: names, arguments, transforms, missing files.
    """
    request, problems = _parse(config)
    info: DataInfo | None = None
    if getattr(request.args, "padding", None) == "none" and config.batch_size > 1:  # of sequences of tokens
        what = f"none leaves samples as long as they are, and a batch of {config.batch_size} needs one length"
        problems.append(
            Problem("data.args.padding", what, "add data.batch_size=1, or pad them: left or right")
        )
    if request.args is not None:
        try:
            with _report_unreadable():
                info = request.source.inspect(request.root, request.args, split)
        except SpecError as error:
            problems += error.errors
    if problems or info is None:
        raise SpecError(problems)
    return replace(info, inputs=_fit(info.inputs, request.pipelines, split))


def load(config: Data, split: Split, *, seed: int) -> Samples:
    """The samples of a split under its transforms; their order and number are always the same.

    seed: of the experiment; only data generated with `args.seed: null` follows it.
    Raises SpecError as `describe` does, and if a download fails or files are damaged.
    """
    request, problems = _parse(config)
    if problems or request.args is None:
        raise SpecError(problems)
    with _report_unreadable():
        samples = request.source.open(request.root, request.args, split, seed)
    steps = request.pipelines[split].build()
    if not steps:
        return samples
    from hookrun.data.samples import Transformed

    return Transformed(samples, steps)


def transforms_draw(config: Data, split: Split) -> bool:
    """Whether the transforms of the split change a sample at random each time."""
    own = config.train_transforms if split == "train" else None
    return not RANDOM.isdisjoint(config.transforms if own is None else own)


@dataclass(frozen=True, slots=True)
class _Request:
    """A parsed section; args is None if they are invalid."""

    source: Source[Any]
    root: Path | None
    args: Args | None
    pipelines: Mapping[Split, Pipeline]


def _parse(config: Data) -> tuple[_Request, list[Problem]]:
    """The section, and every mistake that shows before any file is opened. Raises SpecError for an unknown name."""
    source = _source(config)
    args, problems = parse(source.args, config.args, "data.args")
    val, wrong = parse_transforms(config.transforms, "data.transforms")
    problems += wrong
    train = val
    if config.train_transforms is not None:
        train, wrong = parse_transforms(config.train_transforms, "data.train_transforms")
        problems += wrong
    root = None if config.root is None else Path(config.root).expanduser().absolute()
    return _Request(source, root, args, {"train": train, "val": val}), problems


def _source(config: Data) -> Source[Any]:
    if config.name == PYTHON:
        from hookrun.data.own import own_data

        return own_data(config.factory or "")
    if config.name not in _SOURCES:
        what = f"unknown data set '{config.name}'"
        raise SpecError([Problem("data.name", what, nearest(config.name, names()))])
    module, constant = _SOURCES[config.name]
    source: Source[Any] = getattr(import_module(module), constant)
    return source


@contextmanager
def _report_unreadable() -> Iterator[None]:
    """Report a file or folder that exists and cannot be read as a SpecError."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise SpecError([Problem("data.root", what, "make it readable, or give another path")]) from error


def _fit(inputs: InputsInfo, pipelines: Mapping[Split, Pipeline], split: Split) -> InputsInfo:
    """The inputs of the split after its transforms. Raises SpecError where those of either split do not fit."""
    problems: list[Problem] = []
    fitted: dict[str, InputsInfo] = {}
    for pipeline in {each.where: each for each in pipelines.values()}.values():
        try:
            fitted[pipeline.where] = pipeline.fit(inputs)
        except SpecError as error:
            problems += error.errors
    if problems:
        raise SpecError(problems)
    return fitted[pipelines[split].where]
