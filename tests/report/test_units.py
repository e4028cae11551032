"""Inactive units are named."""

from __future__ import annotations

import torch

from hookrun.report.units import idle_units


def test_dead_saturated_and_constant_units_are_named() -> None:
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).tanh()
    rows[:, 1], rows[:, 3], rows[:, 5] = 0, 0.25, 1
    rows[:39, 2] = 1
    found = {units.what: units.which for units in idle_units(rows, "Tanh")}
    assert found == {"dead": (1,), "saturated": (2, 5), "constant": (3, 5)}
    assert "saturated" not in {units.what for units in idle_units(rows, "Linear")}


def test_the_units_of_pictures_are_channels() -> None:
    rows = torch.randn(10, 4, 3, 3, generator=torch.Generator().manual_seed(0)).relu()
    rows[:, 2] = 0
    [units] = idle_units(rows, "ReLU")
    assert (units.what, units.kind, units.which, units.total) == ("dead", "channel", (2,), 4)


def test_a_few_rows_are_not_enough() -> None:
    assert idle_units(torch.zeros(3, 5), "ReLU") == []
