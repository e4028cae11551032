"""An experiment's model, data and settings are built, or all mistakes are reported together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookrun.errors import Problem, SpecError
from hookrun.spec import Settings
from hookrun.tasks import parse_experiment
from hookrun.tasks.loop.built import as_call, attempt, build, without_download


def settings(**sections: Any) -> Settings:
    usual = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "compute": {"device": "cpu"}}
    return parse_experiment(usual | sections).settings


def test_named_inputs_are_keyword_arguments() -> None:
    tensor, model = torch.ones(1), torch.nn.Identity()
    assert as_call(tensor, model) == ((tensor,), {})
    assert as_call({"x": tensor}, model) == ((), {"x": tensor})


def test_a_seed_determines_the_weights_and_the_data_their_shapes() -> None:
    before = torch.get_rng_state()
    first, second, other = (build(settings(seed=seed), "val", frozenset()) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    states = [each.model.state_dict() for each in (first, second, other)]
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    assert not all(map(torch.equal, states[0].values(), states[2].values()))
    assert states[0]["fc.bias"].shape == (10,) and (first.weights, first.leftover) == ("random", {})


def test_mistakes_in_data_loss_metrics_and_device_are_raised_together() -> None:
    wrong = settings(
        data={"name": "digit"},
        train={"loss": "mes"},
        compute={"device": "cuda:77"},
        task={"name": "evaluate", "metrics": ["acuracy"]},
    )
    more = [Problem("task.split", "a mistake of the task")]
    tried = attempt(wrong, "val", frozenset(), lambda info: more if info is None else [])
    assert tried.info is tried.loss is tried.metrics is tried.device is None
    assert tried.model is not None, "it does not depend on what is wrong"
    with pytest.raises(SpecError) as error:
        tried.built(wrong)
    for said in ("'digits'", "'mse'", "'accuracy'", "cuda:77", "a mistake of the task"):
        assert said in str(error.value)


def test_with_mistakes_published_weights_are_not_downloaded() -> None:
    published = settings(model={"name": "resnet18", "weights": "DEFAULT"})
    assert without_download(published).model.own_weights is None
    file = settings(model={"name": "mlp", "weights": "./w.safetensors"})
    assert without_download(file) is file
