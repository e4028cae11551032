"""Transforms by name: torchvision's own, with arguments that are checked first and samples that are checked too."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2

from hookrun.data.info import InputsInfo, TensorInfo
from hookrun.data.transforms import NAMES, Transform, after_transforms, make_transform, parse_transforms
from hookrun.errors import Problem, SpecError

# An example of each, and torchvision's equivalent; a test checks that the list is complete.
EXAMPLES: dict[str, tuple[dict[str, Any], torch.nn.Module]] = {
    "resize": (
        {"size": [4, 6], "interpolation": "nearest"},
        v2.Resize([4, 6], interpolation=v2.InterpolationMode.NEAREST),
    ),
    "center_crop": ({"size": 4}, v2.CenterCrop(4)),
    "random_crop": ({"size": 4, "padding": 2}, v2.RandomCrop(4, padding=2)),
    "random_resized_crop": ({"size": 4, "scale": [0.5, 1]}, v2.RandomResizedCrop(4, scale=[0.5, 1])),
    "random_horizontal_flip": ({"p": 0.7}, v2.RandomHorizontalFlip(0.7)),
    "random_rotation": (
        {"degrees": [-30, 60], "center": [1.0, 2.0], "fill": [0.1, 0.2, 0.3]},
        v2.RandomRotation([-30, 60], center=[1.0, 2.0], fill=[0.1, 0.2, 0.3]),
    ),
    "color_jitter": (
        {"brightness": 0.5, "contrast": [0.5, 2], "saturation": 0.3, "hue": 0.1},
        v2.ColorJitter(0.5, [0.5, 2], 0.3, 0.1),
    ),
    "rgb": ({}, v2.RGB()),
    "grayscale": ({"num_output_channels": 3}, v2.Grayscale(3)),
    "normalize": ({"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]}, v2.Normalize([0.1, 0.2, 0.3], [1, 2, 3])),
    "flatten": ({}, torch.nn.Flatten(0)),
    "to_dtype": ({"dtype": "uint8", "scale": True}, v2.ToDtype(torch.uint8, scale=True)),
}
IMAGE = torch.rand(3, 8, 10, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_transforms_equal_torchvision_s_own(name: str) -> None:
    args, theirs = EXAMPLES[name]
    ours = pickle.loads(pickle.dumps(transform(name, **args).function))  # as for worker processes
    before = IMAGE.clone()
    for seed in range(3):
        torch.manual_seed(seed)
        expected = theirs(IMAGE)
        torch.manual_seed(seed)
        assert torch.equal(ours(IMAGE), expected)
    assert torch.equal(IMAGE, before)


@pytest.mark.parametrize("name", NAMES)
def test_transforms_of_images_refuse_other_samples(name: str) -> None:
    takes_any = name in ("flatten", "to_dtype")
    args = EXAMPLES[name][0]
    assert misfit(name, (64,), **args) == (None if takes_any else "it takes an image [C, H, W]")
    assert misfit(name, (3, 8, 8), **args) is None


def test_channels_must_fit_the_statistics() -> None:
    for name in ("rgb", "grayscale", "color_jitter"):
        assert misfit(name, (2, 8, 8)) == "it takes images of 1 or 3 channels"
        assert misfit(name, (1, 8, 8)) is None
    assert misfit("normalize", (3, 8, 8), mean=[0], std=[1]) == "the number of means is 1"
    assert misfit("normalize", (3, 8, 8), mean=[0, 0, 0], std=[1]) == "the number of stds is 1"


def refused(name: str, args: dict[str, Any]) -> Problem:
    with pytest.raises(SpecError) as caught:
        make_transform(name, args, "")
    (problem,) = caught.value.errors
    return problem


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("normalize", {"mean": [0], "std": [1], "inplace": True}, "inplace"),  # would change the data set
        ("random_rotation", {"degrees": 9, "expand": True}, "expand"),  # each sample would have another size
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
def test_arguments_outside_the_signature_are_refused_by_name(
    name: str, args: dict[str, Any], key: str
) -> None:
    assert refused(name, args).where == key


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        *((name, {}, "unknown transform") for name in ("Resize", "Lambda", "lambda", "__class__", "Compose")),
        ("resize", {"size": [8, 8, 8]}, "size can be"),
        ("random_resized_crop", {"size": 8, "scale": [1, 0.5]}, "Scale and ratio should be"),
        ("random_horizontal_flip", {"p": 1.5}, "`p` should be"),
        ("random_rotation", {"degrees": -1}, "must be positive"),
        ("color_jitter", {"brightness": -1}, "brightness"),
        ("color_jitter", {"hue": 0.6}, "hue values should be between"),
    ],
)
def test_values_that_torchvision_refuses_are_errors(name: str, args: dict[str, Any], said: str) -> None:
    problem = refused(name, args)
    assert problem.where == ""
    assert said in problem.what


@pytest.mark.parametrize("name", NAMES)
def test_a_callable_or_a_class_is_never_an_argument(name: str) -> None:
    for key in EXAMPLES[name][0]:
        for value in (print, torch.Tensor, "os.system"):
            assert refused(name, EXAMPLES[name][0] | {key: value}).where == key


WHERE = "data.transforms"
ANY_IMAGE = TensorInfo((3, -1, -1), torch.float32)


def fitted(sample: InputsInfo, /, **transforms: Any) -> InputsInfo:
    return after_transforms(parse_transforms(transforms, WHERE), sample, WHERE)


def misfits(sample: TensorInfo, **transforms: Any) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        fitted(sample, **transforms)
    return caught.value.errors


SIZES = st.one_of(st.integers(1, 12), st.lists(st.integers(1, 12), min_size=2, max_size=2))
STEPS = st.fixed_dictionaries(
    {},
    optional={
        "resize": st.fixed_dictionaries({"size": SIZES}),
        "center_crop": st.fixed_dictionaries({"size": SIZES}),
        "random_resized_crop": st.fixed_dictionaries({"size": SIZES}),
        "random_crop": st.fixed_dictionaries({"size": SIZES, "pad_if_needed": st.just(True)}),
        "random_rotation": st.fixed_dictionaries({"degrees": st.integers(0, 90)}),
        "color_jitter": st.fixed_dictionaries({"brightness": st.floats(0, 1), "hue": st.floats(0, 0.5)}),
        "grayscale": st.fixed_dictionaries({"num_output_channels": st.sampled_from([1, 3])}),
        "rgb": st.none(),
        "to_dtype": st.fixed_dictionaries({"dtype": st.sampled_from(["float64", "float16"])}),
        "flatten": st.none(),
    },
)


@given(STEPS, st.sampled_from([1, 3]), st.integers(2, 12), st.integers(2, 12))
def test_the_predicted_shape_is_that_of_a_real_sample(transforms, channels, height, width) -> None:
    flatten = [name for name in transforms if name == "flatten"]  # last: the others take images
    steps = parse_transforms(
        {name: transforms[name] for name in (*(transforms.keys() - {"flatten"}), *flatten)}, WHERE
    )
    predicted = after_transforms(steps, TensorInfo((channels, height, width), torch.float32), WHERE)
    sample = torch.rand(channels, height, width)
    for step in steps.values():
        sample = step.function(sample)
    assert predicted == TensorInfo(tuple(sample.shape), sample.dtype)


GREY = TensorInfo((1, 8, 8), torch.float32)
TO_ZERO = {"mean": [0, 0, 0], "std": [1, 1, 1]}


def test_transforms_apply_in_order_to_one_input() -> None:
    assert fitted(GREY, rgb={}, normalize=TO_ZERO) == TensorInfo((3, 8, 8), torch.float32)
    assert fitted(GREY) == GREY
    assert fitted({"a": GREY}) == {"a": GREY}
    with pytest.raises(SpecError, match="the data has several: a, b"):
        fitted({"a": GREY, "b": GREY}, rgb={})


@pytest.mark.parametrize(
    ("transforms", "where", "said"),
    [
        ({"normalize": TO_ZERO, "rgb": {}}, "normalize", "the number of means is 3"),
        ({"flatten": None, "resize": {"size": 4}}, "resize", "a sample [64] float32: it takes an image"),
        ({"random_crop": {"size": 9}}, "random_crop", "larger than input image size (8, 8)"),
        ({"to_dtype": {"dtype": "uint8"}, "normalize": {"mean": [0], "std": [1]}}, "normalize", "not fit"),
        # values that torchvision refuses when it meets a sample
        ({"resize": {"size": 4, "interpolation": "box"}}, "resize", "not fit"),
        ({"random_resized_crop": {"size": 8, "ratio": [0, 1]}}, "random_resized_crop", "not fit"),
        ({"random_rotation": {"degrees": [1, -1]}}, "random_rotation", "not fit"),
        ({"grayscale": {"num_output_channels": 2}}, "grayscale", "not fit"),
        ({"normalize": {"mean": [0], "std": [0]}}, "normalize", "not fit"),
        ({"normalize": {"mean": [], "std": []}}, "normalize", "not fit"),
    ],
)
def test_a_misfit_names_the_transform(transforms: dict[str, Any], where: str, said: str) -> None:
    (problem,) = misfits(GREY, **transforms)
    assert problem.where == f"{WHERE}.{where}"
    assert said in problem.what


@pytest.mark.parametrize(
    "transforms",
    [
        {"resize": {"size": [4, 6]}},
        {"resize": {"size": 6}, "center_crop": {"size": [4, 6]}},
        {"random_crop": {"size": [4, 6]}},
        {"random_resized_crop": {"size": [4, 6]}, "color_jitter": {"hue": 0.1}},
    ],
)
def test_images_of_any_size_become_images_of_one_size(transforms: dict[str, Any]) -> None:
    assert fitted(ANY_IMAGE, **transforms) == TensorInfo((3, 4, 6), torch.float32)


@pytest.mark.parametrize("transforms", [{}, {"resize": {"size": 6}}, {"flatten": {}}])
def test_images_of_different_sizes_are_refused_with_advice(transforms: dict[str, Any]) -> None:
    (problem,) = misfits(ANY_IMAGE, **transforms)
    assert problem.where == WHERE
    assert "resize: {size: [224, 224]}" in problem.hint


def test_fitting_does_not_change_torchs_random_state() -> None:
    before = torch.get_rng_state()
    fitted(ANY_IMAGE, random_crop={"size": 4}, color_jitter={"hue": 0.1})
    assert torch.equal(torch.get_rng_state(), before)


def transform(name: str, **args: Any) -> Transform:
    return make_transform(name, args, f"data.transforms.{name}")


def misfit(name: str, shape: tuple[int, ...], **args: Any) -> str | None:
    return transform(name, **args).misfit(TensorInfo(shape, torch.float32))
