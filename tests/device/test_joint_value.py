"""Every action on every hook type, on samples with large values only, does the same as on the CPU, or is refused."""

from __future__ import annotations

import pytest
import torch
from joint_outcomes import assert_equal, refusal, trained
from joint_table import Row, rows

KEYS = {"when": {"value": {"of": "mean", "above": 0}}}


def spec_of(row: Row) -> dict[str, dict[str, object]]:
    spec: dict[str, object] = {**row.spec["h"], **KEYS}
    if row.hook == "backward" and row.action in ("capture", "print"):
        spec["target"] = "grad_input[0]"  # which of the tensors that they see chooses the samples
    return {"h": spec}


OF_SEVERAL = {"expert_load"}
"""Actions on several tensors at once, none of which chooses the samples."""
TAKEN = [
    row for row in rows() if row.action not in OF_SEVERAL and refusal(spec_of(row), row.network()) is None
]


def test_most_rows_are_not_refused() -> None:
    assert len(TAKEN) > 50


@pytest.mark.parametrize("row", TAKEN, ids=lambda row: f"{row.action}-{row.hook}")
def test_a_hook_does_the_same_as_on_the_cpu(row: Row, device: torch.device) -> None:
    spec = spec_of(row)
    found = trained(row.network(), spec, device)
    assert_equal(found, trained(row.network(), spec, device if row.action == "noise" else "cpu"))
