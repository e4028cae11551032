"""A pipeline knows the shape and dtype of its results before it has samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookrun.data.info import TensorInfo
from hookrun.data.pipeline import Pipeline, parse_transforms
from hookrun.errors import Problem, SpecError

WHERE = "data.transforms"
ANY_IMAGE = TensorInfo((3, -1, -1), torch.float32)


def pipeline(**transforms: Any) -> Pipeline:
    parsed, problems = parse_transforms(transforms, WHERE)
    assert problems == []
    return parsed


def misfits(sample: TensorInfo, **transforms: Any) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        pipeline(**transforms).fit(sample)
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
def test_the_predicted_shape_is_that_of_a_real_sample(
    transforms: dict[str, Any], channels: int, height: int, width: int
) -> None:
    last = {
        name: transforms.pop(name) for name in ("flatten",) if name in transforms
    }  # the others take images
    steps = pipeline(**transforms, **last)
    fitted = steps.fit(TensorInfo((channels, height, width), torch.float32))
    sample = torch.rand(channels, height, width)
    for step in steps.build():
        sample = step(sample)
    assert fitted == TensorInfo(tuple(sample.shape), sample.dtype)


def test_without_transforms_a_sample_is_unchanged() -> None:
    sample = TensorInfo((64,), torch.int64)
    assert pipeline().fit(sample) == sample
    assert pipeline().fit({"a": sample}) == {"a": sample}


def test_order_matters() -> None:
    mean = {"mean": [0, 0, 0], "std": [1, 1, 1]}
    grey = TensorInfo((1, 8, 8), torch.float32)
    assert pipeline(rgb={}, normalize=mean).fit(grey) == TensorInfo((3, 8, 8), torch.float32)
    assert [p.where for p in misfits(grey, normalize=mean, rgb={})] == [f"{WHERE}.normalize"]


def test_a_misfit_names_the_transform_and_the_sample_that_reaches_it() -> None:
    (problem,) = misfits(TensorInfo((1, 8, 8), torch.float32), flatten=None, resize={"size": 4})
    assert problem.where == f"{WHERE}.resize"
    assert problem.what == "does not fit a sample [64] float32: it takes an image [C, H, W]"


def test_what_torchvision_refuses_is_reported_in_its_words() -> None:
    (problem,) = misfits(TensorInfo((1, 8, 8), torch.float32), random_crop={"size": 9})
    assert problem.where == f"{WHERE}.random_crop"
    assert "larger than input image size (8, 8)" in problem.what


def test_statistics_do_not_fit_integers() -> None:
    (problem,) = misfits(TensorInfo((1, 8, 8), torch.uint8), normalize={"mean": [0], "std": [1]})
    assert problem.where == f"{WHERE}.normalize"


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
    assert pipeline(**transforms).fit(ANY_IMAGE) == TensorInfo((3, 4, 6), torch.float32)


@pytest.mark.parametrize("transforms", [{}, {"resize": {"size": 6}}, {"flatten": {}}])
def test_images_that_stay_of_different_sizes_are_refused_with_advice(transforms: dict[str, Any]) -> None:
    (problem,) = misfits(ANY_IMAGE, **transforms)
    assert problem.where == WHERE
    assert "resize: {size: [224, 224]}" in problem.hint


def test_inputs_by_name_take_no_transforms() -> None:
    inputs = {"a": TensorInfo((3, 8, 8), torch.float32), "b": TensorInfo((), torch.int64)}
    with pytest.raises(SpecError, match="the data has several: a, b"):
        pipeline(rgb={}).fit(inputs)


def test_fitting_does_not_change_torchs_random_state() -> None:
    before = torch.get_rng_state()
    pipeline(random_crop={"size": 4}, color_jitter={"hue": 0.1}).fit(ANY_IMAGE)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_transforms_are_repeated_with_the_same_seed() -> None:
    (crop,) = pipeline(random_crop={"size": 4}).build()
    image = torch.rand(3, 16, 16)
    torch.manual_seed(5)
    first = [crop(image) for _ in range(4)]
    torch.manual_seed(5)
    assert all(torch.equal(crop(image), each) for each in first)
    assert not all(torch.equal(each, first[0]) for each in first)


def test_all_mistakes_are_reported_together() -> None:
    given = {"resiz": {}, "resize": {"sise": 1}, "grayscale": {"num_output": 1}, "flatten": None}
    parsed, problems = parse_transforms(given, WHERE)
    assert list(parsed.transforms) == ["flatten"]
    assert problems == [
        Problem(f"{WHERE}.resiz", "unknown transform", "did you mean 'resize'?"),
        Problem(f"{WHERE}.resize.size", "is missing", "add `size:`"),
        Problem(f"{WHERE}.resize.sise", "unknown key", "did you mean 'size'?"),
        Problem(f"{WHERE}.grayscale.num_output", "unknown key", "did you mean 'num_output_channels'?"),
    ]
