"""Optimizers and schedules of torch by name; the parameters that a run trains, in groups, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.errors import Problem
from hookrun.run.experiment.optimizers import (
    OPTIMIZERS,
    SCHEDULERS,
    check_arguments,
    check_optimizer,
    check_scheduler,
    last_milestone,
    make_optimizer,
    make_scheduler,
    schedule_notes,
)
from hookrun.run.experiment.parameter_groups import ParameterGroup, Trained, chosen
from hookrun.run.experiment.settings import Named, Optimizer, Schedule, Scheduler, Train

PARTS = [{"name": "ConstantLR", "factor": 7}, {"name": "ConstantLR"}]


def sequential(*parts: dict[str, Any], **args: Any) -> Schedule:
    return Schedule.model_validate({"name": "SequentialLR", "schedulers": parts, **args})


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("spell", [str, str.lower, str.upper])
def test_every_optimizer_steps(name: str, spell: Any) -> None:
    sparse = name == "SparseAdam"
    model: nn.Module = nn.Embedding(3, 3, sparse=True) if sparse else nn.Linear(3, 3, bias=False)
    before = next(model.parameters()).detach().clone()
    optimizer = made(Named(name=spell(name)), model)
    cls = getattr(torch.optim, name)  # the class without the import of torch's compiler is a subclass of it
    assert isinstance(optimizer, cls)
    assert type(optimizer).__qualname__ == cls.__qualname__
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
        (Train.model_validate({"scheduler": {"name": "SequentialLR", "milestones": [9], "schedulers": PARTS}}),
         "train.scheduler.schedulers.0: ConstantLR refuses its arguments"),
    ],
)  # fmt: skip
def test_values_that_torch_refuses_are_found_by_trying(train: Train, said: str) -> None:
    assert said in refused(train)


def test_values_of_a_group_are_told_at_the_group() -> None:
    assert refused(Train(scheduler=Scheduler(name="CosineAnnealingLR"))) == ""
    assert refused(Train(), {"lr": 0.5}) == ""
    assert refused(Train(), {"lr": -1}).startswith("train.optimizer.groups.0: AdamW refuses its arguments")


CONSTANT = {"name": "ConstantLR"}
PLATEAU = {"name": "reduce_lr_on_plateau"}
EMPTY = {"name": "SequentialLR", "schedulers": [], "milestones": [1]}
STEP = {"name": "StepLR", "interval": "step"}


def test_each_part_lasts_at_least_one_step() -> None:
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
        (sequential({"name": "LinearLRR"}, STEP, milestones=[2]),
         ["schedulers.0.name", "schedulers.1.interval", "schedulers.1.step_size"]),
        (sequential(CONSTANT, CONSTANT, milestones=[4]), []),
        (sequential(CONSTANT, CONSTANT), ["milestones"]),
        *[(sequential(CONSTANT, CONSTANT, milestones=wrong), ["milestones"])
          for wrong in ("4", 4, [0], [True], ["4"], [10**13], [4, 5])],
        (sequential(CONSTANT, CONSTANT, CONSTANT, milestones=[5, 5]), ["milestones"]),
        (sequential(milestones=[4]), ["schedulers"]),
        (Schedule(name="ConstantLR", schedulers=()), ["schedulers"]),
    ],
)  # fmt: skip
def test_wrong_milestones_are_told_by_their_keys(named: Schedule, where: list[str]) -> None:
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


def test_saving_an_own_optimizer_is_tried_first(trusted) -> None:
    trusted(ownsteps=OWN)
    assert refused(Train(optimizer=Optimizer(name="ownsteps:Plain"))) == ""
    said = refused(Train(optimizer=Optimizer(name="ownsteps:WithFunction")))
    assert said.startswith("train.optimizer.name: the state of With")
    assert "state_dict()" in said
    said = refused(Train(scheduler=Scheduler(name="ownsteps:Schedule")))
    assert said.startswith("train.scheduler.name: the state of Sch")
    assert "model is a" in said


BIAS = {"select": "relu1", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}
HOOKS = {"shift": BIAS}
FROZEN = {"f": {"select": "fc", "hook": "apply", "action": "freeze"}}


class Net(nn.Module):
    """With a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.relu1, self.conv2 = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3)
        self.fc, self.tied = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.tied.weight = self.fc.weight


def choice(
    hooks: dict[str, Any] | None = None, model: nn.Module | None = None, **train: Any
) -> tuple[Trained, list[Problem]]:
    spec = hookrun.load_spec({"hooks": hooks or {}})
    return chosen(Train.model_validate(train), spec, Net() if model is None else model)


def trained(hooks: dict[str, Any] | None = None, **train: Any) -> Trained:
    found, problems = choice(hooks, **train)
    assert problems == []
    return found


def names(found: Trained) -> list[str]:
    return [name for group in found.groups for name in group.names]


def told(hooks: dict[str, Any] | None = None, **train: Any) -> str:
    _, problems = choice(hooks, **train)
    return "\n".join(f"{each.where}: {each.what}\n  {each.hint}" for each in problems)


def groups(*members: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"name": "SGD", "lr": 0.1, "groups": list(members)}}


