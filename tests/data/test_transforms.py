"""Transforms by name: torchvision's own, with arguments that are checked first and samples that are checked too."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from hookrun.data.info import TensorInfo
from hookrun.data.pipeline import Pipeline
from hookrun.data.transforms import NAMES, Transform, make_transform
from hookrun.errors import Problem, SpecError

# An example of each, and torchvision's equivalent; a test checks that the list is complete.
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
    made, problems = make_transform(name, args, f"data.transforms.{name}")
    assert problems == []
    assert made is not None
    return made


def misfit(name: str, shape: tuple[int, ...], **args: Any) -> str | None:
    return transform(name, **args).misfit(TensorInfo(shape, torch.float32))


def test_every_transform_has_its_example() -> None:
    assert set(EXAMPLES) == set(NAMES)


@pytest.mark.parametrize("name", [name for name, (_, theirs) in EXAMPLES.items() if theirs])
def test_a_transform_is_torchvisions_own_under_the_same_randomness(name: str) -> None:
    args, theirs = EXAMPLES[name]
    ours = transform(name, **args).function
    assert theirs is not None
    for seed in range(3):
        torch.manual_seed(seed)
        expected = theirs(IMAGE)
        torch.manual_seed(seed)
        assert torch.equal(ours(IMAGE), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_transform_pickles_for_worker_processes(name: str) -> None:
    built = transform(name, **EXAMPLES[name][0]).function
    again = pickle.loads(pickle.dumps(built))
    torch.manual_seed(0)
    expected = built(IMAGE)
    torch.manual_seed(0)
    assert torch.equal(again(IMAGE), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_transform_leaves_its_input_as_it_was(name: str) -> None:
    before = IMAGE.clone()
    transform(name, **EXAMPLES[name][0]).function(IMAGE)
    assert torch.equal(IMAGE, before)


def test_flatten_leaves_one_dimension() -> None:
    assert torch.equal(transform("flatten").function(IMAGE), IMAGE.reshape(-1))


def test_one_channel_becomes_three_equal_ones() -> None:
    grey = IMAGE[:1]
    assert torch.equal(transform("rgb").function(grey), grey.expand(3, -1, -1))


def test_interpolation_is_chosen_by_name() -> None:
    resized = transform("resize", size=[2, 2], interpolation="nearest").function(IMAGE)
    assert torch.equal(resized, v2.Resize([2, 2], interpolation=v2.InterpolationMode.NEAREST)(IMAGE))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"flatten", "to_dtype"}))
def test_transforms_of_images_refuse_other_samples(name: str) -> None:
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


def refused(name: str, args: dict[str, Any]) -> Problem:
    made, problems = make_transform(name, args, name)
    assert made is None
    (problem,) = problems
    return problem


def test_statistics_are_refused_where_only_one_of_both_fits() -> None:
    assert misfit("normalize", (3, 8, 8), mean=[0, 0, 0], std=[1]) == "the number of stds is 1"


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("resize", {}, "size"),
        ("resize", {"size": 0}, "size"),
        ("resize", {"size": True}, "size"),
        ("resize", {"size": 8, "interpolation": "linear"}, "interpolation"),
        ("random_crop", {"size": 8, "padding": -1}, "padding"),
        ("random_crop", {"size": 8, "fill": {"others": 1}}, "fill"),
        ("random_resized_crop", {"size": 8, "scale": [-1, 1]}, "scale.0"),
        ("random_rotation", {"degrees": "30"}, "degrees"),
        ("color_jitter", {"hue": float("nan")}, "hue"),
        ("grayscale", {"num_output_channels": 2.5}, "num_output_channels"),
        ("normalize", {"mean": [0], "std": [-1]}, "std.0"),
        ("to_dtype", {"dtype": "float"}, "dtype"),
        ("to_dtype", {"dtype": {"others": "float16"}}, "dtype"),
        ("flatten", {"start_dim": 1}, "start_dim"),
    ],
)
def test_arguments_that_do_not_fit_the_signature_are_refused_by_name(
    name: str, args: dict[str, Any], key: str
) -> None:
    assert refused(name, args).where == f"{name}.{key}"


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("resize", {"size": [8, 8, 8]}, "size can be"),
        (
            "random_resized_crop",
            {"size": 8, "scale": [1, 0.5]},
            "Scale and ratio should be of kind (min, max)",
        ),
        ("random_horizontal_flip", {"p": 1.5}, "`p` should be"),
        ("random_rotation", {"degrees": -1}, "must be positive"),
        ("color_jitter", {"brightness": -1}, "brightness"),
        ("color_jitter", {"hue": 0.6}, "hue values should be between"),
    ],
)
def test_values_that_torchvisions_constructor_refuses_are_reported_in_its_words(
    name: str, args: dict[str, Any], said: str
) -> None:
    problem = refused(name, args)
    assert problem.where == name
    assert said in problem.what


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("resize", {"size": 8, "interpolation": "box"}),
        ("random_resized_crop", {"size": 8, "ratio": [0, 1]}),
        ("random_rotation", {"degrees": [1, -1]}),
        ("grayscale", {"num_output_channels": 2}),
        ("normalize", {"mean": [0, 0, 0], "std": [1, 0, 1]}),
        ("normalize", {"mean": [], "std": []}),
    ],
)
def test_values_that_torchvision_refuses_only_on_a_sample_are_found_without_one(
    name: str, args: dict[str, Any]
) -> None:
    pipeline = Pipeline("data.transforms", {name: transform(name, **args)})
    with pytest.raises(SpecError, match=f"data.transforms.{name}: does not fit"):
        pipeline.fit(TensorInfo((3, 16, 16), torch.float32))


@pytest.mark.parametrize(
    ("name", "argument"),
    [("normalize", "inplace"), ("random_rotation", "expand")],
)
def test_arguments_that_would_break_a_data_set_are_left_out(name: str, argument: str) -> None:
    args = EXAMPLES[name][0] | {argument: True}
    assert refused(name, args).what == "unknown key"


@pytest.mark.parametrize("name", ["Resize", "Lambda", "lambda", "__class__", "functional", "Compose"])
def test_no_other_name_is_a_transform(name: str) -> None:
    assert refused(name, {"lambd": "print"}).what == "unknown transform"


@pytest.mark.parametrize("name", NAMES)
def test_a_callable_or_a_class_is_never_an_argument(name: str) -> None:
    for key in EXAMPLES[name][0]:
        for value in (print, torch.Tensor, "os.system"):
            assert refused(name, EXAMPLES[name][0] | {key: value}).where == f"{name}.{key}"


def test_every_argument_of_torchvision_that_yaml_can_hold_is_taken() -> None:
    ours = transform("random_rotation", degrees=30, center=[1.0, 2.0], fill=[0.1, 0.2, 0.3]).function
    theirs = v2.RandomRotation(30, center=[1.0, 2.0], fill=[0.1, 0.2, 0.3])
    torch.manual_seed(0)
    expected = theirs(IMAGE)
    torch.manual_seed(0)
    assert torch.equal(ours(IMAGE), expected)
