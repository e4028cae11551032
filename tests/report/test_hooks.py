"""What each hook recorded and captured."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hookrun.report.sections.hooks import over_steps, statistics


def test_every_kind_of_picture(observed: Path, page) -> None:
    found = page(observed)
    for title in [
        "loss", "accuracy", "gradient norm", "gradient norm by layer", "mean, train mode", "std, eval mode",
        "distribution", "mean of 256 rows", "rows", "distribution over steps", "norm of the captured gradient",
    ]:  # fmt: skip
        assert f"<figcaption><span>{title}</span>" in found.source, title
    assert "of 64 units dead" in found.text
    assert found.tags.count("svg") > 15
    assert "shape=[64, 10]" in found.text


def test_activations_of_convolutions_are_pictures(convolved: Path, page) -> None:
    found = page(convolved)
    assert found.source.count("<span>activation maps</span>") == 1
    assert "channels 0–11 of 128" in found.text
    assert "each 4 × 4" in found.text
    assert "sample 63" in found.text
    assert found.source.count('alt="the input"') == 4, "beside each row of maps"


def test_the_records_of_an_unknown_action_are_shown(copied_run: Path, remade) -> None:
    """Numbers as a chart over steps, everything else as lines; the plan's hook type may be unknown too."""
    plan = copied_run / "plan.json"
    plan.write_text(plan.read_text().replace('"optimizer_step_pre"', '"of_the_future"'))
    context = {"hook": "norms", "module": "fc", "path": "", "action": "rank", "mode": "train", "epoch": 0}
    with (copied_run / "stats.jsonl").open("a") as file:
        for step in range(4):
            record = {**context, "step": step, "call": 0}
            file.write(json.dumps({**record, "rank": step}) + "\n")
            file.write(json.dumps({**record, "largest": "fc.weight"}) + "\n")
    found = remade(copied_run)
    assert "<span>rank</span>" in found.source
    assert "largest=fc.weight" in found.text
    assert "of_the_future, stats on 6 modules" in found.text


def test_the_map_of_a_deep_net_names_the_outliers() -> None:
    points = {f"layers.{n}": ([0.0, 1.0], [10.0 ** (n - 205), 10.0 ** (n - 205)]) for n in range(206)}
    points["layers.3"] = ([0.0, 1.0], [0.0, 0.0])
    points["layers.4"] = ([0.0, 1.0], [1e-3, math.nan])
    points["layers.5"] = ([0.0, 1.0], [math.inf, 1e-3])
    [figure] = over_steps("gradient norm", points, "step", "norm", by_layer=True)
    encoded = re.search(r"base64,([\w+/=]+)", figure.picture)
    assert encoded
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded[1]))).convert("RGB")).astype(int)
    assert picture.shape[:2] == (206, 2)
    greys = len({tuple(pixel) for pixel in picture[6:, 0]})
    assert greys > 100, "a colour for each magnitude"
    assert len({tuple(picture[row, column]) for row, column in ((3, 0), (4, 1), (5, 0))}) == 3
    assert figure.scale
    for name in ("exactly 0", "NaN", "infinite"):
        assert name in figure.scale
    said = "\n".join(figure.facts)
    assert "largest: layers.205 1 (step 0), layers.204 0.1 (step 0)" in said
    assert "exactly 0 throughout, 1 layer: layers.3" in said
    assert "NaN from step 1, 1 layer: layers.4" in said
    assert "infinite from step 0, 1 layer: layers.5" in said
    many = {f"m{n}": ([0.0, 1.0], [1.0, float(n == 998)]) for n in range(999)}
    [figure] = over_steps("gradient norm", many, "step", "norm", by_layer=True)
    assert "a row is the largest of 3 layers" in figure.note
    assert "--rows:333;" in figure.picture
    assert "m0 … m2" in figure.picture
    assert "m990 … m992" in figure.picture, "names where there is room"


def test_each_rank_has_a_curve_of_its_own_rows() -> None:
    start = {"hook": "h", "module": "fc", "path": "", "action": "stats", "mode": "train"}
    records = [{**start, "step": step, "of_rank": rank, "mean": 1.0} for rank in (0, 1) for step in (0, 1)]
    [figure] = statistics(records, {"fc": 0}, are_gradients=False)
    assert figure.table
    assert figure.table.heads == ("step", "fc, rank 0", "fc, rank 1")


def test_a_hook_that_never_fired_is_shown_first(observed: Path, page) -> None:
    found = page(observed)
    assert "1 hook matched but did nothing late never fired on fc" in found.text
    assert found.source.index("matched but did nothing") < found.source.index('id="summary"')


def test_a_budget_that_was_used_up_is_noted(observed: Path, page) -> None:
    said = "few captured nothing after epoch 0, step 2 (eval mode): its max_bytes of 6,000 were used up"
    assert said in page(observed).text


@pytest.mark.parametrize(("policy", "ends"), [("error", "failed"), ("stop", "stopped")])
def test_a_failed_check_is_shown_first(run, page, policy: str, ends: str) -> None:
    checked = "select: [layers.0, fc], hook: forward, action: check, max: 0.1, when: {step: {start: 3}}"
    found = page(run("train.epochs=1", code=3, bound=f"{{{checked}, policy: {policy}}}"))
    assert f'class="stamp s-{ends}">{ends}<' in found.source
    assert "Failed checks: first bound at layers.0 (Linear), epoch 0, step 3" in found.text
