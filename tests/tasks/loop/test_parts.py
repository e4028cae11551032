"""Model and data for a loop of one's own are those of a run, but for weights that only a run can load."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hookrun.errors import HookrunWarning, SpecError
from hookrun.spec import Experiment
from hookrun.tasks import parse_experiment
from hookrun.tasks.loop.parts import parts

NOBODY = frozenset[str]()
FILL = {"select": "fc", "hook": "apply", "action": "fill", "value": 0.1}


def experiment(**sections: Any) -> Experiment:
    usual = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "compute": {"device": "cpu", "threads": 1}}
    return parse_experiment(usual | sections)


def weights(path: Path, state: dict[str, torch.Tensor], applied: str = "[]") -> dict[str, Any]:
    save_file(state, path, {"applied": applied})
    return {"name": "mlp", "weights": str(path)}


def test_the_model_has_the_weights_of_the_seed_and_the_process_its_generators() -> None:
    before = torch.get_rng_state()
    (first, data), (second, _), (other, _) = (parts(experiment(seed=seed), NOBODY) for seed in (1, 1, 2))
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert not torch.equal(first.get_parameter("fc.weight"), other.get_parameter("fc.weight"))
    assert torch.equal(torch.get_rng_state(), before)
    assert data.info.num_classes == 10 and next(first.parameters()).device.type == "cpu"


def test_code_of_ones_own_runs_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "from torch import nn",
        "def make(): return nn.Flatten()",
        "def loss(output, target): return output",
    ]
    (tmp_path / "partsmodels.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOOKRUN_TRUST", raising=False)
    model = {"name": "python", "factory": "partsmodels:make"}
    own = experiment(model=model, train={"loss": "partsmodels:loss"})
    try:
        with pytest.raises(SpecError, match="the package 'partsmodels' is not trusted"):
            parts(own, NOBODY)
        assert "partsmodels" not in sys.modules
        assert type(parts(own, frozenset({"partsmodels"}))[0]) is nn.Flatten
    finally:
        sys.modules.pop("partsmodels", None)


def test_weights_with_parameters_of_hooks_are_refused_and_those_that_hooks_had_changed_are_told(
    tmp_path: Path,
) -> None:
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
