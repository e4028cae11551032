"""The experiments on trained names: which heads and positions carry the answer, in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import hookrun
from hookrun.store.effects import Effects


def test_heads_and_positions_of_one_trained_model(shipped) -> None:
    silenced: Effects = shipped("lm/head_ablation").effects
    model = next(Path("outputs/needs").glob("*/*/status.json")).parent
    trained = [line for line in hookrun.open_run(model).metrics if line["split"] == "val"][-1]
    assert trained["accuracy"] > 0.95
    assert silenced.axes == {"module": ["blocks.0.attn.z", "blocks.1.attn.z"], "heads": [0, 1, 2, 3]}
    assert silenced["unedited"] > 4 and silenced["exact"].min() < silenced["unedited"] - 1
    averaged: Effects = shipped("lm/mean_ablation").effects
    assert averaged.axes == silenced.axes and not averaged["exact"].equal(silenced["exact"])
    patched: Effects = shipped("lm/patch_residual").effects
    cells = {(cell["module"][7], cell["tokens"]): cell for cell in patched.cells()}
    assert cells["1", -5]["exact"] < -4, "in the corrupted sentence the model names the wrong one"
    assert cells["1", -1]["restored"] == pytest.approx(1, abs=1e-6), (
        "the last layer at the last token decides all"
    )
    assert cells["1", -1]["exact"] > 4
    assert cells["0", -5]["exact"] > cells["0", -1]["exact"] + 4, (
        "the name that comes again is read where it stands"
    )
    names: Effects = shipped("lm/name_map").effects
    assert names["placebo"].shape == (8, 2, 4)
    estimates: Effects = shipped("lm/attribution_patching").effects
    assert estimates["gradient"].shape == (2, len(estimates.axes["tokens"]))
    runs = list(Path("outputs/needs").glob("*/*/status.json"))
    assert len(runs) == 2, "the model is trained once for all runs, and so is the clean run"


def test_the_direction_of_a_repeated_name_is_what_the_answer_needs(shipped) -> None:
    """Of the trained model, which is right in over 95 % without the hook: see the test above."""

    def accuracy(*more: str) -> float:
        return float(shipped("lm/refusal_direction", *more).metrics[-1]["accuracy"])

    assert accuracy() < 0.7
    assert accuracy("+hooks.remove.remove=false") < 0.1


def test_what_the_model_would_predict_after_each_layer(shipped) -> None:
    few = ("train.limit_batches=1", "data.batch_size=16", "task.tokens=-1")
    stream = [line for line in shipped("lm/logit_lens", *few).metrics if "module" in line]
    assert [line["module"] for line in stream] == ["embed", "blocks.0.resid_post", "blocks.1.resid_post"]
    assert stream[0]["kl"] > stream[1]["kl"] > 0.1 > stream[2]["kl"] == pytest.approx(0, abs=1e-6)
    assert stream[2]["accuracy"] > 0.9 > 0.5 > stream[0]["accuracy"]