def test_parameters_are_chosen_by_module_or_name() -> None:
    everything = trained(HOOKS)
    assert names(everything)[-1] == "relu1.shift_bias"
    assert len(names(everything)) == 7
    assert everything.frozen == frozenset()
    shown = "all 7 parameters (73 of 73 elements, without those that hooks add)"
    assert everything.shown == shown, "a shared weight counts once"
    assert names(trained(HOOKS, parameters=["hook:*", "fc.bias"])) == ["fc.bias", "relu1.shift_bias"]
    rest = {"path": "**", "exclude": "conv*"}
    assert names(trained(HOOKS, parameters=rest)) == ["fc.weight", "fc.bias", "relu1.shift_bias"]
    assert names(trained(parameters="tied")) == ["fc.weight"]
    assert trained(HOOKS, parameters="hook:shift").shown.startswith("1 of 7 parameters (0 of 73 elements,")


def test_what_hooks_add_later_is_frozen_too() -> None:
    model = Net()
    found, _ = choice(HOOKS, model, parameters="fc")
    assert all(each.requires_grad for each in model.parameters()), "choosing changes nothing"
    model.relu1.register_parameter("shift_bias", nn.Parameter(model.conv1.bias.detach().clone()))
    model.fc.bias.requires_grad_(False)
    found.freeze_rest(model)
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["fc.weight"]
    assert "relu1.shift_bias" in found.frozen


def test_other_groups_come_before_the_chosen_ones() -> None:
    found = trained(HOOKS, **groups({"select": ["hook:*", "fc"], "lr": 1}, {"select": "conv2.weight"}))
    assert [(group.where, group.names, dict(group.args)) for group in found.groups] == [
        ("", ("conv1.weight", "conv1.bias", "conv2.bias"), {}),
        ("train.optimizer.groups.0", ("fc.weight", "fc.bias", "relu1.shift_bias"), {"lr": 1}),
        ("train.optimizer.groups.1", ("conv2.weight",), {}),
    ]
    whole = trained(**groups({"select": "**", "lr": 1}))
    assert len(whole.groups) == 1
    assert whole.groups[0].where, "no empty group of the others"
    only = trained(parameters="fc", **groups({"select": "{fc,conv1}"}))
    assert [group.names for group in only.groups] == [("fc.weight", "fc.bias")]


def test_the_plan_counts_the_parameters_of_groups() -> None:
    train = groups({"select": "conv*", "lr": 1}, {"select": "fc.bias"})
    spec = Train.model_validate(train)
    assert list(trained(**train).lines(spec.optimizer)) == [
        "trains all 6 parameters (73 of 73 elements) with SGD(lr=0.1)",
        "  groups.0 (conv*): lr=1 for conv1.weight, conv1.bias, conv2.weight, conv2.bias",
        "  groups.1 (fc.bias): no arguments for fc.bias",
    ]
    (line,) = trained(HOOKS, parameters=["fc", "hook:*"]).lines(spec.optimizer)
    assert line.startswith("trains 3 of 7 parameters (15 of 73 elements, without those that hooks add)")


@pytest.mark.parametrize("hooks, train, text", [
    ({}, groups({"select": "cnv1"}), "groups.0.select: 'cnv1' matches no parameter of Net\n  did you mean 'conv1'"),
    ({}, {"parameters": "fcc"}, "train.parameters: 'fcc' matches no parameter of Net\n  did you mean 'fc'?"),
    ({}, {"parameters": ["fc", "relu9"]}, "train.parameters.1: 'relu9' matches no parameter"),
    ({}, {"parameters": "relu1"}, "train.parameters: 'relu1' matches no parameter"),
    ({}, {"parameters": "hook:*"}, "train.parameters: 'hook:*': no hook adds parameters"),
    (HOOKS, {"parameters": ["fc", "hook:shft"]}, "train.parameters.1: 'hook:shft': there is no hook 'shft' that adds"),
    (HOOKS, {"parameters": "hook:shft"}, "did you mean 'shift'?"),
    ({"shift": {**BIAS, "enabled": False}}, {"parameters": "hook:shift"}, "no hook adds parameters"),
    (FROZEN, {"parameters": "fc"}, "'fc' names only parameters that are not trained: fc.weight, fc.bias"),
    ({}, {"parameters": "fc", **groups({"select": "conv1"})}, "are not trained: conv1.weight, conv1.bias"),
])  # fmt: skip
def test_a_wrong_name_is_told_where_it_is_with_the_nearest(hooks: Any, train: Any, text: str) -> None:
    assert text in told(hooks, **train)


def test_two_groups_with_one_parameter_are_refused() -> None:
    overlap = told(**groups({"select": "conv*"}, {"select": ["fc", "conv1.bias"]}, {"select": "tied"}))
    assert "groups.1.select: '[fc, conv1.bias]' and 'conv*' of groups.0 both name conv1.bias;" in overlap
    assert "groups.2.select: 'tied' and '[fc, conv1.bias]' of groups.1 both name fc.weight;" in overlap
    model = Net().requires_grad_(False)
    assert [each.where for each in choice(model=model)[1]] == ["train.parameters"]
    assert [each.where for each in choice(model=nn.ReLU())[1]] == ["train.parameters"]


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
    weight = model.weight.detach().clone()
    drawn = torch.get_rng_state()
    problems = check_arguments(train, model, groups)
    assert torch.equal(model.weight, weight)
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), drawn)
    return "\n".join(map(str, problems))
