"""A constructor's arguments: what is known before it is called, and the errors that it raises itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st
from torch import nn

from hookrun.errors import Problem, SpecError
from hookrun.models.arguments import (
    FROM_DATA,
    DataDefaults,
    ModelCall,
    construct,
    given,
)

sizes = st.one_of(st.just(-1), st.integers(1, 64))
samples = st.builds(
    DataDefaults,
    st.one_of(st.none(), st.lists(sizes, max_size=4).map(tuple)),
    st.one_of(st.none(), st.integers(1, 1000)),
)


@examples(samples)
def test_arguments_from_the_data_are_positive_and_missing_ones_have_a_reason(sample: DataDefaults) -> None:
    values = sample.values()
    assert set(values) <= set(FROM_DATA)
    for name in set(FROM_DATA) - set(values):
        assert sample.lack(name)
    for value in values.values():
        assert all(each > 0 for each in (value if isinstance(value, tuple) else [value]))


@examples(st.lists(st.integers(1, 64), max_size=4).map(tuple))
def test_in_features_counts_the_numbers_of_a_sample(shape: tuple[int, ...]) -> None:
    assert DataDefaults(shape, None).values()["in_features"] == math.prod(shape)


def test_channels_and_size_are_those_of_images_only() -> None:
    assert DataDefaults((3, 4, 5), 7).values() == {
        "num_classes": 7,
        "in_features": 60,
        "in_channels": 3,
        "image_size": (4, 5),
    }
    assert set(DataDefaults((4, 5), 7).values()) == {"num_classes", "in_features"}
    assert DataDefaults((3, -1, -1), None).values() == {"in_channels": 3}
    assert DataDefaults((-1, 4, 5), None).values() == {"image_size": (4, 5)}


def test_only_arguments_that_the_data_can_supply_may_be_null() -> None:
    assert given({"num_classes": None, "in_channels": 3, "dropout": None}) == {
        "in_channels": 3,
        "dropout": None,
    }


def test_a_call_with_problems_is_never_made() -> None:
    called: list[bool] = []
    call = ModelCall(lambda: called.append(True), {}, (Problem("model.args.x", "wrong"),))
    with pytest.raises(SpecError, match="wrong"):
        construct(call, "net")
    assert called == []


def test_a_constructor_s_error_is_shown_with_its_arguments() -> None:
    with pytest.raises(SpecError) as caught:
        construct(
            ModelCall(nn.Conv2d, {"in_channels": 3, "out_channels": 4, "kernel_size": 1, "groups": 2}), "net"
        )
    [problem] = caught.value.errors
    assert problem.where == "model.args"
    assert "in_channels=3" in problem.what
    assert "ValueError: in_channels must be divisible by groups" in problem.what
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_call_must_return_a_module() -> None:
    with pytest.raises(SpecError, match=r"'net' returned list, not a torch\.nn\.Module"):
        construct(ModelCall(list, {}), "net")
