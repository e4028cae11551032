"""Probes and similarities."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from report_pages import table_rows

import hookrun


@pytest.mark.parametrize("task", ["probe", "similarity"])
def test_analyses_have_their_table_and_their_picture(run: Callable[..., Path], page, task: str) -> None:
    entry = "{select: [flatten, layers.1, fc], hook: forward, action: capture}"
    source = run("task=predict", seen=entry)
    path = run(f"task={task}", f"task.run={source}")
    found, lines = page(path), hookrun.open_run(path).metrics
    if task == "probe":
        rows = {cells[0]: cells[-2] for cells in table_rows(found.source, "analysis")}
        assert rows == {line["module"]: f"{line['accuracy']:.4g}" for line in lines}
        assert "chance" in found.text and found.tags.count("svg") == 1
    else:
        assert "linear CKA" in found.text and found.tags.count("img") == 1
        cells = re.findall(r'class="on-\w+">([\d.e-]+)<', found.source)
        assert [float(cell) for cell in cells] == [float(f"{line['cka']:.3g}") for line in lines]
