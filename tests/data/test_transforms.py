"""Transforms by name: torchvision's own, with arguments that are checked before and samples that are checked too."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from hookrun.arguments import parse
from hookrun.data.info import TensorInfo
from hookrun.data.transforms import TRANSFORMS, Transform

# An example of each, and what torchvision calls it; the test of the list itself keeps it whole.
EXAMPLES: dict[str, tuple[dict[str, Any], torch.nn.Module | None]] = {
    "resize": ({"size": [4, 6]}, v2.Resize([4, 6])),
    "center_crop": ({"size": 4}, v2.CenterCrop(4)),
    "random_crop": ({"size": 4, "padding": 2}, v2.RandomCrop(4, padding=2)),
    "random_resized_crop": ({"size": 4, "scale": [0.5, 1]}, v2.RandomResizedCrop(4, scale=[0.5, 1])),
    "random_horizontal_flip": ({"p": 0.7}, v2.RandomHorizontalFlip(0.7)),
    "random_rotation": ({"degrees": [-30, 60]}, v2.RandomRotation([-30, 60])),
    "color_jitter": (
        {"brightness": 0.5, "contrast": [0.5, 2], "saturation": 0.3, "hue": 0.1},
        v2.ColorJitter(0.5, [0.5, 2], 0.3, 0.1),
    ),
    "rgb": ({}, v2.RGB()),
    "grayscale": ({"num_output_channels": 3}, v2.Grayscale(3)),
    "normalize": ({"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]}, v2.Normalize([0.1, 0.2, 0.3], [1, 2, 3])),
    "flatten": ({}, None),
    "to_dtype": ({"dtype": "uint8", "scale": True}, v2.ToDtype(torch.uint8, scale=True)),
}
IMAGE = torch.rand(3, 8, 10, generator=torch.Generator().manual_seed(0))


def transform(name: str, **args: Any) -> Transform:
    parsed, problems = parse(TRANSFORMS[name], args, f"data.transforms.{name}")
    assert problems == []
    assert parsed is not None
    return parsed


def misfit(name: str, shape: tuple[int, ...], **args: Any) -> str | None:
    return transform(name, **args).misfit(TensorInfo(shape, torch.float32))


def test_every_transform_has_its_example() -> None:
    assert set(EXAMPLES) == set(TRANSFORMS)


@pytest.mark.parametrize("name", [name for name, (_, theirs) in EXAMPLES.items() if theirs])
def test_a_transform_is_torchvisions_own_under_the_same_randomness(name: str) -> None:
    args, theirs = EXAMPLES[name]
    ours = transform(name, **args).build()
    assert theirs is not None
    for seed in range(3):
        torch.manual_seed(seed)
        expected = theirs(IMAGE)
        torch.manual_seed(seed)
        assert torch.equal(ours(IMAGE), expected)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_pickles_for_worker_processes(name: str) -> None:
    built = transform(name, **EXAMPLES[name][0]).build()
    again = pickle.loads(pickle.dumps(built))
    torch.manual_seed(0)
    expected = built(IMAGE)
    torch.manual_seed(0)
    assert torch.equal(again(IMAGE), expected)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_leaves_its_input_as_it_was(name: str) -> None:
    before = IMAGE.clone()
    transform(name, **EXAMPLES[name][0]).build()(IMAGE)
    assert torch.equal(IMAGE, before)


def test_flatten_leaves_one_dimension() -> None:
    assert torch.equal(transform("flatten").build()(IMAGE), IMAGE.reshape(-1))


def test_one_channel_becomes_three_equal_ones() -> None:
    grey = IMAGE[:1]
    assert torch.equal(transform("rgb").build()(grey), grey.expand(3, -1, -1))


def test_interpolation_is_chosen_by_name() -> None:
    resized = transform("resize", size=[2, 2], interpolation="nearest").build()(IMAGE)
    assert torch.equal(resized, v2.Resize([2, 2], interpolation=v2.InterpolationMode.NEAREST)(IMAGE))


@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - {"flatten", "to_dtype"}))
def test_what_works_on_images_takes_nothing_else(name: str) -> None:
    assert misfit(name, (64,), **EXAMPLES[name][0]) == "it takes an image [C, H, W]"
    assert misfit(name, (3, 8, 8), **EXAMPLES[name][0]) is None


@pytest.mark.parametrize("name", ["flatten", "to_dtype"])
def test_some_take_any_sample(name: str) -> None:
    assert misfit(name, (64,), **EXAMPLES[name][0]) is None


@pytest.mark.parametrize("name", ["rgb", "grayscale", "color_jitter"])
def test_colours_are_one_channel_or_three(name: str) -> None:
    assert misfit(name, (2, 8, 8)) == "it takes images of 1 or 3 channels"
    assert misfit(name, (1, 8, 8)) is None


def test_statistics_are_as_many_as_channels() -> None:
    assert misfit("normalize", (3, 8, 8), mean=[0], std=[1]) == "the number of means is 1"


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("resize", {}, "size"),
        ("resize", {"size": 0}, "size"),
        ("resize", {"size": [8]}, "size"),
        ("resize", {"size": 8, "interpolation": "linear"}, "interpolation"),
        ("random_crop", {"size": 8, "padding": -1}, "padding"),
        ("random_resized_crop", {"size": 8, "scale": [1, 0.5]}, "scale"),
        ("random_resized_crop", {"size": 8, "ratio": [0, 1]}, "ratio"),
        ("random_horizontal_flip", {"p": 1.5}, "p"),
        ("random_rotation", {"degrees": -1}, "degrees"),
        ("random_rotation", {"degrees": [1, -1]}, "degrees"),
        ("color_jitter", {"brightness": -1}, "brightness"),
        ("color_jitter", {"hue": 0.6}, "hue"),
        ("grayscale", {"num_output_channels": 2}, "num_output_channels"),
        ("normalize", {"mean": [0], "std": [0]}, "std"),
        ("normalize", {"mean": [], "std": []}, "std"),
        ("normalize", {"mean": [0, 0], "std": [1]}, ""),
        ("to_dtype", {"dtype": "float"}, "dtype"),
    ],
)
def test_impossible_arguments_are_refused(name: str, args: dict[str, Any], key: str) -> None:
    parsed, problems = parse(TRANSFORMS[name], args, name)
    assert parsed is None
    assert f"{name}.{key}".rstrip(".") in [problem.where.removesuffix(".0") for problem in problems]
