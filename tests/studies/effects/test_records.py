"""effects.safetensors of a stranger: tensors that do not fit its axes are an error that names the file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hookrun.store.files import StoreError
from hookrun.studies.effects.records import Effects, read_effects, write_effects

AXES = {"module": ["a", "b"], "heads": [0, 1, 2]}
WHOLE = {
    "exact": torch.rand(2, 3),
    "exact_samples": torch.rand(2, 3, 4),
    "unedited": torch.tensor(0.5),
    "unedited_samples": torch.rand(4),
}


def written(folder: Path, **tensors: Tensor) -> Path:
    write_effects(folder, Effects(WHOLE | tensors, AXES, range(4), {"hook": "h", "metric": "loss"}))
    return folder


def test_effects_that_fit_are_read_back(tmp_path: Path) -> None:
    effects = read_effects(written(tmp_path))
    assert effects is not None
    assert torch.equal(effects["exact"], WHOLE["exact"])
    assert effects.strongest().endswith("without the hook 0.5")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("exact_samples", torch.rand(2, 3, 5)),
        ("unedited", torch.rand(2, 3)),
        ("clean", torch.rand(0)),
        ("unedited_samples", torch.rand(3)),
        ("clean_samples", torch.tensor(0.5)),
        ("unedited_samples", torch.ones(4, dtype=torch.bool)),
        ("unedited", torch.tensor(1)),
        ("exact_samples", torch.zeros(2, 3, 4).to(torch.float8_e4m3fn)),
    ],
)
def test_a_tensor_of_another_shape_or_kind_is_an_error(name: str, tensor: Tensor, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"effects.safetensors does not describe its axes: {name} "):
        read_effects(written(tmp_path, **{name: tensor}))


def of_cells(*values: float) -> Effects:
    """The effects of three settings of one hook on a loss that is 0.5 without it."""
    tensors = {"exact": torch.tensor(values, dtype=torch.float64), "unedited": torch.tensor(0.5)}
    return Effects(tensors, {"factor": [0, 1, 2]}, range(4), {"hook": "h", "metric": "loss"})


def test_the_largest_effect_keeps_its_sign() -> None:
    largest = of_cells(0.6, 0.1, 0.8).largest()
    assert largest is not None
    assert (largest.cell, largest.value, largest.ties) == ("factor=1", 0.1, 0)
    assert largest.change == pytest.approx(-0.4)


def test_ties_for_the_largest_effect_are_counted() -> None:
    tied = of_cells(0.4, 0.5 - 0.3, 0.8 + 1e-9)
    largest = tied.largest()
    assert largest is not None
    assert (largest.place, largest.ties) == (1, 1)
    assert tied.strongest().endswith("without the hook 0.5, tied with 1 other")
    every = of_cells(0.5, 0.5, 0.5).largest()
    assert every is not None
    assert (every.change, every.ties) == (0.0, 2)


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_cell_without_a_number_is_not_largest(lost: float) -> None:
    largest = of_cells(lost, 0.6, -lost).largest()
    assert largest is not None
    assert (largest.cell, largest.ties) == ("factor=1", 0)
    assert of_cells(lost, lost, lost).largest() is None
    assert "loss is not finite in any cell" in of_cells(lost, lost, lost).strongest()
