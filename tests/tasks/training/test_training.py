"""The training loop: steps, accumulation, precision, schedules, validation, checkpoints, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import hookrun
from hookrun.store.reader import Run
from hookrun.tasks.run.batches import Batches
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.training import loop
from hookrun.tasks.training.step import Training


def weights(run: Any, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run.path / f"checkpoints/{name}.safetensors")


def val(run: Any) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line["split"] == "val"]


SGD = ("train.optimizer.name=SGD", "train.optimizer.lr=0.1", "train.shuffle=false", "train.epochs=1")
TWO_EPOCHS = (
    "train.epochs=2", "train.limit_batches=3", "train.log_every=1", "train.optimizer.name=SGD",
    "train.scheduler={name: CosineAnnealingLR}",
    "+hooks.h={select: fc, hook: forward, action: capture, when: {mode: train}}",
)  # fmt: skip
SEVEN_STEPS = (
    "train.steps=7", "train.limit_batches=5", "train.log_every=1", "train.epochs=9", "train.optimizer.lr=1",
    "train.scheduler={name: linear_lr, start_factor: 0.5, total_iters: 2, interval: step}",
)  # fmt: skip
TYPES = ("grad", "post_accumulate_grad", "optimizer_step_pre", "optimizer_step_post")
ACCUMULATED = (
    *SGD, "train.limit_batches=5", "train.accumulate=2",
    *(f"+hooks.{name}={{select: fc.bias, hook: {name}, action: capture}}" for name in TYPES),
    "+hooks.off={select: fc, hook: forward, action: scale, factor: {from: 1, to: 0, steps: [2, 3]}}",
)  # fmt: skip


def test_captures_in_training_have_sample_epoch_and_step(shared) -> None:
    capture = shared(*TWO_EPOCHS).captures["h"]["fc"]
    assert capture.shape == (384, 10)
    assert capture.epochs.tolist() == [0] * 192 + [1] * 192
    assert capture.steps.unique().tolist() == list(range(6))
    assert len(capture.sample_ids[:192].unique()) == 192


def test_the_mean_of_each_epoch_is_logged_beside_its_batches(shared) -> None:
    found = shared(*TWO_EPOCHS)
    for epoch in range(2):
        of_epoch = [line for line in found.metrics if (line["split"], line["epoch"]) == ("train", epoch)]
        *batches, mean = of_epoch
        assert [line["of"] for line in of_epoch] == ["batch"] * 3 + ["epoch"]
        assert mean["step"] == 3 * (epoch + 1) and "lr" not in mean
        for name in ("loss", "accuracy"):
            assert mean[name] == pytest.approx(sum(line[name] for line in batches) / 3)
    assert {line["of"] for line in val(found)} == {"epoch"}


def test_gradient_hooks_fire_per_micro_batch_and_optimizer_hooks_per_step(shared) -> None:
    found = shared(*ACCUMULATED)
    assert [len(found.captures[name]["fc.bias"]) for name in TYPES] == [5, 3, 3, 3], "the last group has one"
    gradients, accumulated = (found.captures[name]["fc.bias"] for name in ("grad", "post_accumulate_grad"))
    torch.testing.assert_close(gradients[0] + gradients[1], accumulated[0])
    assert accumulated.steps.tolist() == [0, 1, 2]
    assert accumulated.sample_ids.tolist() == [-1, -1, -1]


def test_a_validation_leaves_numbers_at_the_step_of_the_training(shared) -> None:
    (line,) = val(shared(*ACCUMULATED))
    assert line["loss"] == pytest.approx(math.log(10)), "the training has ended with a factor of 0"


def test_steps_end_a_run_before_its_epochs_do(shared) -> None:
    found = shared(*SEVEN_STEPS)
    steps = [line["step"] for line in found.metrics if line["of"] == "batch"]
    assert steps == list(range(7))
    assert [line["epoch"] for line in val(found)] == [0, 1]


@pytest.mark.parametrize(
    ("overrides", "rates"),
    [(TWO_EPOCHS, [1e-3] * 3 + [5e-4] * 3), (SEVEN_STEPS, [0.5, 0.75, *[1] * 5])],
    ids=["by epoch", "by step"],
)
def test_schedules_are_chosen_by_name(shared, overrides: tuple[str, ...], rates: list[float]) -> None:
    assert [line["lr"] for line in shared(*overrides).metrics if "lr" in line] == pytest.approx(rates)


@pytest.fixture
def trained(performed, tmp_path: Path) -> Callable[..., Run]:
    """A training by sections of the configuration, without a command line."""

    def perform(context: RunContext) -> None:
        loop.train(context)
        context.run_dir.set_status("done")

    def trained(**sections: Any) -> Run:
        performed(perform, task={"name": "train"}, **sections)
        return hookrun.open_run(tmp_path / "run")

    return trained


def test_an_incomplete_last_batch_is_weighted_by_its_samples(trained, ready) -> None:
    """Micro-batches of 32, 32 and 1 are one batch of all: each sample weighs the same."""
    torch.manual_seed(0)
    x, y = torch.rand(65, 1, 8, 8), torch.randint(0, 3, (65,))
    save_file({"x": x, "y": y}, "x.safetensors")
    train = {"epochs": 1, "limit_batches": None, "accumulate": 9, "shuffle": False}
    args = {"file": "x.safetensors", "input": "x", "target": "y", "val_fraction": 0}
    parts = trained(
        model={"args": {"num_classes": 3}}, data={"name": "tensors", "args": args, "batch_size": 32},
        train={**train, "optimizer": {"name": "SGD", "lr": 0.1}},
    )  # fmt: skip
    named = [f"data.args.{key}={value}" for key, value in args.items()]
    model = ready("model=mlp", "model.args.num_classes=3", "data=tensors", *named).model.train()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert [(line["step"], line["of"]) for line in parts.metrics] == [(0, "batch"), (1, "epoch")]
    assert parts.metrics[1]["loss"] == parts.metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights(parts)[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "fused"), [("SGD", False), ("Adam", True)])
def test_every_gradient_is_seen_unscaled_under_a_gradient_scaler(
    trained, ready, optimizer: str, fused: bool
) -> None:
    paths = {"output_grad": "fc", **dict.fromkeys(TYPES[:3], "fc.bias")}
    hooks = {kind: {"select": path, "hook": kind, "action": "capture"} for kind, path in paths.items()}
    train = {"steps": 1, "shuffle": False, "optimizer": {"name": optimizer, "fused": fused}}
    scaled = trained(train=train, hooks=hooks, compute={"precision": "fp16"}, data={"batch_size": 64})
    prepared = ready("model=mlp")
    batch = next(Batches(prepared, "train").epoch(0))
    logits = prepared.model.train()(batch.inputs)
    loss = F.cross_entropy(logits, batch.target)
    of_logits, of_bias = torch.autograd.grad(loss, [logits, prepared.model.fc.bias])
    for kind, path in paths.items():
        true = of_logits if kind == "output_grad" else of_bias[None]
        assert true.abs().max() > 1e-3
        torch.testing.assert_close(scaled.captures[kind][path][:].float(), true, rtol=0.05, atol=1e-3)


Values = dict[str, float]


def after_epochs(
    monkeypatch: pytest.MonkeyPatch, values: list[Values], scheduler: Any = None
) -> tuple[list[int], list[float]]:
    """The epochs whose weights are saved as the best, and the rates after each, if validations give these values."""
    saved, rates, context = list[int](), list[float](), MagicMock(stopped=False)
    context.evaluate.side_effect = values
    context.settings.train = SimpleNamespace(
        epochs=len(values),
        steps=None,
        checkpoint=SimpleNamespace(keeps=bool, every=SimpleNamespace(epochs=None)),
    )
    none: Any = None
    training = Training(context, none, none, scheduler, "epoch", none, MagicMock(), MagicMock(), none, none)
    monkeypatch.setattr(loop, "_save", lambda context, name: saved.append(training.epoch))
    for _ in values:
        loop._after_epoch(training)
        rates += [] if scheduler is None else scheduler.get_last_lr()
    return saved, rates


NAN = float("nan")


@pytest.mark.parametrize(("values", "saved"), [
    ([{"loss": NAN}, {"loss": 0.5}, {"loss": 0.7}], [0, 1]),
    ([{"loss": 0.5}, {"loss": NAN}, {"loss": 0.4}], [0, 2]),
    ([{"loss": 1.0, "accuracy": 0.5}, {"loss": 0.1, "accuracy": 0.4}, {"loss": 0.1, "accuracy": 0.5}], [0]),
])  # fmt: skip
def test_the_best_weights_are_those_of_the_highest_accuracy_or_the_lowest_loss(
    monkeypatch, values: list[Values], saved: list[int]
) -> None:
    """The first of equal ones; a number is better than NaN."""
    assert after_epochs(monkeypatch, values)[0] == saved


def test_the_plateau_schedule_uses_the_validation_loss(monkeypatch) -> None:
    """The second epoch is without improvement, though its accuracy is better."""
    values = [{"loss": loss, "accuracy": 1 - 1 / n} for n, loss in enumerate((1.0, 2.0, 0.5, 0.25), 2)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    assert after_epochs(monkeypatch, values, schedule)[1] == [1, 0.5, 0.5, 0.5]
