"""compute.compile and task=export: the hooks are in the graph, and it is compared with the hooked model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import hookrun
from hookrun.tasks.loop.compiled import Compiled

QUICK = ("train.limit_batches=2", "train.epochs=1", "data.batch_size=16")


def test_a_compiled_run_gives_what_the_run_gives(run, hook) -> None:
    overrides = (
        *QUICK,
        "model=mlp",
        hook(select="type:ReLU", hook="forward", action="clamp", max=0.1, when="{step: {start: 1}}"),
        "+hooks.clip={select: '**', hook: grad, action: clamp, min: -0.01, max: 0.01}",
        "strict=true",
    )
    plain, compiled = run(*overrides), run(*overrides, "compute.compile=true")
    assert len(plain.metrics) == len(compiled.metrics) > 1
    for expected, found in zip(plain.metrics, compiled.metrics, strict=True):
        for key in ("step", "loss", "accuracy"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3)


def test_what_no_graph_can_hold_is_refused_before_the_run(refused, hook) -> None:
    said = refused("compute.compile=true", hook(select="fc", hook="forward", action="capture"))
    assert "hooks.h: capture on 'forward' passes values to Python at each firing" in said


@pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # the hook never fires: that is what is wrong
@pytest.mark.parametrize("wrong", ["output", "hook"])
def test_a_compiled_model_that_differs_is_not_trusted(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch takes a graph without the hooks."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 3}}
    with hookrun.hooked(model, spec) as hooks:

        def bare(x: torch.Tensor) -> torch.Tensor:
            return model(x) * 2 if wrong == "output" else model[0].forward(x) * 3

        monkeypatch.setattr(hooks, "compile", lambda: bare)
        said = (
            "differs by 1 of its norm" if wrong == "output" else "fires 0 times in the compiled model, 1 in"
        )
        with pytest.raises(hookrun.HookrunError, match=said):
            Compiled(hooks, model)(torch.ones(1, 2))


def test_the_comparison_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout())
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 3}}
    torch.manual_seed(0)
    expected = model(torch.ones(3, 2))
    state, buffers = torch.get_rng_state(), {name: b.clone() for name, b in model.named_buffers()}
    model[0].reset_running_stats()
    torch.manual_seed(0)
    with hookrun.hooked(model, spec) as hooks:
        monkeypatch.setattr(hooks, "compile", lambda: model)
        found = Compiled(hooks, model)(torch.ones(3, 2))
        assert hooks.fired["h", "0"] == 1
    assert torch.equal(found, expected * 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_the_exported_program_is_the_hooked_model(run, hook, capsys, model: str) -> None:
    edit = hook(select="fc" if model == "cnn" else "type:ReLU", hook="forward", action="clamp", max=0.05)
    arguments = (f"model={model}", edit, "data.batch_size=8")
    exported = run("task=export", *arguments, "strict=true")
    assert "exported to" in capsys.readouterr().out
    program = torch.export.load(exported.path / "exported.pt2").module()
    predicted = run("task=predict", *arguments, "train.limit_batches=1")
    images = inputs(8)
    torch.testing.assert_close(program(images), predicted.predictions[0:8])
    torch.testing.assert_close(program(images[:3]), predicted.predictions[0:3])  # any size of batch
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
        (
            {"hook": "forward", "action": "scale", "factor": 2, "when": "{step: 3}"},
            "an exported program has no step",
        ),
    ],
    ids=["capture", "grad", "output_grad", "step"],
)
def test_what_no_program_can_hold_is_refused(refused, hook, keys: dict[str, Any], reason: str) -> None:
    assert reason in refused("task=export", hook(select="fc", **keys))


def test_a_model_that_cannot_be_exported_is_told(run, hook, capsys, tmp_path, monkeypatch) -> None:
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
