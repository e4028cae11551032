"""The experiments on trained names: which heads and positions carry the answer, in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hookrun
from hookrun.cli import main

SMALL = ("compute.threads=1", "compute.device=cpu")
JOBS = ("vars.layer=1", "vars.head=0,3")

pytestmark = pytest.mark.usefixtures("no_pages", "names_model")


def jobs(*words: str) -> dict[tuple[str, ...], dict[str, float]]:
    """The last line of metrics.jsonl of each job of a sweep, by what was swept."""
    known = set(Path("multirun").glob("*"))
    assert main(["-m", *words, *SMALL]) == 0
    (folder,) = set(Path("multirun").glob("*")) - known
    found = {}
    for job in sorted(folder.glob("[0-9]*")):
        run = hookrun.open_run(job)
        swept = run.config["vars"]
        found[str(swept["layer"]), str(swept.get("head", swept.get("position")))] = run.metrics[-1]
    return found


def test_heads_and_positions_of_one_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    silenced = jobs("experiment=lm/head_ablation", *JOBS)
    assert len(silenced) == 2
    model = next(Path("outputs/needs").glob("*/*/status.json")).parent
    trained = [line for line in hookrun.open_run(model).metrics if line["split"] == "val"][-1]
    assert trained["accuracy"] > 0.95
    assert all(line["kl"] > 0 for line in silenced.values())
    assert max(line["loss"] for line in silenced.values()) > 2 * trained["loss"]
    averaged = jobs("experiment=lm/mean_ablation", *JOBS)
    assert averaged.keys() == silenced.keys() and averaged != silenced
    patched = jobs("experiment=lm/patch_residual", "vars.layer=0,1", "vars.position=-5,-1")
    differences = {place: line["logit_difference"] for place, line in patched.items()}
    assert differences["1", "-5"] < -4, "in the corrupted sentence the model names the wrong one"
    assert patched["1", "-1"]["kl"] == pytest.approx(0, abs=1e-6), (
        "the last layer at the last token decides all"
    )
    assert differences["1", "-1"] > 4
    assert differences["0", "-5"] > differences["0", "-1"] + 4, (
        "the name that comes again is read where it stands"
    )
    runs = list(Path("outputs/needs").glob("*/*/status.json"))
    assert len(runs) == 2, "the model is trained once for all jobs of all sweeps, and so is the clean run"


def test_what_the_model_would_predict_after_each_layer(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def lens(*more: str) -> list[dict[str, Any]]:
        few = ("train.limit_batches=1", "data.batch_size=16", "task.tokens=-1")
        assert main(["experiment=lm/logit_lens", *SMALL, *few, *more]) == 0
        return [line for line in hookrun.open_run("outputs/latest").metrics if "module" in line]

    stream = lens()
    assert [line["module"] for line in stream] == ["embed", "blocks.0.resid_post", "blocks.1.resid_post"]
    assert stream[0]["kl"] > stream[1]["kl"] > 0.1 > stream[2]["kl"] == pytest.approx(0, abs=1e-6)
    assert stream[2]["accuracy"] > 0.9 > 0.5 > stream[0]["accuracy"]
    parts = lens("task.parts=heads")
    assert len(parts) == 2 + 2 * (4 + 1 + 1) + 1, "embeddings; heads, their bias and MLP in each layer; bias"
    total = sum(line["logit_difference"] for line in parts)
    assert total == pytest.approx(stream[2]["logit_difference"], abs=1e-4)
