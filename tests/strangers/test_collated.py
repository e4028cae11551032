"""Models of others whose samples have different sizes, with a collate function of their own: boxes and graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from strangers_by_hand import DETECTOR, GRAPHS, seen_at

from hookrun.cli import main
from hookrun.store.reader import Run

Runs = Callable[..., Run]
BOXES = replace(DETECTOR, collate="collate", args={"most": 3})
PREDICT = ("task=predict", "task.split=val")


def test_the_stranger_s_function_collates_targets(run: Runs) -> None:
    found = run(BOXES, "task=evaluate", BOXES.metrics).metrics[-1]
    assert [found["loss"], found["overlap"]] == pytest.approx(
        [*BOXES.plain(BOXES.model()).values()], rel=1e-5
    )
    hook = "+hooks.seen={select: score, hook: forward, action: capture, when: {call: 1}}"
    rows = run(BOXES, *PREDICT, hook).captures["seen"]["score"]
    torch.testing.assert_close(rows[:], torch.cat(seen_at(BOXES, "score")[1::2]))
    losses = [line["loss"] for line in run(BOXES, "train.steps=4", "train.log_every=1").metrics]
    assert len(losses) > 4
    for loss in losses:
        assert loss > 0


def test_graphs_are_evaluated_as_by_hand(run: Runs, capsys) -> None:
    assert main([*GRAPHS.overrides, "task=modules"]) == 0
    assert "Passing" in capsys.readouterr().out
    found = run(GRAPHS, "task=evaluate", GRAPHS.metrics).metrics[-1]
    assert [found["loss"], found["accuracy"]] == pytest.approx(
        [*GRAPHS.plain(GRAPHS.model()).values()], rel=1e-5
    )
    lines = run(GRAPHS, "train.epochs=6", "train.optimizer.lr=0.02").metrics
    losses = [line["loss"] for line in lines if line["split"] == "val"]
    assert losses[-1] < losses[0]


def test_effects_on_graphs_are_refused_before_the_run(tmp_path, capsys) -> None:
    hook = "+hooks.h={select: head, hook: forward, action: scale, factor: 0.5}"
    typed = ["task=effects", "task.hook=h", "task.over={factor: [0.5]}", "task.metric=loss", hook]
    assert main([*GRAPHS.overrides, *typed, f"hydra.run.dir={tmp_path / 'effects'}"]) == 2
    assert "data.collate" in capsys.readouterr().err
    assert not (tmp_path / "effects").exists()


def test_only_told_scores_of_graphs_are_rows_of_samples(run: Runs) -> None:
    """The number of graphs depends on the data, so that no trial run with fake tensors shows the batch."""
    heads = "+hooks.scores={select: head, hook: forward, action: capture, batch_dim: 0}"
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
    assert main([*GRAPHS.overrides, *PREDICT, hook]) != 0
    assert "nodes" in capsys.readouterr().err
