"""Two studies are removed with their folders: the rest of the product, and its tests, do not notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REMOVED = ("attribute", "lens")
TESTS = (
    "tests/command/test_schema.py",
    "tests/compatibility/test_public.py",
    "tests/conf/test_conf.py",
    "tests/run/tasks/test_registry.py",
    "tests/store/test_records.py",
    "tests/test_imports.py",
)
pytestmark = pytest.mark.takes_long
NOT_RUN = (
    "names_are_the_listed",  # the list has the removed tasks
    "can_be_changed_to_plan or task_is_noted or decides_by_the_name",  # slow
)


def test_the_tests_of_the_rest_pass(checkout: Path) -> None:
    left_out = f"not ({' or '.join(NOT_RUN)})"
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-k", left_out]
    done = started(checkout, "-m", "pytest", *options, *TESTS)
    assert done.returncode == 0, done.stdout[-3_000:]


def test_the_rest_says_what_is_missing(checkout: Path) -> None:
    done = started(checkout, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert "has no study with lens_of()" in done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without the folders of two studies, their tests, and the configurations of their tasks."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("hookrun", "conf", "tests", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    for study in REMOVED:
        shutil.rmtree(folder / "hookrun/studies" / study)
        shutil.rmtree(folder / "tests/studies" / study)
        (folder / "conf/task" / f"{study}.yaml").unlink()
    for file in (folder / "conf/experiment").rglob("*.yaml"):
        if task_of(file) in REMOVED:
            file.unlink()
    return folder


def task_of(file: Path) -> str | None:
    """The task that an experiment overrides, if it does."""
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    for entry in content.get("defaults", ()):
        if isinstance(entry, dict) and "override /task" in entry:
            return str(entry["override /task"])
    return None


def started(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=environment)


PROGRAM = """
import sys
import hookrun
from hookrun.cli import main

assert main(["task=attribute"]) == 2
assert main(["experiment=clip_fc", "train.steps=1", "train.limit_batches=1", "hydra.run.dir=run"]) == 0
run = hookrun.open_run("run")
assert run.generations == []
assert "Run it again" in (run.path / "report.html").read_text()
try:
    run.lens
except hookrun.HookrunError as error:
    print(error, file=sys.stderr)
"""
