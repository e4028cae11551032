"""Models of others on stacked samples, through every command: the numbers are those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from strangers_by_hand import DETECTOR, MASKED, SEQUENCE, Stranger, called, seen_at
from torch import Tensor, nn

import hookrun
from hookrun.cli import main
from hookrun.store.reader import Run

Runs = Callable[..., Run]
each = pytest.mark.parametrize("stranger", [SEQUENCE, DETECTOR, MASKED], ids=lambda each: each.name)


@each
def test_every_module_is_listed(stranger: Stranger, capsys) -> None:
    model = stranger.model()
    assert main([*stranger.overrides, "task=modules"]) == 0
    said = capsys.readouterr().out
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{len(list(model.modules()))} modules, {count:,} parameters" in said
    for module in model.modules():
        assert type(module).__name__ in said


@each
def test_an_evaluation_is_that_of_a_plain_loop(stranger: Stranger, run: Runs) -> None:
    found = run(stranger, "task=evaluate", stranger.metrics).metrics[-1]
    expected = stranger.plain(stranger.model())
    assert [found[name] for name in list(found)[-2:]] == pytest.approx([*expected.values()], rel=1e-5)


@each
def test_captures_are_what_a_plain_hook_sees(stranger: Stranger, run: Runs) -> None:
    hook = f"+hooks.seen={{select: '{stranger.site}', hook: forward, action: capture}}"
    rows = run(stranger, "task=predict", "task.split=val", hook).captures["seen"][stranger.site]
    expected = torch.cat(seen_at(stranger, stranger.site))
    torch.testing.assert_close(rows[:], expected)
    assert rows.sample_ids.tolist() == list(range(len(expected)))


def test_one_of_several_maps_is_captured(run: Runs) -> None:
    hook = "+hooks.seen={select: '', hook: forward, action: capture, target: maps.coarse}"
    rows = run(DETECTOR, "task=predict", "task.split=val", hook).captures["seen"][""]
    torch.testing.assert_close(
        rows[:], torch.cat([output["maps"]["coarse"] for output in seen_at(DETECTOR, "")])
    )


@pytest.mark.parametrize("stranger", [SEQUENCE, MASKED], ids=lambda each: each.name)
def test_effects_are_those_of_an_edit_by_hand(stranger: Stranger, run: Runs) -> None:
    hook = "+hooks.h={select: '**', hook: forward, action: scale, factor: 0.5}"
    paths = [stranger.site, {"sequence": "norm", "masked": "layers.0"}[stranger.name]]
    over = f"{{module: [{', '.join(paths)}]}}"
    found = run(
        stranger,
        "task=effects",
        "task.hook=h",
        f"task.over={over}",
        "task.metric=loss",
        hook,
    ).effects["exact"]
    for cell, path in zip(found.tolist(), paths, strict=True):
        model = stranger.model()
        model.get_submodule(path).register_forward_hook(lambda module, args, output: output * 0.5)
        assert cell == pytest.approx(stranger.plain(model)["loss"], rel=1e-4), path


@each
def test_steps_of_training_are_those_of_a_plain_loop(stranger: Stranger, run: Runs) -> None:
    training = (
        "train.optimizer.name=SGD",
        "train.optimizer.lr=0.1",
        "train.shuffle=false",
        "train.log_every=1",
    )
    last = {"sequence": "head", "detector": "box", "masked": "head"}[stranger.name]
    hook = f"+hooks.clip={{select: {last}.weight, hook: grad, action: clamp, min: -0.01, max: 0.01}}"
    found = run(stranger, "train.steps=3", *training, hook)
    model = stranger.model().train()
    weight: Any = model.get_submodule(last).weight
    weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    losses = plain_training(model, stranger, steps=3)
    logged = [line["loss"] for line in found.metrics if line["split"] == "train" and "lr" in line]
    assert logged == pytest.approx(losses, rel=1e-5)
    weights = load_file(found.path / "checkpoints/last.safetensors")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6)


def plain_training(model: nn.Module, stranger: Stranger, steps: int) -> list[float]:
    """The losses of the first steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = list[float]()
    for inputs, target in list(stranger.batches("train"))[:steps]:
        optimizer.zero_grad()
        loss: Tensor = stranger.loss(called(model, inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_recorded_evaluation_of_a_stranger_counts_its_batches(tmp_path) -> None:
    model = SEQUENCE.model()
    spec = {"n": {"select": "head", "hook": "forward", "action": "stats", "of": ["mean"]}}
    with hookrun.record(model, spec, tmp_path / "mine"), torch.no_grad():
        for inputs, _ in SEQUENCE.batches():
            model(inputs)
    assert [line["step"] for line in hookrun.open_run(tmp_path / "mine").stats] == [0, 1]
