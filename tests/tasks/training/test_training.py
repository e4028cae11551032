"""The training loop: steps, accumulation, precision, schedules, validation, checkpoints, and how it ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookrun.tasks.run.context import RunContext

QUICK = ("train.epochs=1", "train.limit_batches=4")


def weights(run: Any, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run.path / f"checkpoints/{name}.safetensors")


def val(run: Any) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line["split"] == "val"]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_with_the_same_seed_repeats_exactly(run, hook) -> None:
    noisy = hook(select="relu1", hook="forward", action="noise", when="{probability: 0.5}")
    first, second, other = (run(*QUICK, noisy, f"seed={seed}") for seed in (1, 1, 2))
    assert first.metrics == second.metrics
    assert equal(weights(first), weights(second))
    assert not equal(weights(first), weights(other))


SGD = ("train.optimizer.name=SGD", "train.optimizer.lr=0.1", "train.shuffle=false", "train.epochs=1")


TWO_EPOCHS = (
    "train.epochs=2", "train.limit_batches=3", "train.log_every=1",
    "+hooks.h={select: fc, hook: forward, action: capture, when: {mode: train}}",
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


def test_gradient_hooks_fire_per_micro_batch_and_optimizer_hooks_per_step(run, capsys) -> None:
    types = ("grad", "post_accumulate_grad", "optimizer_step_pre", "optimizer_step_post")
    hooks = [f"+hooks.{name}={{select: fc.bias, hook: {name}, action: capture}}" for name in types]
    found = run(*SGD, "train.limit_batches=5", "train.accumulate=2", *hooks)
    assert [len(found.captures[name]["fc.bias"]) for name in types] == [5, 3, 3, 3], "the last group has one"
    gradients, accumulated = (found.captures[name]["fc.bias"] for name in ("grad", "post_accumulate_grad"))
    torch.testing.assert_close(gradients[0] + gradients[1], accumulated[0])
    assert accumulated.steps.tolist() == [0, 1, 2]
    assert accumulated.sample_ids.tolist() == [-1, -1, -1]


def test_a_validation_leaves_numbers_at_the_step_of_the_training(run, hook) -> None:
    off = hook(select="fc", hook="forward", action="scale", factor="{from: 1, to: 0, steps: [3, 4]}")
    found = run(*SGD, "train.limit_batches=4", off)
    (line,) = val(found)
    assert line["loss"] == pytest.approx(math.log(10)), "the training has ended with a factor of 0"


def test_steps_end_a_run_before_its_epochs_do(run) -> None:
    found = run("train.steps=7", "train.limit_batches=5", "train.log_every=1", "train.epochs=9")
    steps = [line["step"] for line in found.metrics if line["of"] == "batch"]
    assert steps == list(range(7))
    assert [line["epoch"] for line in val(found)] == [0, 1]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("{name: CosineAnnealingLR}", [1, 1, 0.5, 0.5]),
        ("{name: linear_lr, start_factor: 0.5, total_iters: 2, interval: step}", [0.5, 0.75, 1, 1]),
    ],
)
def test_schedules_are_chosen_by_name(run, schedule: str, rates: list[float]) -> None:
    found = run(
        "train.epochs=2", "train.limit_batches=2", "train.log_every=1", *SGD[:1], "train.optimizer.lr=1",
        f"train.scheduler={schedule}",
    )  # fmt: skip
    assert [line["lr"] for line in found.metrics if "lr" in line] == pytest.approx(rates)


def test_an_incomplete_last_batch_is_weighted_by_its_samples(run, tmp_path: Path) -> None:
    """Micro-batches of 32, 32 and 1 are one batch of all: each sample weighs the same."""
    torch.manual_seed(0)
    count = 65
    tensors = {"x": torch.rand(count, 1, 8, 8), "y": torch.randint(0, 3, (count,))}
    save_file(tensors, tmp_path / "x.safetensors")
    own = (
        "data=tensors", f"data.args.file={tmp_path}/x.safetensors", "data.args.input=x", "data.args.target=y",
        "data.args.val_fraction=0", "model.args.num_classes=3", *SGD,
    )  # fmt: skip
    whole = run(*own, f"data.batch_size={count}")
    parts = run(*own, "data.batch_size=32", "train.accumulate=9")
    assert [(line["step"], line["of"]) for line in parts.metrics] == [(0, "batch"), (1, "epoch")]
    assert parts.metrics[1]["loss"] == parts.metrics[0]["loss"]
    assert parts.metrics[0]["loss"] == pytest.approx(whole.metrics[0]["loss"], rel=1e-5)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "fused"), [("SGD", "false"), ("Adam", "true")])
def test_every_gradient_is_seen_unscaled_under_a_gradient_scaler(run, optimizer: str, fused: str) -> None:
    types = ("output_grad", "grad", "post_accumulate_grad", "optimizer_step_pre")
    see = [
        f"+hooks.{kind}={{select: {'fc' if kind == 'output_grad' else 'fc.bias'}, hook: {kind}, action: capture}}"
        for kind in types
    ]
    steps = ("train.steps=1", "train.limit_batches=1")
    one = (*steps, f"train.optimizer.name={optimizer}", f"+train.optimizer.fused={fused}", *see)
    plain, scaled = run(*one), run(*one, "compute.precision=fp16")
    for kind in types:
        path = "fc" if kind == "output_grad" else "fc.bias"
        values, true = scaled.captures[kind][path][:].float(), plain.captures[kind][path][:]
        assert true.abs().max() > 1e-3
        torch.testing.assert_close(values, true, rtol=0.05, atol=1e-3)


def test_a_step_that_the_gradient_scaler_skips_does_not_advance_schedules(run, own_model) -> None:
    """The first gradients overflow half precision: the scaler halves its factor until they do not."""
    body = """
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 10)

        def forward(self, x):
            return self.fc(x.flatten(1)) * 64
    """
    found = run(
        *own_model(body), "compute.precision=fp16", "train.steps=16", "train.log_every=1", *SGD[:1],
        "train.optimizer.lr=1e-6", "train.scheduler={name: StepLR, step_size: 1, gamma: 0.5, interval: step}",
    )  # fmt: skip
    rates = [line["lr"] for line in found.metrics if "lr" in line]
    skipped = rates.count(1e-6) - 1
    assert 1 <= skipped < 15
    assert rates[skipped:] == pytest.approx([1e-6 * 0.5**n for n in range(16 - skipped)])


Values = dict[str, float]


def scripted(run: Any, monkeypatch: pytest.MonkeyPatch, values: list[Values], *overrides: str) -> Any:
    """A training whose validations give these values; and the weights at each of them."""
    seen, given = list[dict[str, torch.Tensor]](), iter(values)

    def evaluate(context: RunContext, *_: Any, **__: Any) -> Values:
        seen.append({name: each.clone() for name, each in context.model.state_dict().items()})
        return next(given)

    monkeypatch.setattr(RunContext, "evaluate", evaluate)
    epochs = (f"train.epochs={len(values)}", "train.limit_batches=1", "train.log_every=1")
    return run("model=mlp", *epochs, *overrides), seen


def test_the_best_weights_are_those_of_the_highest_accuracy_or_the_lowest_loss(run, monkeypatch) -> None:
    """The first of equal ones; a number is better than NaN."""
    nan = float("nan")
    for best, values in {
        1: [{"loss": nan}, {"loss": 0.5}, {"loss": 0.7}],
        2: [{"loss": 0.5}, {"loss": nan}, {"loss": 0.4}],
        0: [{"loss": 1.0, "accuracy": 0.5}, {"loss": 0.1, "accuracy": 0.4}, {"loss": 0.1, "accuracy": 0.5}],
    }.items():
        found, seen = scripted(run, monkeypatch, values)
        assert [equal(weights(found, "best"), each) for each in seen] == [n == best for n in range(3)]


def test_the_plateau_schedule_uses_the_validation_loss(run, monkeypatch) -> None:
    """The second epoch is without improvement, though its accuracy is better."""
    values = [{"loss": loss, "accuracy": 1 - 1 / n} for n, loss in enumerate((1.0, 2.0, 0.5, 0.25), 2)]
    schedule = "train.scheduler={name: ReduceLROnPlateau, patience: 0, factor: 0.5, interval: epoch}"
    rate = ("train.optimizer.name=SGD", "train.optimizer.lr=1.0")
    found, _ = scripted(run, monkeypatch, values, *rate, schedule)
    assert [line["lr"] for line in found.metrics if "lr" in line] == [1, 1, 0.5, 0.5]
