"""Tensors and functions that Python passes in a spec: copied when the spec is read, compared and hashed by content."""

from __future__ import annotations

import copy

import pytest
import torch

from hookrun.actions.given import Given, GivenFunction, GivenTensor, given, kept, plain


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_tensor_is_copied_when_the_spec_is_read() -> None:
    mine = torch.arange(3.0, requires_grad=True)
    found = GivenTensor(mine)
    before = found.digest
    with torch.no_grad():
        mine.mul_(7)
    assert found.tensor.tolist() == [0, 1, 2] and not found.tensor.requires_grad
    assert found.digest == before == GivenTensor(torch.arange(3.0)).digest
    assert found != GivenTensor(mine) and found == GivenTensor(torch.arange(3.0))
    assert str(found) == "tensor[3] float32"


def test_equal_numbers_with_another_shape_or_dtype_are_a_different_value() -> None:
    values = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64), torch.zeros(4).int()]
    assert len({GivenTensor(each).digest for each in values}) == len(values)


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse()])
def test_a_tensor_that_cannot_be_copied_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected a dense tensor"):
        GivenTensor(tensor)


def test_a_function_is_identified_by_its_name_and_content() -> None:
    found = GivenFunction(double)
    assert found == GivenFunction(double) and hash(found) == hash(GivenFunction(double))
    assert "double" in str(found)
    factors = [GivenFunction(lambda x, by=by: x * by) for by in (2, 3)]
    assert factors[0] != factors[1], "a default is part of what it does"
    assert copy.deepcopy(found) is found and copy.copy(found) is found


def test_other_objects_are_not_accepted() -> None:
    assert given(3) is None and given("conv1") is None
    assert isinstance(given(double), GivenFunction) and isinstance(given(torch.zeros(1)), GivenTensor)
    again = given(double)
    assert given(again) is again
    with pytest.raises(TypeError, match="abstract"):
        Given()  # type: ignore[abstract]


def test_arguments_are_copied_and_serialized_as_data() -> None:
    mine = {"weights": [torch.ones(2)], "name": "a", "by": double}
    copied = kept(mine)
    mine["weights"][0].zero_()
    mine["weights"].append("more")
    assert copied["weights"][0].tolist() == [1, 1] and len(copied["weights"]) == 1 and copied["by"] is double
    assert plain(copied)["weights"][0]["tensor"] == [2]
    assert plain({"kind": int, "n": None, 3: (1, 2.5)}) == {"kind": "builtins:type", "n": None, "3": [1, 2.5]}
