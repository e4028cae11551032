"""task=export: the program contains the hooks, and is compared with the hooked model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_the_exported_program_equals_the_hooked_model(run, hook, capsys, model: str) -> None:
    edit = hook(select="fc" if model == "cnn" else "type:ReLU", hook="forward", action="clamp", max=0.05)
    arguments = (f"model={model}", edit, "data.batch_size=8")
    exported = run("task=export", *arguments, "strict=true")
    assert "exported to" in capsys.readouterr().out
    program = torch.export.load(exported.path / "exported.pt2").module()
    predicted = run("task=predict", *arguments, "train.limit_batches=1")
    images = inputs(8)
    torch.testing.assert_close(program(images), predicted.predictions[0:8])
    torch.testing.assert_close(program(images[:3]), predicted.predictions[0:3])  # a batch of another size
    assert exported.metrics[0]["difference"] < 1e-5
    assert json.loads((exported.path / "status.json").read_text())["status"] == "done"


def inputs(count: int) -> torch.Tensor:
    """The first images of the validation split of the digits, as the run reads them."""
    from hookrun import data
    from hookrun.spec.experiment import Data

    samples = data.load(Data(name="digits"), "val", seed=0)
    return torch.stack([samples[number][0] for number in range(count)])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"hook": "forward", "action": "capture"}, "passes values to Python"),
        ({"hook": "grad", "action": "scale", "factor": 2}, "an exported program computes outputs only"),
        (
            {"hook": "output_grad", "action": "scale", "factor": 2},
            "an exported program computes outputs only",
        ),
        ({"hook": "forward", "action": "scale", "factor": 2, "when": "{step: 3}"}, "program has no step"),
    ],
    ids=["capture", "grad", "output_grad", "step"],
)
def test_hooks_that_cannot_be_exported_are_refused(refused, hook, keys: dict[str, Any], reason: str) -> None:
    assert reason in refused("task=export", hook(select="fc", **keys))


def test_a_model_that_cannot_be_exported_is_an_error(run, hook, capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        y = self.layer(x.flatten(1))\n"
        "        return y if y.sum() > 0 else -y\n"
        "def build():\n"
        "    return Odd()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOOKRUN_TRUST", "odd")
    run("task=export", "model=python", "model.factory=odd:build", code=1)
    assert "torch.export cannot read the model" in capsys.readouterr().err
