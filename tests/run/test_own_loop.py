"""The model and the data of an experiment for a loop of one's own."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hookrun
from hookrun import data
from hookrun.data.settings import Data
from hookrun.errors import HookrunWarning, SpecError
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.own_loop import parts
from hookrun.run.tasks import parse_experiment

NOBODY = frozenset[str]()
FILL = {"select": "fc", "hook": "apply", "action": "fill", "value": 0.1}


def experiment(**sections: Any) -> Experiment:
    usual = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "compute": {"device": "cpu", "threads": 1}}
    return parse_experiment(usual | sections)


def weights(path: Path, state: dict[str, torch.Tensor], applied: str = "[]") -> dict[str, Any]:
    save_file(state, path, {"applied": applied})
    return {"name": "mlp", "weights": str(path)}


def test_the_model_has_the_weights_of_the_seed() -> None:
    before = torch.get_rng_state()
    (first, data), (second, _), (other, _) = (parts(experiment(seed=seed), NOBODY) for seed in (1, 1, 2))
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert not torch.equal(first.get_parameter("fc.weight"), other.get_parameter("fc.weight"))
    assert torch.equal(torch.get_rng_state(), before)
    assert data.info.num_classes == 10
    assert next(first.parameters()).device.type == "cpu"


def test_weights_with_parameters_of_hooks_are_refused(tmp_path) -> None:
    model, _ = parts(experiment(), NOBODY)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    file = weights(tmp_path / "w.safetensors", {**state, "fc.b_bias": torch.zeros(10)})
    with pytest.raises(SpecError, match=r"1 tensors that the model does not have: fc\.b_bias"):
        parts(experiment(model=file), NOBODY)
    filled = experiment(hooks={"f": FILL})
    (hook,) = filled.hooks.hooks
    file = weights(tmp_path / "f.safetensors", state, f'["{hook.identity}"]')
    with pytest.warns(HookrunWarning, match="f had changed the model before .* they change it again"):
        parts(experiment(hooks={"f": FILL}, model=file), NOBODY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, _ = parts(experiment(model=file), NOBODY)
    assert all(map(torch.equal, loaded.state_dict().values(), state.values()))


def test_the_weights_of_a_run_to_come_are_refused() -> None:
    needs = {"base": {"experiment": "clip_fc"}}
    waiting = experiment(needs=needs, model={"name": "mlp", "weights": {"run": "base"}})
    with pytest.raises(SpecError, match=r"model\.weights\.run: .* which has not been made\n"):
        parts(replace(waiting, runs={"base": None}), NOBODY)


TRAINED = (
    "train.epochs=3", "train.shuffle=false",
    "+hooks.both={select: fc, hook: forward, action: capture, when: {epoch: [0]}}",
    "+hooks.gradient={select: fc.bias, hook: grad, action: capture}",
    "+hooks.h={select: fc, hook: forward, action: capture, when: {mode: eval, epoch: [2]}}",
)  # fmt: skip


def labels(split: str, count: int) -> list[int]:
    samples = data.load(Data(name="digits"), split, seed=0)
    return [int(samples[number][1]) for number in range(count)]


def test_a_training_run_captures_samples_of_both(shared) -> None:
    found = shared(*TRAINED)
    rows = found.captures["both"]["fc"]
    assert rows.splits == ["train"] * 1438 + ["val"] * 359
    assert rows.sample_ids.tolist() == [*range(1438), *range(359)]
    assert rows.where(sample=3, split="val").tolist() == [1441]
    with pytest.raises(hookrun.HookrunError, match="there is no split 'valid', there are train, val"):
        rows.where(split="valid")
    assert found.labels_of(rows).tolist() == labels("train", 1438) + labels("val", 359)
    row, label = found.dataset(rows)[1441]
    assert torch.equal(row, rows[1441])
    assert label == labels("val", 4)[3]


def test_a_probe_of_validation_rows_has_their_labels(executed, shared) -> None:
    trained = shared(*TRAINED)
    assert set(trained.captures["h"]["fc"].splits) == {"val"}
    [line] = executed("task=probe", f"task.run={trained.path}", "task.capture=h").metrics
    assert line["samples"] == 359
    assert line["accuracy"] > 0.8


def test_gradients_have_their_split_too(shared) -> None:
    found = shared(*TRAINED)
    gradient = found.captures["gradient"]["fc.bias"]
    assert set(gradient.splits) == {"train"}
    with pytest.raises(hookrun.HookrunError, match="some rows do not belong to a sample"):
        found.labels_of(gradient)
