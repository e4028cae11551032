"""The hook tutorials are experiments, all of them: each row has one, it runs as a command, the README names it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.testing import assert_close

import hookrun
from hookrun.compose.compose import compose_dict
from hookrun.tasks import parse_experiment, prepare

ROOT = Path(__file__).parents[2]
NAMES = sorted(file.stem for file in (ROOT / "conf/experiment/tutorial").glob("*.yaml"))
SMALL = ("compute.threads=1", "compute.device=cpu", "strict=true")


def test_every_row_has_an_experiment_and_a_test_that_runs_it() -> None:
    assert sorted({int(name[:2]) for name in NAMES}) == list(range(1, 23))
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_tutorials_of_*.py"))
    rows = re.findall(r"(?:tutorial|in_memory|under_hooks)\((\d+)", tests)
    assert {int(row) for row in rows} == set(range(1, 23))
    assert [name for name in NAMES if name.startswith("21")] == [
        f"21_saved_tensors_{form}" for form in ("smaller", "to_cpu", "to_disk")
    ], "the test of row 21 runs these"


@pytest.mark.parametrize("name", NAMES)
def test_a_row_can_be_run_on_its_own_model_and_data(name: str) -> None:
    prepared = prepare(parse_experiment(compose_dict([f"experiment=tutorial/{name}", *SMALL])))
    assert all(hook.matches for hook in prepared.plan.hooks) and prepared.plan.hooks


def readme_rows() -> list[tuple[str, str]]:
    """The README's table: a hook, where it is spelled out, and the experiment that it is in."""
    lines = (ROOT / "README.md").read_text().splitlines()
    return [
        (found[1], found[2])
        for line in lines
        if (found := re.fullmatch(r"\| .* \| (.*) \| `(\d\d_\w+)` \|", line))
    ]


def test_the_readme_has_every_row_and_its_hooks_are_those_of_the_experiments() -> None:
    assert [int(name[:2]) for _, name in readme_rows()] == list(range(1, 23))
    for cell, name in readme_rows():
        if cell.startswith("`{"):
            hooks = yaml.safe_load((ROOT / f"conf/experiment/tutorial/{name}.yaml").read_text())["hooks"]
            assert yaml.safe_load(cell.strip("`")) in hooks.values(), name


def test_it_runs_as_a_command_and_a_hook_that_prints_changes_nothing(tmp_path: Path, model_of) -> None:
    command = [sys.executable, "-m", "hookrun", "experiment=tutorial/01_print_gradient", *SMALL]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "print_b  b  value=[0.2, 0.2, 0.2, 0.2, 0.2]" in done.stdout.splitlines()
    run = hookrun.open_run(tmp_path / "outputs/latest")
    assert run.status["status"] == "done"
    plain = model_of("tutorial/doubling")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    plain().mean().backward()
    optimizer.step()
    weights = load_file(run.path / "checkpoints/last.safetensors")
    assert_close(weights, dict(plain.state_dict()), rtol=0, atol=0)
