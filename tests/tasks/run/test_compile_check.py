"""compute.compile: the hooks are in the graph, and its output is compared with that of the hooked model."""

from __future__ import annotations

import json

import pytest
import torch

import hookrun
from hookrun.tasks.run.compile_check import Compiled
from hookrun.tasks.training.loop import train

HOOKS = {
    "late": {"select": "type:ReLU", "hook": "forward", "action": "clamp", "max": 0.1, "when": {"step": {"start": 1}}},
    "clip": {"select": "**", "hook": "grad", "action": "clamp", "min": -0.01, "max": 0.01},
}  # fmt: skip


def test_a_compiled_run_has_the_results_of_the_run(performed, tmp_path) -> None:
    for name, compiles in (("plain", False), ("compiled", True)):
        performed(
            train, path=name, task={"name": "train"}, hooks=HOOKS, data={"batch_size": 16}, strict=True,
            train={"limit_batches": 2, "epochs": 1}, compute={"compile": compiles},
        )  # fmt: skip
    files = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("plain", "compiled"))
    plain, compiled = ([json.loads(line) for line in text.splitlines()] for text in files)
    assert len(plain) == len(compiled) > 1
    for expected, found in zip(plain, compiled, strict=True):
        for key in ("step", "loss", "accuracy"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3)


def test_hooks_that_cannot_be_compiled_are_refused_before_the_run(refused, hook) -> None:
    said = refused("compute.compile=true", hook(select="fc", hook="forward", action="capture"))
    assert "hooks.h: capture on 'forward' passes values to Python at each firing" in said


@pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # the hook never fires: that is what is wrong
@pytest.mark.parametrize("wrong", ["output", "hook"])
def test_a_compiled_model_with_other_outputs_is_an_error(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch reused a graph without the hooks."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 3}}
    with hookrun.hooked(model, spec) as hooks:

        def bare(x: torch.Tensor) -> torch.Tensor:
            return model(x) * 2 if wrong == "output" else model[0].forward(x) * 3

        monkeypatch.setattr(hooks, "compile", lambda: bare)
        said = "differs by 1 of its norm" if wrong == "output" else "fires 0 times in the compiled model"
        with pytest.raises(hookrun.HookrunError, match=said):
            Compiled(hooks, model)(torch.ones(1, 2))


def test_the_comparison_has_no_effects(monkeypatch: pytest.MonkeyPatch) -> None:
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
