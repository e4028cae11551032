"""Every action on every hook type, on a part of each tensor and on every second step, does the same as on the CPU."""

from __future__ import annotations

import pytest
import torch
from joint_outcomes import assert_equal, refusal, trained
from joint_table import Row, rows

EVERY = {"when": {"step": {"every": 2}}}
PART = {"index": "..., 0:2", **EVERY}
OF_WHOLE = {"linear", "project", "expert_load", "sparse_autoencoder"}
"""Actions whose parameters have the size of the whole tensor, or that see scores of all experts."""


def spec_of(row: Row, keys: dict[str, object]) -> dict[str, dict[str, object]]:
    return {"h": {**row.spec["h"], **keys}}


def is_taken(row: Row, keys: dict[str, object]) -> bool:
    return refusal(spec_of(row, keys), row.network()) is None


IN_PART = [(row, PART) for row in rows() if row.action not in OF_WHOLE and is_taken(row, PART)]
_PARTS = [row for row, _ in IN_PART]
WHOLE = [(row, EVERY) for row in rows() if row not in _PARTS and is_taken(row, EVERY)]


def test_most_rows_take_a_part() -> None:
    assert len(IN_PART) > 100
    assert len(WHOLE) > 10


@pytest.mark.parametrize(
    ("row", "keys"),
    IN_PART + WHOLE,
    ids=lambda each: f"{each.action}-{each.hook}" if isinstance(each, Row) else "",
)
def test_a_hook_does_the_same_as_on_the_cpu(row: Row, keys: dict[str, object], device: torch.device) -> None:
    spec = spec_of(row, keys)
    found = trained(row.network(), spec, device)
    assert_equal(found, trained(row.network(), spec, device if row.action == "noise" else "cpu"))
