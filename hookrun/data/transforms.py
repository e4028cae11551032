"""The closed list of transforms, torchvision's own with checked arguments, and sequences of transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from numbers import Number
from types import GenericAlias, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, create_model

from hookrun.config.validation import Args, parameters, validated
from hookrun.data.info import InputsInfo, TensorInfo
from hookrun.errors import Mistakes, nearest, spec_error

if TYPE_CHECKING:
    from torch import Tensor

# Name -> class of torchvision.transforms.v2. No other class can be named by a configuration.
_TORCHVISION = {
    "resize": "Resize",
    "center_crop": "CenterCrop",
    "random_crop": "RandomCrop",
    "random_resized_crop": "RandomResizedCrop",
    "random_horizontal_flip": "RandomHorizontalFlip",
    "random_rotation": "RandomRotation",
    "color_jitter": "ColorJitter",
    "rgb": "RGB",
    "grayscale": "Grayscale",
    "normalize": "Normalize",
    "to_dtype": "ToDtype",
}
NAMES = (*_TORCHVISION, "flatten")
RANDOM = frozenset({name for name in NAMES if name.startswith("random_")} | {"color_jitter"})
"""The transforms that draw random numbers each time."""

# `inplace` would change the data set itself; `expand` gives each sample another size.
_LEFT_OUT = {"inplace", "expand"}
# Bounds that torchvision does not check, or only for some of the samples.
_LEAST = {"size": 1, "padding": 0, "scale": 0, "std": 0}
_ONE_FOR_EACH_CHANNEL = ("mean", "std")
_ANY_SAMPLE = {"flatten", "to_dtype"}
_COLOURS = {"color_jitter", "rgb", "grayscale"}
_DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int64")


@dataclass(frozen=True, slots=True)
class Transform:
    """One transform: its name, the arguments that were given, and the function on one sample."""

    name: str
    args: Mapping[str, Any]
    function: Callable[[Tensor], Tensor]

    def misfit(self, sample: TensorInfo) -> str | None:
        """Why it must not be applied to such a sample, even if torchvision would accept it; None if it may."""
        if self.name in _ANY_SAMPLE:
            return None
        if len(sample.shape) != 3:
            return "it takes an image [C, H, W]"
        channels = sample.shape[0]
        if self.name in _COLOURS and channels not in (1, 3):
            return "it takes images of 1 or 3 channels"
        for key in _ONE_FOR_EACH_CHANNEL:  # torchvision would broadcast them
            if key in self.args and len(self.args[key]) != channels:
                return f"the number of {key}s is {len(self.args[key])}"
        return None


def make_transform(name: str, args: Mapping[str, Any], where: str) -> Transform:
    """The transform called `name`; imports torchvision.

    Raises SpecError with every mistake in its name and arguments, whose key path is `where`.
    """
    if name not in NAMES:
        raise spec_error(where, "unknown transform", nearest(name, NAMES))
    parsed = validated(_arguments(name), args, where)
    given = {key: getattr(parsed, key) for key in parsed.model_fields_set}
    try:
        with warnings.catch_warnings():
            # torchvision only warns of a range that ends before it starts
            warnings.simplefilter("error", UserWarning)
            return Transform(name, given, _class(name)(**given))
    except (TypeError, ValueError, UserWarning) as error:  # torchvision's own checks of the values
        raise spec_error(where, str(error), "change its arguments") from error


def _class(name: str) -> Callable[..., Callable[[Tensor], Tensor]]:
    if name == "flatten":
        from torch import nn

        return partial(nn.Flatten, 0)  # a sample has no dimension of the batch
    from torchvision.transforms import v2

    return getattr(v2, _TORCHVISION[name])


@cache
def _arguments(name: str) -> type[Args]:
    """A pydantic model of the constructor's arguments that YAML can represent."""
    if name == "flatten":
        return create_model(name, __base__=Args)
    cls = _class(name)
    hints = get_type_hints(cls.__init__)
    fields: dict[str, Any] = {}
    for key, parameter in (parameters(cls) or {}).items():
        accepted = None if key in _LEFT_OUT else _accepted(hints.get(key), _LEAST.get(key))
        if accepted is not None:
            fields[key] = (accepted, ... if parameter.default is parameter.empty else None)
    return create_model(name, __base__=Args, **fields)


