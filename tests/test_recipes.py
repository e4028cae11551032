"""The recipes of hookrun/README.md, followed exactly in a package of one's own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "hookrun" / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"^(?:# |<!-- )(\S+?)(?: -->)?\n")


TITLES = {
    "action": "Add an action",
    "hook type": "Add a hook type",
    "selector form": "Add a selector form",
    "task": "Add a task",
    "report section": "Add a report section",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Done]:
    """All recipes, followed in one package, which is installed beside hookrun; its configuration is a --config-dir."""
    package = tmp_path_factory.mktemp("package")
    folder = tmp_path_factory.mktemp("runs")
    install(package)
    options = ["--config-dir", str(package / "conf"), "compute.device=cpu"]
    commands = {"wrong": ["hooks=soft_clamp", "hooks.soft.limit=0", "task=plan", *options]}
    for name, title in TITLES.items():
        (command,) = follow(title, package)
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "hookrun"]
        commands[name] = [*words[3:], *options]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )

    def done(name: str) -> Done:
        found = Done(folder / name)
        assert (found.folder / "code").exists(), ended.stderr
        assert found.code == (2 if name == "wrong" else 0), found.err
        return found

    return done


def test_an_action(done: Callable[[str], Done]) -> None:
    found = done("action")
    assert "soft (forward, soft_clamp) fired: relu1 x1" in found.out
    assert "changed" in found.out
    assert "hooks.soft.limit" in done("wrong").err


def test_a_hook_type(done: Callable[[str], Done]) -> None:
    found = done("hook type")
    assert "running (buffers, stats) fired: bn1 x" in found.out
    assert '"path": "running_mean"' in found.file("stats.jsonl")


def test_a_selector_form(done: Callable[[str], Done]) -> None:
    shown = done("selector form").out
    assert "conv1" in shown
    assert "(root)" not in shown


def test_a_task(done: Callable[[str], Done]) -> None:
    assert re.search(r"^val +seconds", done("task").out, re.MULTILINE)


def test_a_report_section(done: Callable[[str], Done]) -> None:
    page = done("report section").file("report.html")
    assert 'href="#machine"' in page
    assert "torch: <code>2." in page


def recipe(title: str) -> str:
    """The text below a heading, down to the next one."""
    return README.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """Kind, file and content of each code block; a command has no file."""
    for kind, content in BLOCK.findall(text):
        place = PLACE.match(content)
        assert place or kind == "sh", f"a block of {kind} does not say which file it is"
        yield kind, place.group(1) if place else "", content[place.end() :] if place else content


def follow(title: str, folder: Path) -> list[str]:
    """Write the files of a recipe into a folder; returns its commands."""
    commands = []
    for kind, file, content in blocks(recipe(title)):
        if kind == "sh":
            commands.append(content.strip())
            continue
        path = folder / file
        assert not path.exists(), f"{file} is there already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return commands


def install(folder: Path) -> None:
    """Do what pip does with the pyproject.toml of the recipes: write down the package's name and its entry points."""
    ((_, file, content),) = blocks(README.split("## Recipes\n", 1)[1].split("\n### ", 1)[0])
    assert file == "pyproject.toml"
    project = tomllib.loads(content)["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(about)
    (group, points), *_ = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {module}" for name, module in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


# Each command runs as `python -m hookrun`, with its output in files, in one process: most of its time is imports.
PROGRAM = """
import json, os, runpy, sys

for name, words in json.loads(sys.argv[1]).items():
    os.mkdir(name)
    os.chdir(name)
    for number, file in ((1, "out"), (2, "err")):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)
    sys.argv = ["hookrun", *words]
    try:
        runpy.run_module("hookrun", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush(), sys.stderr.flush()
    with open("code", "w") as file:
        file.write(str(code))
    os.chdir("..")
"""


@dataclass(frozen=True)
class Done:
    """The results of a recipe's command, in its own folder."""

    folder: Path

    @property
    def code(self) -> int:
        return int((self.folder / "code").read_text())

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def file(self, name: str) -> str:
        """The one file of that name in its run directory."""
        (found,) = self.folder.glob(f"outputs/2*/{name}")
        return found.read_text(encoding="utf-8")
