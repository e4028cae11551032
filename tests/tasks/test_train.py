"""The training loop: steps, accumulation, precision, schedules, validation, checkpoints, and how it ends."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hookrun.cli import main

QUICK = ("train.epochs=1", "train.limit_batches=4")


def weights(run: Any, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run.path / f"checkpoints/{name}.safetensors")


def val(run: Any) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line["split"] == "val"]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_one_seed_makes_a_run_repeat_exactly(run, hook) -> None:
    noisy = hook(select="relu1", hook="forward", action="noise", when="{probability: 0.5}")
    first, second, other = (run(*QUICK, noisy, f"seed={seed}") for seed in (1, 1, 2))
    assert first.metrics == second.metrics
    assert equal(weights(first), weights(second))
    assert not equal(weights(first), weights(other))


@pytest.mark.parametrize("code", [0, 3])
def test_the_process_is_given_back_as_it_was(run, code: int, hook) -> None:
    torch.manual_seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )
    run(*QUICK, hook(select="fc", hook="forward", action="check", max=1e9 if code == 0 else -1e9), code=code)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    after = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )
    assert after == before


SGD = ("train.optimizer.name=SGD", "train.optimizer.lr=0.1", "train.shuffle=false", "train.epochs=1")


def test_two_micro_batches_are_one_batch(run) -> None:
    whole = run(*SGD, "data.batch_size=64", "train.limit_batches=3")
    halves = run(*SGD, "data.batch_size=32", "train.limit_batches=6", "train.accumulate=2")
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(halves)[name], tensor, rtol=1e-4, atol=1e-5)


def test_gradient_hooks_fire_per_micro_batch_and_optimizer_hooks_per_step(run, capsys) -> None:
    types = ("grad", "post_accumulate_grad", "optimizer_step_pre", "optimizer_step_post")
    hooks = [f"+hooks.{name}={{select: fc.bias, hook: {name}, action: capture}}" for name in types]
    found = run(*SGD, "train.limit_batches=5", "train.accumulate=2", *hooks)
    assert [len(found.captures[name]["fc.bias"]) for name in types] == [5, 3, 3, 3], "the last group has one"
    gradients, accumulated = (found.captures[name]["fc.bias"] for name in ("grad", "post_accumulate_grad"))
    torch.testing.assert_close(gradients[0] + gradients[1], accumulated[0])
    assert accumulated.steps.tolist() == [0, 1, 2]
    assert accumulated.sample_ids.tolist() == [-1, -1, -1]


def test_steps_end_a_run_before_its_epochs_do(run) -> None:
    found = run("train.steps=7", "train.limit_batches=5", "train.log_every=1", "train.epochs=9")
    steps = [line["step"] for line in found.metrics if line["split"] == "train"]
    assert steps == list(range(7))
    assert [line["epoch"] for line in val(found)] == [0, 1]


@pytest.mark.parametrize("name", ["SGD", "adam", "AdamW", "rmsprop", "Adagrad", "NAdam"])
def test_optimizers_go_by_name(run, name: str) -> None:
    assert run(*QUICK, f"train.optimizer.name={name}").status["status"] == "done"


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("{name: StepLR, step_size: 1, gamma: 0.5}", [1, 1, 0.5, 0.5]),
        ("{name: StepLR, step_size: 1, gamma: 0.5, interval: step}", [1, 0.5, 0.25, 0.125]),
        ("{name: CosineAnnealingLR}", [1, 1, 0.5, 0.5]),
        ("{name: linear_lr, start_factor: 0.5, total_iters: 2, interval: step}", [0.5, 0.75, 1, 1]),
        ("{name: ReduceLROnPlateau, patience: 0, threshold: 1, threshold_mode: abs}", [1, 1, 1, 1]),
    ],
)
def test_schedules_go_by_name(run, schedule: str, rates: list[float]) -> None:
    found = run(
        "train.epochs=2", "train.limit_batches=2", "train.log_every=1", *SGD[:1], "train.optimizer.lr=1",
        f"train.scheduler={schedule}",
    )  # fmt: skip
    assert [line["lr"] for line in found.metrics if "lr" in line] == pytest.approx(rates)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_and_gradient_hooks_see_true_values(run, precision: str, hook) -> None:
    see = hook(select="fc.bias", hook="grad", action="capture")
    plain = run(*QUICK, see).captures["h"]["fc.bias"][0]
    mixed = run(*QUICK, see, f"compute.precision={precision}").captures["h"]["fc.bias"][0]
    torch.testing.assert_close(mixed.float(), plain, rtol=0.1, atol=2e-3)


def test_the_best_checkpoint_is_that_of_the_best_epoch(run) -> None:
    found = run("train.epochs=3", "train.limit_batches=6")
    best = max(line["accuracy"] for line in val(found))
    for name, accuracy in (("best", best), ("last", val(found)[-1]["accuracy"])):
        again = run(
            "task=evaluate",
            "train.limit_batches=6",
            f"model.weights={found.path}/checkpoints/{name}.safetensors",
        )
        assert again.metrics[-1]["accuracy"] == accuracy


def test_added_parameters_come_back_with_the_checkpoint_where_the_hook_is_there(run, refused, hook) -> None:
    bias = hook(select="flatten", hook="forward", action="add_bias", value=0, trainable="true")
    trained = run(*QUICK, bias, "train.optimizer.lr=0.1")
    file = f"model.weights={trained.path}/checkpoints/last.safetensors"
    again = run("task=evaluate", "train.limit_batches=4", bias, file)
    assert again.metrics[-1]["loss"] == val(trained)[-1]["loss"]
    assert "flatten.h_bias" in refused("task=evaluate", file)


def test_captures_in_training_know_sample_epoch_and_step(run, hook) -> None:
    found = run(
        "train.epochs=2",
        "train.limit_batches=2",
        hook(select="fc", hook="forward", action="capture", when="{mode: train}"),
    )
    capture = found.captures["h"]["fc"]
    assert capture.shape == (256, 10)
    assert capture.epochs.tolist() == [0] * 128 + [1] * 128
    assert capture.steps.unique().tolist() == [0, 1, 2, 3]
    assert len(capture.sample_ids[:128].unique()) == 128


def test_a_run_that_fails_says_so_and_leaves_no_hooks(
    run, monkeypatch: pytest.MonkeyPatch, capsys, hook
) -> None:
    from hookrun.models.cnn import CNN

    calls, models, forward = [], [], CNN.forward

    def failing(self: CNN, x: torch.Tensor) -> torch.Tensor:
        models.append(self)
        calls.append(isinstance(x, torch.Tensor) and type(x) is torch.Tensor)
        if sum(calls) == 3:
            raise RuntimeError("the third batch is bad")
        return forward(self, x)

    monkeypatch.setattr(CNN, "forward", failing)
    found = run("experiment=clip_fc", hook(select="**", hook="forward", action="capture"), code=1)
    assert found.status["status"] == "failed"
    assert "the third batch is bad" in found.status["reason"]
    assert "the third batch is bad" in capsys.readouterr().err
    assert not any(module._forward_hooks for module in models[-1].modules())
    assert not models[-1].fc.weight._backward_hooks
    assert len(found.captures["h"]["fc"]) == 128, "what was captured before is kept"


def test_an_interrupted_run_says_so(run, monkeypatch: pytest.MonkeyPatch) -> None:
    import hookrun.tasks.train as module

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_after_epoch", interrupt)
    assert run(*QUICK, code=130).status["status"] == "interrupted"


@pytest.mark.parametrize(
    ("policy", "code", "status"), [("error", 3, "failed"), ("stop", 3, "stopped"), ("warn", 0, "done")]
)
def test_checks(run, policy: str, code: int, status: str, hook) -> None:
    found = run(*QUICK, hook(select="fc", hook="forward", action="check", max=0, policy=policy), code=code)
    assert (found.status["status"], found.status["exit_code"]) == (status, code)
    assert found.stats[0]["ok"] is False
    assert (found.path / "checkpoints/last.safetensors").exists() == (policy != "error")
    if code:
        assert "'h'" in found.status["reason"] and "fc" in found.status["reason"]


@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_hook_that_never_fires_is_loud(run, capsys, strict: str, hook) -> None:
    never = hook(select="fc", hook="output_grad", action="print", when="{step: 1000}")
    found = run(*QUICK, never, f"strict={strict}", code=1 if strict == "true" else 0)
    printed = capsys.readouterr()
    assert "WARNING: h never fired on fc" in printed.out
    assert ("h never fired on fc" in found.status["reason"]) == (strict == "true")


def test_a_model_with_nothing_to_train_is_told(run, hook) -> None:
    found = run(*QUICK, hook(select="''", hook="apply", action="freeze"), code=1)
    assert "nothing to train" in found.status["reason"]


@pytest.mark.parametrize(
    ("model", "loss", "hooks", "captured"),
    [
        ("doubling", "output_mean", {"a": "grad", "b": "output_grad"}, {"a": [0.4] * 5, "b": [0.2] * 5}),
        (
            "regression", "output", {"w": "grad", "b": "grad", "y": "output_grad"},
            {"w": [-0.9064] * 5, "b": [-1.8891, 0.5235, 0.4592], "y": [-1.8891, 0.5235, 0.4592]},
        ),
        ("testnet", "output", {"fc.bias": "grad"}, {"fc.bias": [-0.2] * 5}),
    ],
)  # fmt: skip
def test_the_tutorials_gradients(run, model: str, loss: str, hooks: Any, captured: Any) -> None:
    see = [
        f"+hooks.h{n}={{select: {path}, hook: {kind}, action: capture}}"
        for n, (path, kind) in enumerate(hooks.items())
    ]
    found = run(
        f"model=tutorial/{model}",
        f"train.loss={loss}",
        "seed=2",
        "train.steps=1",
        "train.limit_batches=1",
        *see,
    )
    for number, (path, values) in enumerate(captured.items()):
        assert found.captures[f"h{number}"][path][0].tolist() == pytest.approx(values, abs=1e-4)


def test_the_jobs_of_a_sweep_leave_no_model_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    from hookrun import models

    alive, build = [], models.build

    def remember(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(models, "build", remember)
    assert main(["-m", "experiment=clip_fc", *QUICK, "compute.threads=1", "hooks.clip_fc.max=0.1,1"]) == 0
    gc.collect()
    assert len(alive) == 2
    assert [reference() for reference in alive] == [None, None]
