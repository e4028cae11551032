"""task=export: the program contains the hooks, and is compared with the hooked model."""

from __future__ import annotations

import pytest
import torch

import hookrun
from hookrun.run.passes.batches import Batches


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_the_exported_program_equals_the_hooked_model(executed, ready, hook, capsys, model: str) -> None:
    select = "fc" if model == "cnn" else "type:ReLU"
    keys = {"select": select, "hook": "forward", "action": "clamp", "max": 0.05}
    exported = executed("task=export", f"model={model}", hook(**keys), "data.batch_size=8", "strict=true")
    assert "exported to" in capsys.readouterr().out
    program = torch.export.load(exported.path / "exported.pt2").module()
    prepared = ready("task=predict", f"model={model}", "data.batch_size=8")
    images = next(Batches(prepared, "val").epoch(0)).inputs
    plain = prepared.model.eval()
    with hookrun.hooked(plain, {"h": keys}):
        expected = plain(images)
    torch.testing.assert_close(program(images), expected)
    torch.testing.assert_close(program(images[:3]), expected[:3])  # a batch of another size
    assert exported.metrics[0]["difference"] < 1e-5


def test_hooks_that_cannot_be_exported_are_refused(refused, hook) -> None:
    for keys, reason in (
        ({"hook": "forward", "action": "capture"}, "passes values to Python"),
        ({"hook": "grad", "action": "scale", "factor": 2}, "an exported program computes outputs only"),
    ):
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
