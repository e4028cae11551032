"""Whether all elements of several tensors are finite, for any dtype and layout, and counts of those that are not."""

from __future__ import annotations

import pytest
import torch

from hookrun.tasks.training.finite import all_finite, not_finite

WRONG = torch.tensor([1.0, torch.inf])
KINDS = {
    "float64": WRONG.double(),
    "float16": WRONG.half(),
    "complex": torch.complex(torch.zeros(2), WRONG),
    "sparse": WRONG.to_sparse(),
    "expanded": WRONG[1:].expand(3),
    "of a graph": WRONG.clone().requires_grad_(),
    "negative": torch.tensor([-torch.inf]),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_nonfinite_tensor_is_found_among_others_and_none_is_changed(kind: str) -> None:
    wrong, right, largest = KINDS[kind], torch.ones(2), torch.tensor([torch.finfo(torch.float32).max])
    assert not all_finite([right, wrong, largest]) and not all_finite([wrong])
    assert all_finite([right, torch.ones(2).double(), largest, torch.tensor([1, 2])]) and all_finite([])
    assert right.tolist() == [1, 1] and largest.item() == torch.finfo(torch.float32).max
    assert "1 infinite of" in not_finite(wrong) or kind == "expanded"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_result_does_not_depend_on_torch_s_defaults(dtype: torch.dtype) -> None:
    value = torch.ones(3, dtype=torch.float32)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            for each in (value, value[:1].expand(3)):
                assert all_finite([each]) and not all_finite([each, value, each / 0])
    finally:
        torch.set_default_dtype(torch.float32)


def test_nonfinite_elements_are_counted_in_containers_of_floats_only() -> None:
    value = [torch.tensor([torch.nan, 1, -torch.inf]), {"a": torch.tensor([torch.nan])}, torch.tensor([3])]
    assert not_finite(value) == "2 NaN and 1 infinite of 4 elements"
    assert not_finite(torch.ones(2)) == not_finite(torch.tensor([1])) == ""
