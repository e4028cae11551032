"""Every optimizer and schedule of torch that needs no code can be chosen by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, ReduceLROnPlateau, SequentialLR

from hookrun.errors import HookrunError, SpecError
from hookrun.spec.experiment import Named, Optimizer, Schedule, Scheduler, Train
from hookrun.tasks.training.optimizers import (
    check_arguments,
    check_optimizer,
    check_scheduler,
    clip,
    last_milestone,
    lengths,
    make_optimizer,
    make_scheduler,
    optimizers,
    schedule_notes,
    schedulers,
    unsavable_optimizer,
    unsavable_schedule,
    wrong_parts,
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


CONSTANT = {"name": "ConstantLR"}


def sequential(*parts: dict[str, Any], **args: Any) -> Schedule:
    return Schedule.model_validate({"name": "SequentialLR", "schedulers": parts, **args})


def test_each_part_lasts_until_the_next_milestone_and_at_least_one_step() -> None:
    assert lengths(sequential(CONSTANT, CONSTANT, CONSTANT, milestones=[3, 5]), 20) == [3, 2, 15]
    assert lengths(sequential(CONSTANT, CONSTANT, milestones=[30]), 20) == [30, 1], "it ends before"
    assert lengths(sequential(CONSTANT, CONSTANT), 20) == [20, 20], "chained: all at once"


def test_the_last_milestone_may_be_that_of_an_inner_schedule() -> None:
    inner = {"name": "SequentialLR", "schedulers": [CONSTANT, CONSTANT], "milestones": [9]}
    assert last_milestone(sequential(inner, CONSTANT, milestones=[4])) == 9
    assert last_milestone(None) == last_milestone(sequential(CONSTANT)) == 0


def test_wrong_parts_and_milestones_are_reported_with_their_key_paths() -> None:
    named = sequential(CONSTANT, {"name": "ReduceLROnPlateau"}, milestones=[4, 4])
    found = wrong_parts(named, SequentialLR, [ConstantLR, ReduceLROnPlateau], "train.scheduler")
    assert [each.where for each in found] == [
        "train.scheduler.schedulers.1.name", "train.scheduler.milestones",
    ]  # fmt: skip
    right = sequential(CONSTANT, CONSTANT, milestones=[4])
    assert not list(wrong_parts(right, SequentialLR, [ConstantLR, ConstantLR], "train.scheduler"))
    cycle = sequential(sequential({"name": "one_cycle_lr"}).model_dump())
    assert [each.split(":")[0] for each in schedule_notes(cycle, "s")] == ["s.schedulers.0.schedulers.0"]


class Plain(SGD):
    """Its state is numbers and tensors."""


class WithFunction(SGD):
    """Its state has a function after a step, which a file cannot hold."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state[self.param_groups[0]["params"][0]]["rule"] = lambda gradient: gradient
        return super().step(closure)


def plain(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Plain(parameters, lr=0.1, momentum=0.9)


def test_the_state_after_a_step_is_tried_without_drawing_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert unsavable_optimizer(plain, "train.optimizer") == []
    (problem,) = unsavable_optimizer(lambda each: WithFunction(each, lr=0.1), "train.optimizer")
    assert problem.where == "train.optimizer.name"
    assert "the state of WithFunction cannot be saved" in problem.what and "state_dict()" in problem.hint
    assert torch.equal(torch.get_rng_state(), before)


class OwnSchedule(LambdaLR):
    """Its state has an object of a user's class."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "model": nn.Linear(1, 1)}


def test_a_user_s_schedule_is_tried_and_torch_s_are_not() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert unsavable_schedule(None, "train.scheduler") == []
    assert unsavable_schedule(LambdaLR(optimizer, lambda step: 1.0), "train.scheduler") == []
    (problem,) = unsavable_schedule(OwnSchedule(optimizer, lambda step: 1.0), "train.scheduler")
    assert problem.where == "train.scheduler.name"
    assert "OwnSchedule cannot be saved" in problem.what and "model is a torch.nn" in problem.what


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