def _accepted(annotation: Any, least: float | None) -> Any:
    """The type of the values of `annotation` that YAML can represent; None if there are none, as for a callable.

    least: the smallest number that is accepted
    """
    names = _named_values(annotation)
    if names:
        return Annotated[Literal[tuple(names)], AfterValidator(names.__getitem__)]
    if annotation in (int, float, Number):
        return Annotated[int if annotation is int else float, Field(ge=least)]
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in (bool, NoneType) or origin is Literal:
        return annotation
    if origin in (Union, UnionType):
        # An interpolation may be its name, its member of the enumeration or a number: the name is enough.
        named = [each for each in inner if _named_values(each)]
        members = [_accepted(each, least) for each in named or inner]
        kept = tuple(each for each in members if each is not None)
        return Union[kept] if kept else None  # noqa: UP007 (the members are computed)
    sequence = origin or annotation
    if isinstance(sequence, type) and issubclass(sequence, Sequence) and sequence is not str:
        item = _accepted(inner[0] if inner else float, least)
        return None if item is None else GenericAlias(list, (item,))
    return None


def _named_values(annotation: Any) -> Mapping[str, Any]:
    """The values of a type that a configuration gives by name; empty for every other type."""
    import torch
    from torchvision.transforms import InterpolationMode

    if annotation is InterpolationMode:
        return {mode.value: mode for mode in InterpolationMode}
    return {name: getattr(torch, name) for name in _DTYPES} if annotation is torch.dtype else {}


# Two sizes that stand for any size: large enough for usual crops, and of different proportions.
_LANDSCAPE, _PORTRAIT = (1536, 2048), (2048, 1024)


def parse_transforms(given: Mapping[str, Mapping[str, Any] | None], where: str) -> dict[str, Transform]:
    """The transforms of a mapping by name, in order. Raises SpecError with every mistake in it."""
    mistakes = Mistakes()
    tried = {
        name: mistakes.tried(make_transform, name, args or {}, f"{where}.{name}")
        for name, args in given.items()
    }
    mistakes.refuse()
    return {name: transform for name, transform in tried.items() if transform is not None}


def after_transforms(transforms: Mapping[str, Transform], inputs: InputsInfo, where: str) -> InputsInfo:
    """Shape and dtype after the transforms, found by running them on a tensor of the meta device.

    where: the key path of the mapping that lists the transforms

    Raises SpecError if a transform does not fit, if there are several input tensors, and if images of different sizes
    keep different sizes.
    """
    if not isinstance(inputs, TensorInfo):
        if not transforms:
            return inputs
        raise spec_error(
            where,
            f"transforms take one input tensor, and the data has several: {', '.join(inputs)}",
            "remove them, or name one tensor in data.args.input",
        )
    probes = [inputs]
    if -1 in inputs.shape:
        probes = [replace(inputs, shape=(*inputs.shape[:-2], *size)) for size in (_LANDSCAPE, _PORTRAIT)]
    ends = set[TensorInfo]()
    for sample in probes:
        for name, transform in transforms.items():
            sample = _apply(transform, sample, f"{where}.{name}")
        ends.add(sample)
    if len(ends) > 1:
        shapes = " or ".join(sorted(str(list(end.shape)) for end in ends))
        raise spec_error(
            where,
            f"the images come in different sizes, and so do the samples: {shapes}, for example",
            "end with one size: resize: {size: 256} and center_crop: {size: 224}, or resize: {size: [224, 224]}",
        )
    return ends.pop()


def _apply(transform: Transform, sample: TensorInfo, where: str) -> TensorInfo:
    import torch

    reason = transform.misfit(sample)
    if reason is None:
        try:
            # Random transforms draw from torch's generator, and a description must not advance it.
            with torch.random.fork_rng(devices=[]):
                end = transform.function(torch.empty(sample.shape, dtype=sample.dtype, device="meta"))
            return TensorInfo(tuple(end.shape), end.dtype)
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:  # torchvision's own checks of shapes and dtypes
            reason = str(error)
    raise spec_error(
        where,
        f"does not fit a sample {sample}: {reason}",
        "change its arguments, or its place among the transforms",
    )
