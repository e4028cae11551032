"""scripts/bench device counts what makes the host wait, and where."""

from __future__ import annotations

import pytest
import torch
from benchmarks.waits import Count, of_step, shown

second_device = pytest.importorskip("second_device")


def reading(x: torch.Tensor) -> torch.Tensor:
    """Waits for the device once."""
    return x * x.abs().max().item()


def test_a_hook_that_reads_a_number_waits_once_at_that_line() -> None:
    hook = {"select": "block.0", "hook": "forward", "action": "python", "function": reading}
    found = of_step(second_device.watch, hook)
    assert found is not None
    waits, uploads, places = found
    assert waits == 1
    assert uploads == 0
    (place,) = places
    assert place.startswith("tests/device/test_bench.py:")


def test_a_hook_that_only_computes_does_not_wait() -> None:
    hook = {"select": "block.0", "hook": "forward", "action": "scale", "factor": 0.5}
    assert of_step(second_device.watch, hook) == (0, 0, ())


def test_a_hook_that_does_not_fit_is_not_counted() -> None:
    hook = {
        "select": "block.0",
        "hook": "forward",
        "action": "project",
        "direction": [1, 2],
        "index": "..., 0:3",
    }
    assert of_step(second_device.watch, hook) is None


def test_the_table_has_a_line_for_each_waiting_step() -> None:
    text = shown([Count("clamp", 0, 1, ("a.py:1",)), Count("scale", 0, 0), Count("stats", 0, 0)])
    assert "| clamp | 0 | 1 | a.py:1 |" in text
    assert text.endswith("no wait and no upload: scale; stats")
