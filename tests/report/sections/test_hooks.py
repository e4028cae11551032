"""What each hook recorded and captured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hookrun.report import write_report


def test_every_kind_of_picture(observed: Path, page) -> None:
    found = page(observed)
    for title in [
        "loss", "accuracy", "gradient norm", "gradient norm by layer", "mean, train mode", "std, eval mode",
        "distribution", "mean of 256 rows", "rows", "distribution over steps", "norm of the captured gradient",
    ]:  # fmt: skip
        assert f"<figcaption><span>{title}</span>" in found.source, title
    assert "of 64 units dead" in found.text
    assert found.tags.count("svg") > 15 and "shape=[64, 10]" in found.text


def test_activations_of_convolutions_are_pictures(run, page) -> None:
    path = run("experiment=tutorial/13_visualise_activations", "model=tutorial/activations")
    found = page(path)
    assert found.source.count("<span>activation maps</span>") == 2
    assert "channels 0–9" in found.text and "each 4 × 4" in found.text
    assert found.text.count("sample 358") >= 2
    assert found.source.count('alt="the input"') == 8, "beside each row of maps"


def test_the_records_of_an_unknown_action_are_shown(observed: Path, tmp_path: Path, page) -> None:
    """Numbers as a chart over steps, everything else as lines; the plan's hook type may be unknown too."""
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    plan = (path / "plan.json").read_text()
    (path / "plan.json").write_text(plan.replace('"optimizer_step_pre"', '"of_the_future"'))
    context = {"hook": "norms", "module": "fc", "path": "", "action": "rank", "mode": "train", "epoch": 0}
    with (path / "stats.jsonl").open("a") as file:
        for step in range(4):
            record = {**context, "step": step, "call": 0}
            file.write(json.dumps({**record, "rank": step}) + "\n")
            file.write(json.dumps({**record, "largest": "fc.weight"}) + "\n")
    write_report(path)
    found = page(path)
    assert "<span>rank</span>" in found.source and "largest=fc.weight" in found.text
    assert "of_the_future, stats on 6 modules" in found.text
