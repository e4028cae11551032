"""The closed list of transforms, torchvision's own with checked arguments, and sequences of transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from hookrun.data.info import InputsInfo, TensorInfo
from hookrun.engine.validation import Args, validated
from hookrun.errors import Mistakes, nearest, refused_at, spec_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torchvision.transforms import InterpolationMode


def _dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)


def _interpolation(name: str) -> InterpolationMode:
    from torchvision.transforms import InterpolationMode

    return InterpolationMode(name)


_Edge = Annotated[int, Field(ge=1)]
_Border = Annotated[int, Field(ge=0)]
_NotNegative = Annotated[float, Field(ge=0)]
_Fill = int | float | list[int] | list[float] | None
_Interpolation = Annotated[
    Literal["nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"],
    AfterValidator(_interpolation),
]
_Dtype = Annotated[
    Literal["float16", "bfloat16", "float32", "float64", "uint8", "int64"], AfterValidator(_dtype)
]

# Name -> class of torchvision.transforms.v2, and the types of its arguments. No other class can be named by a
# configuration. Left out: `inplace`, which would change the data set itself, and `expand`, which gives each sample
# another size. The bounds are those that torchvision does not check, or only for some of the samples.
_TORCHVISION: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "resize": (
        "Resize",
        {
            "size": _Edge | list[_Edge] | None,
            "interpolation": _Interpolation,
            "max_size": int | None,
            "antialias": bool | None,
        },
    ),
    "center_crop": ("CenterCrop", {"size": _Edge | list[_Edge]}),
    "random_crop": (
        "RandomCrop",
        {
            "size": _Edge | list[_Edge],
            "padding": _Border | list[_Border] | None,
            "pad_if_needed": bool,
            "fill": _Fill,
            "padding_mode": Literal["constant", "edge", "reflect", "symmetric"],
        },
    ),
    "random_resized_crop": (
        "RandomResizedCrop",
        {
            "size": _Edge | list[_Edge],
            "scale": list[_NotNegative],
            "ratio": list[float],
            "interpolation": _Interpolation,
            "antialias": bool | None,
        },
    ),
    "random_horizontal_flip": ("RandomHorizontalFlip", {"p": float}),
    "random_rotation": (
        "RandomRotation",
        {
            "degrees": float | list[float],
            "interpolation": _Interpolation,
            "center": list[float] | None,
            "fill": _Fill,
        },
    ),
    "color_jitter": (
        "ColorJitter",
        dict.fromkeys(("brightness", "contrast", "saturation", "hue"), float | list[float] | None),
    ),
    "rgb": ("RGB", {}),
    "grayscale": ("Grayscale", {"num_output_channels": int}),
    "normalize": ("Normalize", {"mean": list[float], "std": list[_NotNegative]}),
    "to_dtype": ("ToDtype", {"dtype": _Dtype, "scale": bool}),
}
_NEEDED = {"size", "degrees", "mean", "std", "dtype"}
"""The arguments that have no default; they are needed wherever there is one of that name."""
NAMES = (*_TORCHVISION, "flatten")
RANDOM = frozenset({name for name in NAMES if name.startswith("random_")} | {"color_jitter"})
"""The transforms that draw random numbers each time."""

_ONE_FOR_EACH_CHANNEL = ("mean", "std")
_ANY_SAMPLE = {"flatten", "to_dtype"}
_COLOURS = {"color_jitter", "rgb", "grayscale"}


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
    class_name, types = _TORCHVISION.get(name, ("", {}))
    fields: dict[str, Any] = {key: (of, ... if key in _NEEDED else None) for key, of in types.items()}
    parsed = validated(create_model(name, __base__=Args, **fields), args, where)
    given = {key: getattr(parsed, key) for key in parsed.model_fields_set}
    own_checks = (TypeError, ValueError, UserWarning)  # torchvision's of the values
    with refused_at(where, "change its arguments", kinds=own_checks), warnings.catch_warnings():
        # torchvision only warns of a range that ends before it starts
        warnings.simplefilter("error", UserWarning)
        return Transform(name, given, _class(class_name)(**given))


def _class(name: str) -> Callable[..., Callable[[Tensor], Tensor]]:
    """torchvision's class, or for an empty name what flattens a sample."""
    if not name:
        from torch import nn

        return partial(nn.Flatten, 0)  # a sample has no dimension of the batch
    from torchvision.transforms import v2

    return getattr(v2, name)


# Two sizes that stand for any size: large enough for usual crops, and of different proportions.
_LANDSCAPE = (1536, 2048)
_PORTRAIT = (2048, 1024)


def parse_transforms(given: Mapping[str, Mapping[str, Any] | None], where: str) -> dict[str, Transform]:
    """The transforms of a mapping by name, in order. Raises SpecError with every mistake in it."""
    mistakes = Mistakes()
    transforms: dict[str, Transform] = {}
    for name, args in given.items():
        transform = mistakes.tried(make_transform, name, args or {}, f"{where}.{name}")
        if transform is not None:
            transforms[name] = transform
    mistakes.refuse()
    return transforms


def after_transforms(
    transforms: Mapping[str, Transform], inputs: InputsInfo, where: str, *, equal: bool = True
) -> InputsInfo:
    """Shape and dtype after the transforms, found by running them on a tensor of the meta device.

    where: the key path of the mapping that lists the transforms
    equal: samples need one size; else a size that differs is -1

    Raises SpecError if a transform does not fit, if there are several input tensors, and if images of different sizes
    keep different sizes, but must not.
    """
    if not isinstance(inputs, TensorInfo):
        if not transforms:
            return inputs
        several = f"several: {', '.join(inputs)}" if inputs else "something else"
        what = f"transforms take one input tensor, and the data has {several}"
        raise spec_error(where, what, "remove them, or name one tensor in data.args.input")
    if -1 not in inputs.shape:
        return _apply_all(transforms, inputs, where)
    leading = inputs.shape[:-2]
    wide = _apply_all(transforms, replace(inputs, shape=(*leading, *_LANDSCAPE)), where)
    high = _apply_all(transforms, replace(inputs, shape=(*leading, *_PORTRAIT)), where)
    if wide != high and equal:
        shapes = " or ".join(sorted([str(list(wide.shape)), str(list(high.shape))]))
        raise spec_error(
            where,
            f"the images come in different sizes, and so do the samples: {shapes}, for example",
            "end with one size: resize: {size: 256} and center_crop: {size: 224}, or resize: {size: [224, 224]}",
        )
    sizes = zip(wide.shape, high.shape, strict=True)
    return replace(wide, shape=tuple(one if one == other else -1 for one, other in sizes))


def _apply_all(transforms: Mapping[str, Transform], sample: TensorInfo, where: str) -> TensorInfo:
    for name, transform in transforms.items():
        sample = _apply(transform, sample, f"{where}.{name}")
    return sample


def _apply(transform: Transform, sample: TensorInfo, where: str) -> TensorInfo:
    import torch

    reason = transform.misfit(sample)
    if reason is None:
        try:
            # Random transforms draw from torch's generator, and a description must not advance it.
            with torch.random.fork_rng(devices=[]):
                end = transform.function(torch.empty(sample.shape, dtype=sample.dtype, device="meta"))
            return TensorInfo(tuple(end.shape), end.dtype)
        except (TypeError, ValueError, RuntimeError) as error:  # of torchvision, about shapes and dtypes
            reason = str(error)
    what = f"does not fit a sample {sample}: {reason}"
    raise spec_error(where, what, "change its arguments, or its place among the transforms")
