"""The closed registry of transforms: torchvision's, under names and arguments that a configuration can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from hookrun.arguments import Args
from hookrun.data.info import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor


def _ascending(value: list[float]) -> list[float]:
    if value[0] > value[1]:
        raise ValueError(f"the lower bound {value[0]} is above the upper bound {value[1]}")
    return value


Pixels = Annotated[int, Field(ge=1)]
Size = Pixels | Annotated[list[Pixels], Field(min_length=2, max_length=2)]
Padding = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Factor = Annotated[float, Field(ge=0)]
Shift = Annotated[float, Field(ge=-0.5, le=0.5)]
Interpolation = Literal["nearest", "nearest-exact", "bilinear", "bicubic"]
PositiveRange = Annotated[list[Positive], Field(min_length=2, max_length=2), AfterValidator(_ascending)]
FactorRange = Annotated[list[Factor], Field(min_length=2, max_length=2), AfterValidator(_ascending)]
ShiftRange = Annotated[list[Shift], Field(min_length=2, max_length=2), AfterValidator(_ascending)]
Range = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_ascending)]


class Transform(Args):
    """Arguments of a class of torchvision.transforms.v2, named as there; it works on float images [C, H, W]."""

    op: ClassVar[str]
    channels: ClassVar[tuple[int, ...]] = ()  # the numbers of channels that it takes; empty: any

    def misfit(self, sample: TensorInfo) -> str | None:
        """Why it must not be applied to such a sample, though torchvision might do it; None: it may."""
        if len(sample.shape) != 3:
            return "it takes an image [C, H, W]"
        if self.channels and sample.shape[0] not in self.channels:
            return f"it takes images of {' or '.join(map(str, self.channels))} channels"
        return None

    def build(self) -> Callable[[Tensor], Tensor]:
        """The function on one sample."""
        from torchvision.transforms import InterpolationMode, v2

        options = self.model_dump()
        if "interpolation" in options:
            options["interpolation"] = InterpolationMode(options["interpolation"])
        built: Callable[[Tensor], Tensor] = getattr(v2, self.op)(**options)
        return built


class Resize(Transform):
    """A number is the length of the shorter side, the other keeping its proportion; a pair is [height, width]."""

    op = "Resize"
    size: Size
    interpolation: Interpolation = "bilinear"
    antialias: bool = True


class CenterCrop(Transform):
    """The middle; an image that is smaller is padded with zeros."""

    op = "CenterCrop"
    size: Size


class RandomCrop(Transform):
    """A random part, after padding by a number of pixels on every side, or [left and right, top and bottom]."""

    op = "RandomCrop"
    size: Size
    padding: Padding | Annotated[list[Padding], Field(min_length=2, max_length=2)] | None = None
    pad_if_needed: bool = False
    fill: float = 0.0
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"


class RandomResizedCrop(Transform):
    """A random part of `scale` of the area and of `ratio` of width to height, resized."""

    op = "RandomResizedCrop"
    size: Size
    scale: PositiveRange = [0.08, 1.0]
    ratio: PositiveRange = [3 / 4, 4 / 3]
    interpolation: Interpolation = "bilinear"
    antialias: bool = True


class RandomHorizontalFlip(Transform):
    """Mirrored with probability `p`."""

    op = "RandomHorizontalFlip"
    p: float = Field(default=0.5, ge=0, le=1)


class RandomRotation(Transform):
    """Turned by a random angle within ±degrees, or [from, to]; the size stays."""

    op = "RandomRotation"
    degrees: Factor | Range
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    fill: float = 0.0


class ColorJitter(Transform):
    """Random changes of colour: each a number, the most that is changed, or a range of factors (of shifts for hue)."""

    op = "ColorJitter"
    channels = (1, 3)
    brightness: Factor | FactorRange = 0.0
    contrast: Factor | FactorRange = 0.0
    saturation: Factor | FactorRange = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] | ShiftRange = 0.0


class Rgb(Transform):
    """Three channels from one; images that have three stay as they are."""

    op = "RGB"
    channels = (1, 3)


class Grayscale(Transform):
    """Luminance, as one channel or as three equal ones."""

    op = "Grayscale"
    channels = (1, 3)
    num_output_channels: Literal[1, 3] = 1


class Normalize(Transform):
    """(value − mean) / std for each channel."""

    op = "Normalize"
    mean: list[float] = Field(min_length=1)
    std: list[Positive] = Field(min_length=1)

    @model_validator(mode="after")
    def _as_many(self) -> Normalize:
        if len(self.mean) != len(self.std):
            raise ValueError(f"one for each channel, and not {len(self.mean)} means and {len(self.std)} std")
        return self

    def misfit(self, sample: TensorInfo) -> str | None:
        reason = super().misfit(sample)
        if reason is None and sample.shape[0] != len(self.mean):  # torchvision would broadcast them
            reason = f"the number of means is {len(self.mean)}"
        return reason


class Flatten(Transform):
    """One dimension, [C·H·W]; any sample."""

    def misfit(self, sample: TensorInfo) -> str | None:
        return None

    def build(self) -> Callable[[Tensor], Tensor]:
        return _flatten


class ToDtype(Transform):
    """Another dtype; with `scale` values are mapped from the range of the one to that of the other. Any sample."""

    op = "ToDtype"
    dtype: Literal["float16", "bfloat16", "float32", "float64", "uint8", "int64"]
    scale: bool = False

    def misfit(self, sample: TensorInfo) -> str | None:
        return None

    def build(self) -> Callable[[Tensor], Tensor]:
        import torch
        from torchvision.transforms import v2

        built: Callable[[Tensor], Tensor] = v2.ToDtype(getattr(torch, self.dtype), scale=self.scale)
        return built


def _flatten(sample: Tensor) -> Tensor:
    return sample.flatten()


TRANSFORMS: Mapping[str, type[Transform]] = {
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_crop": RandomCrop,
    "random_resized_crop": RandomResizedCrop,
    "random_horizontal_flip": RandomHorizontalFlip,
    "random_rotation": RandomRotation,
    "color_jitter": ColorJitter,
    "rgb": Rgb,
    "grayscale": Grayscale,
    "normalize": Normalize,
    "flatten": Flatten,
    "to_dtype": ToDtype,
}
