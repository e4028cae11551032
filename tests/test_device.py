"""The tests of tests/device, in two processes of their own, with the second device installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/device/test_*.py"))


PROCESSES = 2
"""One for each process of xdist; each takes several seconds to start."""


@pytest.mark.takes_long
@pytest.mark.parametrize("number", range(PROCESSES))
def test_the_second_device_equals_the_cpu(number: int) -> None:
    files = FILES[number::PROCESSES]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rfE", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "HOOKRUN_TEST_DEVICE": "second"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
