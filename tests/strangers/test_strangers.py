"""Models of others whose batches are no stack of equal rows: right, or refused.

Boxes in lists, and targets of some tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from strangers_by_hand import DETECTOR, MASKED, called
from torch.nn import functional as F

from hookrun.cli import main
from hookrun.store.reader import Run

Runs = Callable[..., Run]


# ---- masked words: scores [B, T, V], targets [B, T] ---------------------------------------------------------------


def test_cross_entropy_of_masked_words_is_torch_s(run: Runs) -> None:
    stranger = replace(MASKED, typed=("train.loss=cross_entropy",))
    found = run(stranger, "task=evaluate", "task.metrics=[loss,accuracy]").metrics[-1]
    model = stranger.model()
    losses = list[float]()
    right = list[torch.Tensor]()
    with torch.no_grad():
        for inputs, target in stranger.batches():
            output = called(model, inputs)
            asked = target != -100
            losses += F.cross_entropy(output[asked], target[asked], reduction="none").tolist()
            right.append(output.argmax(-1)[asked] == target[asked])
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["accuracy"] == pytest.approx(torch.cat(right).float().mean().item())


def test_cross_entropy_of_masked_words_trains(run: Runs) -> None:
    stranger = replace(MASKED, typed=("train.loss=cross_entropy",))
    training = ("train.epochs=8", "train.optimizer.lr=0.01", "train.log_every=1")
    losses = [line["loss"] for line in run(stranger, *training).metrics if line["split"] == "val"]
    assert losses[-1] < losses[0]


# ---- boxes in lists ------------------------------------------------------------------------------------------------


def test_effects_on_boxes_in_lists_are_those_by_hand_or_refused(tmp_path, capsys) -> None:
    hook = "+hooks.h={select: 'fine.0', hook: forward, action: scale, factor: 0.5}"
    typed = ["task=effects", "task.hook=h", "task.over={factor: [0.5]}", "task.metric=loss", hook]
    path = tmp_path / "effects"
    code = main([*DETECTOR.overrides, *typed, f"hydra.run.dir={path}"])
    if code:
        assert code == 2
        assert "task.metric" in capsys.readouterr().err
        assert not path.exists()
        return
    from hookrun import open_run

    model = DETECTOR.model()
    model.get_submodule("fine.0").register_forward_hook(lambda module, args, output: output * 0.5)
    assert open_run(path).effects["exact"].tolist() == pytest.approx([DETECTOR.plain(model)["loss"]])
