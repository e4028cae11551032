"""Every optimizer and schedule of torch that needs no code can be chosen by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookrun.errors import HookrunError, SpecError
from hookrun.spec.experiment import Named, Optimizer, Scheduler, Train
from hookrun.tasks.loop.optimizers import (
    check_arguments,
    check_optimizer,
    check_scheduler,
    make_optimizer,
    make_scheduler,
    optimizers,
    schedulers,
)


def sgd() -> torch.optim.Optimizer:
    return make_optimizer(Named(name="SGD", lr=1.0), nn.Linear(2, 2))  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(optimizers()))
@pytest.mark.parametrize("spell", [str, str.lower, str.upper])
def test_every_optimizer_steps(name: str, spell: Any) -> None:
    sparse = name == "SparseAdam"
    model: nn.Module = nn.Embedding(3, 3, sparse=True) if sparse else nn.Linear(3, 3, bias=False)
    before = next(model.parameters()).detach().clone()
    optimizer = make_optimizer(Named(name=spell(name)), model)
    cls = getattr(torch.optim, name)  # the class without the import of torch's compiler is a subclass of it
    assert isinstance(optimizer, cls) and type(optimizer).__qualname__ == cls.__qualname__
    model(torch.tensor([0, 1]) if sparse else torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(next(model.parameters()), before)


def test_only_what_requires_a_gradient_is_given_to_it() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (group,) = make_optimizer(Named(name="SGD"), model).param_groups
    assert group["params"] == [model.weight]
    model.weight.requires_grad_(False)
    with pytest.raises(HookrunError, match="nothing to train"):
        make_optimizer(Named(name="SGD"), model)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 1},
    "MultiStepLR": {"milestones": [1]},
    "ExponentialLR": {"gamma": 0.5},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "OneCycleLR": {"max_lr": 1.0, "cycle_momentum": False},
}


@pytest.mark.parametrize("name", sorted(schedulers()))
def test_every_schedule_runs_to_the_end_of_the_run(name: str) -> None:
    named = Scheduler(name=name, **ARGUMENTS.get(name, {}))
    assert check_scheduler(named) == []
    optimizer = sgd()
    scheduler = make_scheduler(named, optimizer, intervals=5)
    assert type(scheduler) is getattr(torch.optim.lr_scheduler, name)
    for _ in range(5):
        optimizer.step()
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))


def test_the_length_of_the_run_is_filled_in_where_it_is_left_out() -> None:
    def made(name: str, **args: Any) -> Any:
        return make_scheduler(Scheduler(name=name, **args), sgd(), intervals=7)

    assert made("cosine_annealing_lr").T_max == 7
    assert made("CosineAnnealingLR", T_max=3).T_max == 3
    assert made("onecyclelr", **ARGUMENTS["OneCycleLR"]).total_steps == 7
    assert made("OneCycleLR", **ARGUMENTS["OneCycleLR"], epochs=2, steps_per_epoch=5).total_steps == 10
    assert made("LinearLR").total_iters == 5, "torch's default"
    assert make_scheduler(None, sgd(), intervals=7) is None


@pytest.mark.parametrize(
    ("problems", "said"),
    [
        (check_optimizer(Named(name="AdamV")), "train.optimizer.name: found 'AdamV'"),
        (check_optimizer(Named(name="LBFGS")), "train.optimizer.name"),
        (check_optimizer(Named(name="Adam", beta=0.9)), "did you mean 'betas'"),  # type: ignore[call-arg]
        (
            check_optimizer(Named(name="Adam", params=1)),
            "train.optimizer.params: 'Adam' takes no argument 'params'",
        ),  # type: ignore[call-arg]
        (check_scheduler(Scheduler(name="ExponentialLR")), "train.scheduler.gamma: is missing"),
        (check_scheduler(Scheduler(name="LambdaLR")), "train.scheduler.name: found 'LambdaLR'"),
        (check_scheduler(Scheduler(name="StepLR", step_siz=1)), "did you mean 'step_size'"),  # type: ignore[call-arg]
        (check_scheduler(Scheduler(name="ReduceLROnPlateau", interval="step")), "use interval: epoch"),
    ],
)
def test_wrong_names_are_reported_before_anything_is_created(problems: list[Any], said: str) -> None:
    assert said in "\n".join(map(str, problems))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (Train(optimizer=Optimizer(name="AdamW", lr=-1)), "train.optimizer: AdamW refuses its arguments: Invalid lear"),  # type: ignore[call-arg]
        (Train(optimizer=Optimizer(name="SGD", lr="fast")), "train.optimizer.lr: found 'fast', expected a number"),  # type: ignore[call-arg]
        (Train(optimizer=Optimizer(name="Muon")), "2D"),
        (Train(optimizer=Optimizer(name="Adam", fused=True, foreach=True)), "train.optimizer: Adam refuses"),  # type: ignore[call-arg]
        (Train(scheduler=Scheduler(name="StepLR", step_size=1, last_epoch=3)), "train.scheduler: StepLR refuses"),  # type: ignore[call-arg]
        (Train(scheduler=Scheduler(name="OneCycleLR", max_lr=1, pct_start=7)), "train.scheduler: OneCycleLR refuses"),  # type: ignore[call-arg]
    ],
)  # fmt: skip
def test_values_that_torch_refuses_are_found_by_trying(train: Train, said: str) -> None:
    assert said in "\n".join(map(str, check_arguments(train, nn.Linear(2, 2))))


def test_values_that_torch_accepts_pass_and_the_model_does_not_change() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight.detach().clone()
    assert check_arguments(Train(scheduler=Scheduler(name="CosineAnnealingLR")), model) == []
    assert torch.equal(model.weight, weight) and model.weight.grad is None
    assert check_arguments(Train(optimizer=Optimizer(name="SGD", lr=-1)), model.requires_grad_(False)) == []  # type: ignore[call-arg]


def test_an_unknown_name_is_refused_at_creation_too() -> None:
    with pytest.raises(SpecError, match="did you mean 'Adam"):
        make_optimizer(Named(name="Adamm"), nn.Linear(2, 2))
