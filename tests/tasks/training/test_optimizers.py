"""Every optimizer and schedule of torch that needs no code can be chosen by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookrun.spec.experiment import Named, Optimizer, Schedule, Scheduler, Train
from hookrun.tasks.training.optimizers import (
    OPTIMIZERS,
    SCHEDULERS,
    check_arguments,
    check_optimizer,
    check_scheduler,
    clip,
    last_milestone,
    make_optimizer,
    make_scheduler,
    schedule_notes,
)
from hookrun.tasks.training.parameter_groups import ParameterGroup


def made(named: Named, model: nn.Module) -> torch.optim.Optimizer:
    by_name = dict(model.named_parameters())
    return make_optimizer(named, [ParameterGroup("", "", tuple(by_name))], by_name)


def sgd() -> torch.optim.Optimizer:
    return made(Named(name="SGD", lr=1.0), nn.Linear(2, 2))  # type: ignore[call-arg]


def refused(train: Train, group: dict[str, Any] | None = None) -> str:
    """What is said of values that torch refuses, of the optimizer or of a group."""
    model = nn.Linear(2, 2)
    where = "" if group is None else "train.optimizer.groups.0"
    groups = [ParameterGroup(where, "", ("weight", "bias", "added"), group or {})]
    weight, drawn = model.weight.detach().clone(), torch.get_rng_state()
    problems = check_arguments(train, model, groups)
    assert torch.equal(model.weight, weight) and model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), drawn)
    return "\n".join(map(str, problems))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("spell", [str, str.lower, str.upper])
def test_every_optimizer_steps(name: str, spell: Any) -> None:
    sparse = name == "SparseAdam"
    model: nn.Module = nn.Embedding(3, 3, sparse=True) if sparse else nn.Linear(3, 3, bias=False)
    before = next(model.parameters()).detach().clone()
    optimizer = made(Named(name=spell(name)), model)
    cls = getattr(torch.optim, name)  # the class without the import of torch's compiler is a subclass of it
    assert isinstance(optimizer, cls) and type(optimizer).__qualname__ == cls.__qualname__
    model(torch.tensor([0, 1]) if sparse else torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(next(model.parameters()), before)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 1},
    "MultiStepLR": {"milestones": [1]},
    "ExponentialLR": {"gamma": 0.5},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "OneCycleLR": {"max_lr": 1.0, "cycle_momentum": False},
}


PLAIN = sorted(set(SCHEDULERS) - {"SequentialLR", "ChainedScheduler"})


@pytest.mark.parametrize("name", PLAIN)
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


@pytest.mark.parametrize(
    ("problems", "said"),
    [
        (check_optimizer(Optimizer(name="AdamV")), "train.optimizer.name: found 'AdamV'"),
        (check_optimizer(Optimizer(name="LBFGS")), "train.optimizer.name"),
        (check_optimizer(Optimizer(name="Adam", beta=0.9)), "did you mean 'betas'"),  # type: ignore[call-arg]
        (
            check_optimizer(Optimizer(name="Adam", params=1)),
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
    assert said in refused(train)


def test_values_that_torch_accepts_pass_and_those_of_a_group_are_told_at_the_group() -> None:
    assert refused(Train(scheduler=Scheduler(name="CosineAnnealingLR"))) == ""
    assert refused(Train(), {"lr": 0.5}) == ""
    assert refused(Train(), {"lr": -1}).startswith("train.optimizer.groups.0: AdamW refuses its arguments")


CONSTANT, PLATEAU = {"name": "ConstantLR"}, {"name": "reduce_lr_on_plateau"}


EMPTY = {"name": "SequentialLR", "schedulers": [], "milestones": [1]}


def sequential(*parts: dict[str, Any], **args: Any) -> Schedule:
    return Schedule.model_validate({"name": "SequentialLR", "schedulers": parts, **args})


def test_each_part_lasts_until_the_next_milestone_and_at_least_one_step() -> None:
    parts = [{"name": "CosineAnnealingLR"}] * 3
    for args, intervals, expected in (
        ({"milestones": [3, 5]}, 20, [3, 2, 15]),
        ({"milestones": [30, 31]}, 20, [30, 1, 1]),  # it ends before
        ({"name": "ChainedScheduler"}, 20, [20, 20, 20]),  # all at once
    ):
        made: Any = make_scheduler(sequential(*parts, **args), sgd(), intervals)
        assert [part.T_max for part in made._schedulers] == expected


def test_the_last_milestone_may_be_that_of_an_inner_schedule() -> None:
    inner = {"name": "SequentialLR", "schedulers": [CONSTANT, CONSTANT], "milestones": [9]}
    assert last_milestone(sequential(inner, CONSTANT, milestones=[4])) == 9
    assert last_milestone(sequential(CONSTANT)) == 0


@pytest.mark.parametrize(
    ("named", "where"),
    [
        (sequential(CONSTANT, PLATEAU, milestones=[4, 4]), ["schedulers.1.name", "milestones"]),
        (sequential(CONSTANT, EMPTY, milestones=[2]), ["schedulers.1.name", "schedulers.1.schedulers"]),
        (sequential(CONSTANT, CONSTANT, milestones=[4]), []),
        (sequential(CONSTANT, CONSTANT, milestones=[4, 5]), ["milestones"]),
        (sequential(CONSTANT, CONSTANT, milestones="4"), ["milestones"]),
        (sequential(milestones=[4]), ["schedulers"]),
        (Schedule(name="ConstantLR", schedulers=()), ["schedulers"]),
    ],
)  # fmt: skip
def test_wrong_parts_and_milestones_are_reported_with_their_key_paths(
    named: Schedule, where: list[str]
) -> None:
    assert [each.where.removeprefix("train.scheduler.") for each in check_scheduler(named)] == where


def test_a_one_cycle_inside_of_another_schedule_has_a_note() -> None:
    cycle = sequential(sequential({"name": "one_cycle_lr"}).model_dump())
    assert [each.split(":")[0] for each in schedule_notes(cycle, "s")] == ["s.schedulers.0.schedulers.0"]


OWN = """
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

