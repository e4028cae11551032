"""The recipes of hookrun/README.md, followed to the letter in a copy of the package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "hookrun" / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"^(?:# |<!-- )(\S+?)(?: -->)?\n")

Run = Callable[[str], subprocess.CompletedProcess[str]]


def recipe(title: str) -> str:
    """The text below a heading, down to the next one."""
    return README.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """Kind, file and content of each code block; a command has no file."""
    for kind, content in BLOCK.findall(text):
        place = PLACE.match(content)
        assert place or kind == "sh", f"a block of {kind} does not say which file it is"
        yield kind, place.group(1) if place else "", content[place.end() :] if place else content


def patched(old: str, change: str) -> str:
    """A text with the lines that `change` adds, each after the line before it in the change."""
    lines = old.splitlines()
    for hunk in change.split("@@\n"):
        at = -1
        for line in hunk.splitlines():
            if line.startswith("+"):
                lines.insert(at := at + 1, line[1:])
            else:
                at = lines.index(line[1:], at + 1)
    return "\n".join(lines) + "\n"


def follow(title: str, checkout: Path) -> list[str]:
    """Add the files of a recipe to a checkout; its commands."""
    commands = []
    for kind, file, content in blocks(recipe(title)):
        path = checkout / file
        if kind == "sh":
            commands.append(content.strip())
        elif kind == "diff":
            path.write_text(patched(path.read_text(encoding="utf-8"), content), encoding="utf-8")
        elif file == "hookrun/hook_types.py":
            before, marker, after = path.read_text(encoding="utf-8").partition("\n\ndef _by_name(")
            path.write_text(f"{before}\n{content}{marker}{after}", encoding="utf-8")
        else:
            assert not path.exists(), f"{file} is there already"
            path.write_text(content, encoding="utf-8")
    return commands


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its configuration."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("hookrun", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def run(checkout: Path, tmp_path: Path) -> Run:
    """Runs one command of a recipe on the copy, in a directory of its own."""

    def run(command: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "hookrun"]
        done = subprocess.run(
            [sys.executable, *words[1:], "compute.device=cpu"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_an_action(checkout: Path, run: Run, tmp_path: Path) -> None:
    (command,) = follow("Add an action", checkout)
    done = run(command)
    assert "soft (forward, soft_clamp) fired: relu1 x1" in done.stdout
    assert "changed" in done.stdout
    wrong = [sys.executable, "-m", "hookrun", "hooks=soft_clamp", "hooks.soft.limit=0", "task=plan"]
    refused = subprocess.run(
        wrong, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(checkout)}, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "hooks.soft.limit" in refused.stderr


def test_a_hook_type(checkout: Path, run: Run, tmp_path: Path) -> None:
    (command,) = follow("Add a hook type", checkout)
    done = run(command)
    assert "running (buffers, stats) fired: bn1 x" in done.stdout
    (records,) = tmp_path.glob("outputs/2*/stats.jsonl")
    assert '"path": "running_mean"' in records.read_text(encoding="utf-8")


def test_a_selector_form(checkout: Path, run: Run) -> None:
    (command,) = follow("Add a selector form", checkout)
    shown = run(command).stdout
    assert "conv1" in shown and "(root)" not in shown


def test_a_task(checkout: Path, run: Run) -> None:
    (command,) = follow("Add a task", checkout)
    assert re.search(r"^val +seconds", run(command).stdout, re.MULTILINE)


def test_a_report_section(checkout: Path, run: Run, tmp_path: Path) -> None:
    (command,) = follow("Add a report section", checkout)
    run(command)
    (page,) = tmp_path.glob("outputs/2*/report.html")
    text = page.read_text(encoding="utf-8")
    assert 'href="#machine"' in text
    assert "torch: <code>2." in text
