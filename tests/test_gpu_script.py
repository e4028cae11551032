"""scripts/gpu runs the tests of a device, says what it found, and fails where something failed."""

from __future__ import annotations

import json
from pathlib import Path

import gpu
import pytest
import torch

WAITS = "tests/device/test_waits.py"


@pytest.mark.takes_long
def test_the_second_device_is_checked(tmp_path: Path, capsys) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device", "second", "--tests", WAITS, "--no-bench", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "passed" in said
    assert said.splitlines()[-1] == "all well on second"
    found = json.loads(out.read_text())
    assert [(part["name"], part["result"]) for part in found["parts"]] == [
        ("tests", "ok"),
        ("two GPUs", "left out"),
    ]


def test_a_failed_test_ends_the_check_with_1(tmp_path: Path, capsys) -> None:
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_it():\n    assert 'here' == 'there'\n")
    assert gpu.main(["--device", "second", "--tests", str(failing), "--no-bench"]) == 1
    said = capsys.readouterr().out
    assert "assert 'here' == 'there'" in said
    assert said.splitlines()[-1] == "failed on second: tests"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the machine has an accelerator")
def test_a_device_that_is_not_there_is_told(capsys) -> None:
    assert gpu.main([]) == 2
    assert "this machine has no accelerator, not cuda" in capsys.readouterr().err


def test_a_part_that_takes_too_long_is_stopped() -> None:
    code, said, _ = gpu.run(["-c", "import threading; threading.Event().wait()"], "second", 1)
    assert code == 124
    assert "stopped after 1 s" in said


def test_all_parts_together_take_less_than_eight_minutes() -> None:
    assert sum(gpu.LIMITS.values()) < 8 * 60
