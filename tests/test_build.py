"""`hookrun.build`: the model and the data of an experiment, as a run has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hookrun
from hookrun.cli import main

SMALL = ["compute.device=cpu", "compute.threads=1"]


def test_a_plain_loop_over_it_has_the_weights_of_a_run(tmp_path: Path) -> None:
    train = [
        "train.epochs=2", "train.limit_batches=3", "train.optimizer.name=SGD", "seed=3", "data.batch_size=16",
    ]  # fmt: skip
    assert main([*SMALL, "experiment=clip_fc", *train, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    model, data = hookrun.build(experiment="clip_fc", overrides=[*SMALL, *train])
    spec = hookrun.load_spec(experiment="clip_fc", overrides=train)
    optimizer = torch.optim.SGD(model.parameters(), lr=data.settings.train.optimizer.args["lr"])
    loader = data.loader("train")
    with hookrun.record(model, spec, run_dir=tmp_path / "own") as hooks:
        for _ in range(2):
            for batch in loader:
                hooks.samples = batch.ids
                loss = nn.functional.cross_entropy(model(batch.inputs), batch.target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            hooks.epoch()
    last, _ = hookrun.build(
        experiment="clip_fc",
        overrides=[*SMALL, f"model.weights={tmp_path / 'run/checkpoints/last.safetensors'}"],
    )
    assert all(map(torch.equal, model.state_dict().values(), last.state_dict().values()))
    assert len(loader) == 3 and data.info.num_classes == 10 and list(data) == ["train", "val"]
    inputs, target = data["val"][5]
    (first, *_) = data.loader("val")
    assert torch.equal(first.inputs[5], inputs) and first.ids[5] == 5 and first.target[5] == target
    assert torch.equal(next(loader.epoch(0)).ids, next(data.loader("train").epoch(0)).ids)
    assert first.to("meta").inputs.device.type == "meta" and torch.equal(first.to("meta").ids, first.ids)


def test_its_errors_are_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, data = hookrun.build(overrides=SMALL)
    with pytest.raises(KeyError, match="did you mean 'train'"):
        data["trian"]
    with pytest.raises(hookrun.SpecError, match="did you mean 'digits'"):
        hookrun.build(overrides=["data.name=digit"])
    (tmp_path / "built_models.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Flatten()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = [*SMALL, "model=python", "model.factory=built_models:make"]
    with pytest.raises(hookrun.SpecError, match="trust"):
        hookrun.build(overrides=own)
    model, _ = hookrun.build(overrides=[*own, "+trust=[built_models]"])
    assert type(model) is nn.Flatten
    monkeypatch.setenv("HOOKRUN_TRUST", "built_models")
    assert type(hookrun.build(overrides=own)[0]) is nn.Flatten
