"""task=export: the program contains the hooks, and is compared with the hooked model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import hookrun


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_the_exported_program_equals_the_hooked_model(executed, ready, hook, capsys, model: str) -> None:
    keys = {
        "select": "fc" if model == "cnn" else "type:ReLU",
        "hook": "forward",
        "action": "clamp",
        "max": 0.05,
    }
    exported = executed("task=export", f"model={model}", hook(**keys), "data.batch_size=8", "strict=true")
    assert "exported to" in capsys.readouterr().out
    program = torch.export.load(exported.path / "exported.pt2").module()
    images, plain = inputs(8), ready("task=predict", f"model={model}").model.eval()
    with hookrun.hooked(plain, {"h": keys}):
        expected = plain(images)
    torch.testing.assert_close(program(images), expected)
    torch.testing.assert_close(program(images[:3]), expected[:3])  # a batch of another size
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


def test_a_model_that_cannot_be_exported_is_an_error(fails, own_model) -> None:
    own = own_model("""
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x):
            y = self.layer(x.flatten(1))
            return y if y.sum() > 0 else -y
    """)
    assert "torch.export cannot read the model" in fails("task=export", *own)
