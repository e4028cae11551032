"""The README is short, and what it shows is what there is; likewise the changelog."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hookrun
from hookrun.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIVE_MINUTES = README.split("## Your own, in five minutes\n", 1)[1].split("\n## ", 1)[0]


def test_the_readme_has_at_most_14_kb() -> None:
    assert len(README.encode()) <= 14_000


@pytest.mark.usefixtures("_empty_folder")
def test_the_cell_of_a_notebook_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code = README.split("in a cell of a notebook:\n\n```python\n", 1)[1].split("```", 1)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert f"{names['run'].path}/report.html" in capsys.readouterr().out
    assert list(hookrun.runs().where(status="done").table()["experiment"]) == ["clip_fc"]


def test_the_experiment_that_is_explained_is_the_included_one(tmp_path: Path) -> None:
    shown = README.split("## One experiment", 1)[1].split("```yaml\n", 1)[1].split("```", 1)[0]
    included = (ROOT / "conf/experiment/clip_fc.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(shown) == yaml.safe_load(included)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/copied.yaml").write_text(shown)
    assert main(["--config-dir", str(tmp_path), "experiment=copied", "task=plan"]) == 0


def test_the_hooks_in_python_give_what_the_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    code = FIVE_MINUTES.split("```python\n", 1)[1].split("```", 1)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert "torch.Size([2, 512, 2, 2])" in capsys.readouterr().out
    fired = names["installed"].fired
    assert fired["features", "layer4"] == 1
    assert fired["halved", "layer1.0.relu"] == 2
    for module in names["model"].modules():
        assert not module._forward_hooks


@pytest.mark.usefixtures("_empty_folder")
def test_the_rows_of_the_page_are_exported_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "hookrun/store/README.md").read_text(encoding="utf-8")
    code = page.split("## Rows for other programs\n", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]
    exec(code, {})
    assert capsys.readouterr().out.endswith("torch.Size([64, 10])\n" * 2)
    assert Path("fc.parquet").is_file()
    assert len(list(Path("features").iterdir())) == 2


@pytest.fixture
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working directory, from which packages are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("mypkg.models", "mypkg"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_empty_folder")
def test_a_model_of_ones_own_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    files = re.findall(r"cat > (\S+) <<'EOF'\n(.*?)EOF\n", FIVE_MINUTES, re.DOTALL)
    assert [name for name, _ in files] == ["mypkg/models.py", "my_conf/experiment/mine.yaml"]
    for name, text in files:
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text(text)
    joined = FIVE_MINUTES.replace("\\\n", "")
    commands = re.findall(r"^python -m hookrun (--config-dir [^#\n]*)", joined, re.MULTILINE)
    trust = re.search(r"^export (HOOKRUN_TRUST)=(\w+)", FIVE_MINUTES, re.MULTILINE)
    assert trust
    assert len(commands) == 4
    monkeypatch.setenv(*trust.groups())
    for command in commands:
        assert main([*command.split(), "compute.device=cpu", "train.epochs=1"]) == 0, command
    rows = hookrun.open_run("outputs/latest").captures["features"]["encoder"]
    assert rows[0:100].shape == (100, 32)
    assert rows.sample_ids.equal(torch.arange(len(rows)))


def test_a_change_is_told_in_one_line() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ", 2)[1]
    title, *lines = filter(None, newest.splitlines())
    assert title.startswith((f"[{hookrun.__version__}]", "[Unreleased]"))
    assert [line for line in lines if not line.startswith(("- ", "### ")) or len(line) > 120] == []
