"""Every action on every hook type, on a part of each tensor only, does the same as on the CPU, or is refused."""

from __future__ import annotations

import pytest
import torch
from joint_outcomes import assert_equal, refusal, trained
from joint_table import Network, Row, rows

KEYS = {"index": "..., 0:2"}


def spec_of(row: Row) -> dict[str, dict[str, object]]:
    return {"h": {**row.spec["h"], **KEYS}}


OF_WHOLE = {"linear", "project"}
"""Actions whose parameters have the size of the whole tensor."""

TAKEN = [row for row in rows() if row.action not in OF_WHOLE and refusal(spec_of(row), Network()) is None]


def test_most_rows_are_not_refused() -> None:
    assert len(TAKEN) > 50


@pytest.mark.parametrize("row", TAKEN, ids=lambda row: f"{row.action}-{row.hook}")
def test_a_hook_does_the_same_as_on_the_cpu(row: Row, device: torch.device) -> None:
    spec = spec_of(row)
    found = trained(Network(), spec, device)
    assert_equal(found, trained(Network(), spec, device if row.action == "noise" else "cpu"))
