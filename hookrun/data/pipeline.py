"""A sequence of transforms: parsed from its mapping, checked against a sample's shape, applied as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hookrun.data.info import InputsInfo, TensorInfo
from hookrun.data.transforms import Transform, make_transform
from hookrun.errors import Problem, SpecError

if TYPE_CHECKING:
    from torch import Tensor

# Two sizes that stand for any size: large enough for usual crops, and of different proportions.
_LANDSCAPE, _PORTRAIT = (1536, 2048), (2048, 1024)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Transforms by name, in order; `where` is the key path of the mapping that lists them."""

    where: str
    transforms: Mapping[str, Transform]

    def build(self) -> list[Callable[[Tensor], Tensor]]:
        """The functions to apply, in order."""
        return [transform.function for transform in self.transforms.values()]

    def fit(self, inputs: InputsInfo) -> InputsInfo:
        """Shape and dtype after the transforms, found by running them on a tensor of the meta device.

        Raises SpecError if a transform does not fit, if there are several input tensors, and if images of different
        sizes keep different sizes.
        """
        if not isinstance(inputs, TensorInfo):
            if not self.transforms:
                return inputs
            what = f"transforms take one input tensor, and the data has several: {', '.join(inputs)}"
            raise SpecError([Problem(self.where, what, "remove them, or name one tensor in data.args.input")])
        ends = {self._run(probe) for probe in _probes(inputs)}
        if len(ends) > 1:
            found = " or ".join(sorted(str(list(end.shape)) for end in ends))
            what = f"the images come in different sizes, and so do the samples: {found}, for example"
            hint = "end with one size: resize: {size: 256} and center_crop: {size: 224}, or resize: {size: [224, 224]}"
            raise SpecError([Problem(self.where, what, hint)])
        return ends.pop()

    def _run(self, sample: TensorInfo) -> TensorInfo:
        for name, transform in self.transforms.items():
            sample = _apply(transform, sample, f"{self.where}.{name}")
        return sample


def parse_transforms(
    given: Mapping[str, Mapping[str, Any] | None], where: str
) -> tuple[Pipeline, list[Problem]]:
    """The pipeline that the mapping describes, and every problem in it."""
    transforms: dict[str, Transform] = {}
    problems: list[Problem] = []
    for name, args in given.items():
        transform, wrong = make_transform(name, args or {}, f"{where}.{name}")
        problems += wrong
        if transform is not None:
            transforms[name] = transform
    return Pipeline(where, transforms), problems


def _probes(sample: TensorInfo) -> list[TensorInfo]:
    if -1 not in sample.shape:
        return [sample]
    return [replace(sample, shape=(*sample.shape[:-2], *size)) for size in (_LANDSCAPE, _PORTRAIT)]


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
    what = f"does not fit a sample {sample}: {reason}"
    raise SpecError([Problem(where, what, "change its arguments, or its place among the transforms")])
