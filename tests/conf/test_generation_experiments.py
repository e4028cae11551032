"""lm/steer and lm/neuron_clamp do what their comments say: the numbers are those of hooks by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hookrun

SMALL = ("task.max_new_tokens=5", "data.batch_size=4")


def continued(name: str, module: str, hook: Any, *, after: int = 0) -> list[list[int]]:
    """The new tokens of the first four sentences, one by one, with a hand-written forward hook after so many passes."""
    model, _ = hookrun.build(experiment=f"lm/{name}", overrides=["compute.device=cpu"])
    model.eval()
    passes = [0]

    def by_hand(owner: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        passes[0] += 1
        return hook(output, passes[0]) if passes[0] > after else None

    model.get_submodule(module).register_forward_hook(by_hand)
    found = []
    for line in hookrun.open_run("outputs/latest").generations:
        passes[0], ids = 0, torch.tensor([line["prompt_ids"]])
        for _ in range(5):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids)[:, -1].argmax(-1)[:, None]], dim=1)
        found.append(ids[0, len(line["prompt_ids"]) :].tolist())
    return found


def test_steering_adds_the_difference_of_the_two_means(shipped) -> None:
    found = shipped("lm/steer", *SMALL, "hooks.steer.value.factor=20")
    used = {run["where"]: run["path"] for run in found.plan["runs"]}
    last, everything = (
        hookrun.open_run(used[f"hooks.steer.value.{key}"])
        .captures["seen"]["blocks.0.resid_post"][:]
        .double()
        .mean(0)
        for key in ("run", "minus.run")
    )
    direction = (20 * (last - everything)).float()
    assert float(direction.norm()) > 1
    assert [line["ids"] for line in found.generations] == continued(
        "steer", "blocks.0.resid_post", lambda output, number: output + direction
    )
    assert found.metrics[-1]["changed"] == 1 and found.metrics[-1]["kl_first"] > 0.001


def test_the_neurons_are_clamped_while_generating_and_no_others(clamped: Path, monkeypatch) -> None:
    """To 40, which is large enough to change the tokens of any trained model."""
    monkeypatch.chdir(clamped)
    found = hookrun.open_run("outputs/latest")
    values = found.captures["seen"]["blocks.1.mlp.act"]
    assert values[:][:, [1, 5]].unique().tolist() == [40.0]
    assert not (values[:][:, [0, 2, 3, 4, 6, 7]] == 40).any()
    assert sorted(set(values.positions.tolist())) and len(values) == 4 * 4

    def by_hand(output: Tensor, number: int) -> Tensor:
        output = output.clone()
        start = output.shape[1] - number + 1  # without a cache every pass computes all tokens
        output[:, start:, [1, 5]] = 40
        return output

    lines = found.generations
    assert [line["ids"] for line in lines] == continued("neuron_clamp", "blocks.1.mlp.act", by_hand, after=1)
    assert all(line["kl_first"] == 0 for line in lines)
    assert any(line["ids"] != line["ids_without"] for line in lines)
