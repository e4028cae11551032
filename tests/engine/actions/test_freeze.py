"""`freeze`: requires_grad = False for the module and all descendants."""

from __future__ import annotations

from fake_site import build
from torch import nn

from hookrun.engine.actions.freeze import Freeze
from hookrun.engine.hook_types import APPLY


def test_every_parameter_below_the_module_stops_training() -> None:
    backbone = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    model = nn.Sequential(backbone, nn.Linear(2, 2))
    assert build(Freeze())(backbone) is None
    assert [parameter.requires_grad for parameter in model.parameters()] == [False] * 6 + [True] * 2


def test_the_named_parameters_alone_stop_training() -> None:
    linear = nn.Linear(2, 2)
    build(Freeze(parameters="bias"))(linear)
    assert linear.weight.requires_grad
    assert not linear.bias.requires_grad
    wrong = Freeze(parameters="bais").incompatibility(APPLY, linear, ["weight", "bias"])
    assert wrong == "the module has no parameter 'bais': did you mean 'bias'?"


def test_modules_without_parameters_are_refused() -> None:
    assert Freeze().incompatibility(APPLY, nn.Sequential(nn.Linear(1, 1)), []) is None
    assert Freeze().incompatibility(APPLY, nn.ReLU(), ["added"]) is None
    assert Freeze().incompatibility(APPLY, nn.Sequential(nn.ReLU()), []) == (
        "neither the module nor a descendant of it has parameters: select modules that have some"
    )
