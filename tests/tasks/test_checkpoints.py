"""best.safetensors is the best epoch, last.safetensors the last, and a run can start from either."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hookrun.tasks.run import resuming

QUICK = ("train.epochs=1", "train.limit_batches=4")
SGD = ("train.optimizer.name=SGD", "train.optimizer.lr=0.1", "train.shuffle=false", "train.epochs=1")


def weights(run: Any, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run.path / f"checkpoints/{name}.safetensors")


def val(run: Any) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line["split"] == "val"]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_added_parameters_are_loaded_from_a_checkpoint_if_the_hook_is_present(
    executed, refused, hook
) -> None:
    bias = hook(select="flatten", hook="forward", action="add_bias", value=0, trainable="true")
    trained = executed(*QUICK, bias, "train.optimizer.lr=0.1")
    file = f"model.weights={trained.path}/checkpoints/last.safetensors"
    again = executed("task=evaluate", "train.limit_batches=4", bias, file)
    assert again.metrics[-1]["loss"] == val(trained)[-1]["loss"]
    assert "flatten.h_bias" in refused("task=evaluate", file)


def test_best_and_last_are_the_weights_of_their_epochs(executed) -> None:
    """The rate is far too high after the first epoch: the best is the first, the last differs."""
    found = executed(
        "train.epochs=2", "train.limit_batches=8", "train.scheduler={name: StepLR, step_size: 1, gamma: 1e4}"
    )
    first, second = (line["accuracy"] for line in val(found))
    assert first > second
    one = executed("train.epochs=1", "train.limit_batches=8")
    assert equal(weights(found, "best"), weights(one, "last"))
    assert not equal(weights(found, "last"), weights(found, "best"))
    again = executed(
        "task=evaluate", "train.limit_batches=8", f"model.weights={found.path}/checkpoints/best.safetensors"
    )
    assert [again.metrics[-1][key] for key in ("loss", "accuracy")] == [
        val(found)[0][key] for key in ("loss", "accuracy")
    ]


def test_without_epochs_the_initial_model_is_saved(executed, ready) -> None:
    found = executed("train.epochs=0")
    assert found.metrics == []
    assert equal(weights(found), ready().model.state_dict())


def test_a_state_is_saved_after_every_epoch_however_short(executed, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, write = list[int](), resuming.write_state

    def counted(executed: Any, about: str, *args: Any, **options: Any) -> Any:
        saved.append(json.loads(about)["at"]["step"])
        return write(executed, about, *args, **options)

    monkeypatch.setattr(resuming, "write_state", counted)
    executed("train.epochs=6", "train.limit_batches=1")
    assert saved == [1, 2, 3, 4, 5, 6]


def test_a_state_is_saved_after_every_step_and_epoch_if_asked_for(executed) -> None:
    found = executed(
        "train.epochs=1",
        "train.limit_batches=5",
        "train.checkpoint.every.steps=1",
        "train.checkpoint.keep=9",
        "train.checkpoint.keep_done=true",
    )
    assert len(list((found.path / "checkpoints").glob("state_*"))) == 6
