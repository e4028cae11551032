"""The engine loads no other room of hookrun, and its own tests pass where no other one can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PARTS = ("plan", "prove", "spec", "trust", "values", "runtime/hooks", "runtime/test_install.py")
"""Of tests/engine: those that take less than half a minute together; the others pass so as well."""

SLOW = ("in_another_process", "without_importing_torch")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_importing_the_engine_loads_no_other_room() -> None:
    program = (
        "import sys, hookrun.engine as engine\n"
        "early = 'torch' in sys.modules\n"
        "[getattr(engine, name) for name in engine.__all__]\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('hookrun.')}\n"
        "print(early, sorted(rooms))"
    )
    done = run("-c", program)
    assert done.stdout.strip() == "False ['engine', 'errors', 'version']"
    assert done.stderr == ""


@pytest.mark.takes_long
def test_the_engine_passes_its_own_tests_alone() -> None:
    files = [f"tests/engine/{part}" for part in PARTS]
    chosen = " and ".join(f"not {part}" for part in SLOW)
    done = run("-m", "pytest", "-n", "0", "-q", "--noconftest", "-p", "engine_alone", "-k", chosen, *files)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " failed" not in done.stdout
    assert " skipped" not in done.stdout