class Plain(SGD):
    pass

class WithFunction(SGD):
    def step(self, closure=None):
        torch.rand(3)
        self.state[self.param_groups[0]["params"][0]]["rule"] = lambda gradient: gradient
        return super().step(closure)

class Schedule(LambdaLR):
    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)

    def state_dict(self):
        return {**super().state_dict(), "model": nn.Identity()}
"""


def test_the_state_of_a_user_s_optimizer_and_schedule_is_tried_without_drawing_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ownsteps.py").write_text(OWN)
    monkeypatch.setenv("HOOKRUN_TRUST", "ownsteps")
    assert refused(Train(optimizer=Optimizer(name="ownsteps:Plain"))) == ""
    said = refused(Train(optimizer=Optimizer(name="ownsteps:WithFunction")))
    assert (
        said.startswith("train.optimizer.name: the state of WithFunction cannot be saved")
        and "state_dict()" in said
    )
    said = refused(Train(scheduler=Scheduler(name="ownsteps:Schedule")))
    assert (
        said.startswith("train.scheduler.name: the state of Schedule cannot be saved")
        and "model is a" in said
    )
    sys.modules.pop("ownsteps")


def with_gradients() -> torch.optim.SGD:
    """Two groups, whose gradients 3 and 4 have the norm 5, and a parameter without a gradient."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter, value in zip(parameters, (3.0, -4.0), strict=False):
        parameter.grad = torch.tensor([value])
    return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=1)


def test_clipping_is_over_all_groups_and_returns_the_norm_before() -> None:
    for settings, expected in (
        ({"clip_grad_norm": 1.0}, [0.6, -0.8]),
        ({"clip_grad_value": 3.5}, [3.0, -3.5]),
        ({}, [3.0, -4.0]),
    ):
        made = with_gradients()
        norm = clip(Train(**settings), made)
        found = [p.grad.item() for group in made.param_groups for p in group["params"] if p.grad is not None]
        assert found == pytest.approx(expected, abs=1e-5), settings
        assert (norm is None) == (not settings), settings
        assert norm is None or norm.item() == pytest.approx(5), settings
