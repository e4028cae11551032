"""What an experiment names is built, or all mistakes in it are collected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookrun.errors import CompileError, Problem, SpecError
from hookrun.tasks import parse_experiment
from hookrun.tasks.run.prepare import Parts, as_call, build


def built(**sections: Any) -> Parts:
    usual = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "compute": {"device": "cpu"}}
    return build(parse_experiment(usual | sections), "val", frozenset())


def test_named_inputs_are_keyword_arguments() -> None:
    tensor, model = torch.ones(1), torch.nn.Identity()
    assert as_call(tensor, model) == ((tensor,), {})
    assert as_call({"x": tensor}, model) == ((), {"x": tensor})


def test_a_seed_determines_the_weights_and_the_data_their_shapes() -> None:
    before = torch.get_rng_state()
    every = [built(seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    states = [each.model.state_dict() for each in every if each.model is not None]
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    assert not all(map(torch.equal, states[0].values(), states[2].values()))
    assert states[0]["fc.bias"].shape == (10,) and (every[0].weights, every[0].leftover) == ("random", {})


def test_mistakes_in_data_loss_and_device_are_collected() -> None:
    parts = built(
        data={"name": "tensors", "args": {"file": "nowhere.npz"}},
        train={"loss": {"name": "mse", "labels": 3}},
        compute={"device": "cuda:77"},
    )
    assert parts.data is parts.loss is parts.device is None
    assert parts.model is not None, "it does not depend on what is wrong"
    with pytest.raises(SpecError) as error:
        parts.refuse()
    for said in ("data.args.file", "'labels'", "cuda:77"):
        assert said in str(error.value)


def test_only_mistakes_of_hooks_are_a_compile_error() -> None:
    mistakes = built()
    mistakes.refuse()
    mistakes.add([Problem("hooks.a", "x"), Problem("hooks.a", "x")], of_hooks=True)
    mistakes.add([])
    with pytest.raises(CompileError) as refusal:
        mistakes.refuse()
    assert len(refusal.value.errors) == 1, "each once"
    mistakes.add([Problem("seed", "y")])
    with pytest.raises(SpecError):
        mistakes.refuse()
