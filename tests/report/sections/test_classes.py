"""The confusion matrix and the worst samples."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import hookrun
from hookrun.report import write_report


def test_the_confusion_matrix_and_the_worst_samples_equal_the_files(run, page, tmp_path: Path) -> None:
    path = run("task=evaluate")
    lines = [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]
    right = sum(line["class"] == line["predicted_class"] for line in lines)
    metrics = hookrun.open_run(path).metrics[-1]
    assert right / len(lines) == metrics["accuracy"]
    mean = sum(line["loss"] for line in lines) / len(lines)
    assert mean == pytest.approx(metrics["loss"], rel=1e-5)
    found = page(path)
    assert (
        f"val: {right} of {len(lines)} samples classified correctly, {len(lines) - right} mis" in found.text
    )
    cells = re.findall(
        r'class="on-\w+">([\w.]*)<', found.source.split("<span>confusion matrix", 1)[1].split("</figure>")[0]
    )
    assert sum(map(int, cells)) == len(lines)
    worst = max(lines, key=lambda line: line["loss"])
    first = found.source.split('class="worst"')[1].split("</li>")[0]
    assert f"val sample {worst['sample']}" in first and "data:image/png;base64," in first
    evil = {"split": "val", "sample": 0, "png": 'x" onerror="alert(1)'}
    copy = tmp_path / "run"
    shutil.copytree(path, copy)
    (copy / "pictures.jsonl").write_text(json.dumps(evil))
    (copy / "samples.jsonl").write_text(
        json.dumps({**lines[0], "class": "<script>1</script>", "predicted_class": "\u202e", "file": "<b>"})
    )
    write_report(copy)
    assert page(copy).tags.count("script") == 1 and 'onerror="' not in page(copy).source
