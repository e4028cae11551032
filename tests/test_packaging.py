"""The package contains all it needs: code, configuration and the command, from a wheel and from a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[1]
CONF = {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
SUFFIXES = {".c", ".py", ".html", ".css", ".js", ".svg"}
CODE = {
    path.relative_to(ROOT).as_posix() for path in (ROOT / "hookrun").rglob("*") if path.suffix in SUFFIXES
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), "standard")


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it, and nothing else."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "install", "--no-index", "--no-deps", "--no-compile", "--target", target, wheel]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def test_a_wheel_holds_package_with_configuration_only(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "hookrun/conf/config.yaml" in names
    assert names == CODE | {f"hookrun/{name}" for name in CONF} | {"hookrun/py.typed", "hookrun/AGENTS.md"}


def test_an_editable_install_points_at_the_checkout(tmp_path: Path) -> None:
    editable = zipfile.ZipFile(build_wheel(tmp_path, "editable"))
    names = [name for name in editable.namelist() if ".dist-info/" not in name]
    assert [editable.read(name).decode().strip() for name in names] == [str(ROOT)]


def test_a_source_distribution_can_be_tested_from(tmp_path: Path) -> None:
    with tarfile.open(next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path)))) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert names >= CODE | CONF | {
        "pyproject.toml", "LICENSE", "README.md", "scripts/test", "tests/test_packaging.py",
    }  # fmt: skip


def test_the_installed_command_is_the_command_line(site: Path) -> None:
    distribution = PathDistribution(next(site.glob("hookrun-*.dist-info")))
    assert {(each.group, each.name, each.value) for each in distribution.entry_points} == {
        ("console_scripts", "hookrun", "hookrun.cli:main"),
        ("inspect_ai", "hookrun", "hookrun.integrations.inspect_ai"),
    }
    assert (site / "bin/hookrun").exists()


def test_an_installed_hookrun_finds_its_own_configuration(site: Path, tmp_path: Path) -> None:
    """From an empty folder, with the checkout out of reach; the module and the command behave alike."""
    where = run_from(site, tmp_path, sys.executable, "-c", "import hookrun; print(hookrun.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(site)
    module = run_from(site, tmp_path, sys.executable, "-m", "hookrun", "--cfg", "job", "experiment=clip_fc")
    command = run_from(
        site, tmp_path, sys.executable, site / "bin/hookrun", "--cfg", "job", "experiment=clip_fc"
    )
    assert module.returncode == 0
    assert module.stderr == ""
    assert "clip_fc:" in module.stdout
    assert command.returncode == 0
    assert command.stdout == module.stdout
    assert list(tmp_path.iterdir()) == []


def build_wheel(folder: Path, version: str) -> Path:
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=[version])))


def run_from(site: Path, folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
