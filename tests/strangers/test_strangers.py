"""Models of others whose batches are no stack of equal rows: right, or refused.

Sequences first, as long as the batch is large; boxes in lists; nodes without a batch; targets of some tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from strangers_by_hand import DETECTOR, GRAPHS, MASKED, SEQUENCE, Stranger, called
from torch.nn import functional as F

from hookrun.cli import main
from hookrun.store.reader import Run

Runs = Callable[..., Run]
BOXES = replace(DETECTOR, collate="collate", args={"most": 3})
PREDICT = ("task=predict", "task.split=val")


def seen_at(stranger: Stranger, path: str) -> list[Any]:
    """What a plain forward hook sees in each batch of val."""
    model, seen = stranger.model(), list[Any]()
    model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        for inputs, _ in stranger.batches():
            called(model, inputs)
    return seen


# ---- sequences first: the batch is dimension 1 -------------------------------------------------------------------


@pytest.mark.parametrize("length", [6, 7])
def test_captures_of_sequences_first_are_rows_of_samples(length: int, run: Runs, capsys) -> None:
    stranger = replace(SEQUENCE, args={"length": length})  # a batch has 6 samples
    hook = "+hooks.seen={select: lstm, hook: forward, action: capture, target: '[0]'}"
    rows = run(stranger, *PREDICT, hook).captures["seen"]["lstm"]
    assert "batch dimension 1" in capsys.readouterr().out
    expected = torch.cat([output[0].transpose(0, 1) for output in seen_at(stranger, "lstm")])
    assert rows.sample_ids.tolist() == list(range(10))
    torch.testing.assert_close(rows[:], expected)


@pytest.mark.parametrize("length", [6, 7])
def test_kept_samples_of_sequences_first_are_samples(length: int, run: Runs) -> None:
    stranger = replace(SEQUENCE, args={"length": length})
    hook = "+hooks.seen={select: norm, hook: forward, action: capture, keep: {every: 3}}"
    rows = run(stranger, *PREDICT, hook).captures["seen"]["norm"]
    whole = torch.cat([output.transpose(0, 1) for output in seen_at(stranger, "norm")])
    assert rows.sample_ids.tolist() == [0, 3, 6, 9]
    torch.testing.assert_close(rows[:], whole[::3])


# ---- masked words: scores [B, T, V], targets [B, T] ---------------------------------------------------------------


def test_cross_entropy_of_masked_words_is_torch_s(run: Runs) -> None:
    stranger = replace(MASKED, typed=("train.loss=cross_entropy",))
    found = run(stranger, "task=evaluate", "task.metrics=[loss,accuracy]").metrics[-1]
    model, losses, right = stranger.model(), list[float](), list[torch.Tensor]()
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


def test_targets_of_different_sizes_are_collated_by_the_stranger_s_function(run: Runs) -> None:
    found = run(BOXES, "task=evaluate", BOXES.metrics).metrics[-1]
    assert [found["loss"], found["overlap"]] == pytest.approx(
        [*BOXES.plain(BOXES.model()).values()], rel=1e-5
    )
    hook = "+hooks.seen={select: score, hook: forward, action: capture, when: {call: 1}}"
    rows = run(BOXES, *PREDICT, hook).captures["seen"]["score"]
    torch.testing.assert_close(rows[:], torch.cat(seen_at(BOXES, "score")[1::2]))
    losses = [line["loss"] for line in run(BOXES, "train.steps=4", "train.log_every=1").metrics]
    assert len(losses) > 4 and all(loss > 0 for loss in losses)


def test_effects_on_boxes_in_lists_are_those_by_hand_or_refused(tmp_path, capsys) -> None:
    hook = "+hooks.h={select: 'fine.0', hook: forward, action: scale, factor: 0.5}"
    typed = ["task=effects", "task.hook=h", "task.over={factor: [0.5]}", "task.metric=loss", hook]
    path = tmp_path / "effects"
    code = main([*DETECTOR.overrides, *typed, f"hydra.run.dir={path}"])
    if code:
        assert code == 2 and "task.metric" in capsys.readouterr().err and not path.exists()
        return
    from hookrun import open_run

    model = DETECTOR.model()
    model.get_submodule("fine.0").register_forward_hook(lambda module, args, output: output * 0.5)
    assert open_run(path).effects["exact"].tolist() == pytest.approx([DETECTOR.plain(model)["loss"]])


# ---- graphs: nodes without a batch ---------------------------------------------------------------------------------


def test_graphs_are_listed_evaluated_and_trained(run: Runs, capsys) -> None:
    assert main([*GRAPHS.overrides, "task=modules"]) == 0
    assert "Passing" in capsys.readouterr().out
    found = run(GRAPHS, "task=evaluate", GRAPHS.metrics).metrics[-1]
    assert [found["loss"], found["accuracy"]] == pytest.approx(
        [*GRAPHS.plain(GRAPHS.model()).values()], rel=1e-5
    )
    lines = run(GRAPHS, "train.epochs=6", "train.optimizer.lr=0.02").metrics
    losses = [line["loss"] for line in lines if line["split"] == "val"]
    assert losses[-1] < losses[0]


def test_scores_of_graphs_are_rows_of_samples_and_nodes_are_not(run: Runs) -> None:
    heads = "+hooks.scores={select: head, hook: forward, action: capture}"
    nodes = "+hooks.nodes={select: layers.0, hook: forward, action: capture}"
    found = run(GRAPHS, *PREDICT, heads, nodes).captures
    assert found["scores"]["head"].sample_ids.tolist() == list(range(9))
    torch.testing.assert_close(found["scores"]["head"][:], torch.cat(seen_at(GRAPHS, "head")))
    assert set(found["nodes"]["layers.0"].sample_ids.tolist()) == {-1}
    torch.testing.assert_close(
        torch.cat([found["nodes"]["layers.0"][number] for number in range(2)]),
        torch.cat(seen_at(GRAPHS, "layers.0")),
    )


def test_samples_of_graphs_cannot_be_chosen_among_nodes(capsys) -> None:
    hook = "+hooks.nodes={select: layers.0, hook: forward, action: capture, keep: {every: 2}}"
    assert main([*GRAPHS.overrides, *PREDICT, hook]) == 2
    assert "hooks.nodes" in capsys.readouterr().err


def test_effects_on_graphs_are_refused_before_the_run(tmp_path, capsys) -> None:
    hook = "+hooks.h={select: head, hook: forward, action: scale, factor: 0.5}"
    typed = ["task=effects", "task.hook=h", "task.over={factor: [0.5]}", "task.metric=loss", hook]
    assert main([*GRAPHS.overrides, *typed, f"hydra.run.dir={tmp_path / 'effects'}"]) == 2
    assert "data.collate" in capsys.readouterr().err and not (tmp_path / "effects").exists()
