"""The page of a sweep draws a statistic by depth, one line a job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from made_curves import Shown, made_run, planned, record

from hookrun.report import write_report
from hookrun.report.sections import depth
from hookrun.report.sweep_facts import read_sweep

MODULES = ["conv1", "conv2", "fc"]


def job(folder: Path, number: int, modules: list[str] = MODULES) -> None:
    """A job whose means are 100 * job + 10 * module + step, in two epochs; its records are in another order."""
    records = []
    for step in range(4):
        for place, module in reversed(list(enumerate(modules))):
            values = {"mean": 100 * number + 10 * place + step, "histogram": {"counts": [1], "edges": [0, 1]}}
            records.append({**record("seen", module, step, **values), "epoch": step // 2})
    path = made_run(folder / str(number), records, [planned("seen", modules)])
    (path / ".hydra").mkdir()
    (path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([f"train.lr=0.{number}", "model=cnn"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        job(tmp_path, number)
    return tmp_path


def test_each_job_is_a_line_over_the_modules(folder: Path) -> None:
    [(title, [figure])] = depth.build(read_sweep(folder))
    assert title.startswith("mean by depth, seen")
    assert figure.table
    assert figure.table.heads == ("module", "0: lr=0.0", "1: lr=0.1", "2: lr=0.2")
    means = [[100 * number + 10 * place + 2.5 for number in range(3)] for place in range(3)]
    expected = [(module, *map("{:g}".format, row)) for module, row in zip(MODULES, means, strict=True)]
    assert list(figure.table.rows) == expected, "in the model's order, of the last epoch"


def test_a_single_module_has_no_depth(tmp_path: Path) -> None:
    for number in range(2):
        job(tmp_path, number, ["fc"])
    assert depth.build(read_sweep(tmp_path)) == []
    assert 'id="depth"' not in write_report(tmp_path).read_text()


def test_jobs_with_other_modules_have_a_chart_of_their_own(folder: Path) -> None:
    job(folder, 3, ["conv1", "fc"])
    drawn = depth.build(read_sweep(folder))
    tables = [figure.table for _, figures in drawn for figure in figures]
    assert [[row[0] for row in table.rows] for table in tables if table] == [MODULES, ["conv1", "fc"]]


def test_many_jobs_are_folded(tmp_path: Path) -> None:
    for number in range(50):
        job(tmp_path, number)
    page = Shown(write_report(tmp_path).read_text())
    assert page.open_curves == 8
    assert page.open_curves + page.folded_curves == depth.MOST_JOBS
    assert "The first 40 of 50 jobs" in page.source


def test_several_statistics_have_a_chooser(folder: Path) -> None:
    text = (folder / "0" / "stats.jsonl").read_text()
    (folder / "0" / "stats.jsonl").write_text(text.replace('"mean"', '"std": 0.5, "mean"'))
    page = write_report(folder).read_text()
    names = re.findall(r"<summary>(\w+) by depth", page)
    assert names == ["std", "mean"]
    assert page.count('<div class="samples" data-noun="statistic">') == 1


def test_what_a_job_has_broken_leaves_the_others(folder: Path) -> None:
    (folder / "0" / "plan.json").write_text("{")
    (folder / "1" / "stats.jsonl").write_text('{"hook": 1}\n[]\n"<b>"\n{"mean": ')
    with (folder / "2" / "stats.jsonl").open("a") as file:
        file.write("x" * depth.MOST_BYTES)
    [(_, [figure])] = depth.build(read_sweep(folder))
    assert figure.table
    assert figure.table.heads == ("module", "0: lr=0.0")
    assert [row[0] for row in figure.table.rows] == MODULES[::-1], "the order of its records, without a plan"
