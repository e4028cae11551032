"""Schedules, groups, clipping and averages of the weights equal a plain PyTorch loop bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_nets import POISONED
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookrun.command.compose.compose import compose_dict
from hookrun.run.passes.batches import Batches
from hookrun.run.tasks import parse_experiment, prepare

BASE = (
    "compute=cpu", "compute.threads=1", "train.shuffle=false", "train.limit_batches=5", "train.log_every=1",
)  # fmt: skip


STEPS = ("train.optimizer.name=SGD", "train.optimizer.lr=0.1", "+train.optimizer.momentum=0.9")
SGD_SAYS = ("model=mlp", *STEPS, "train.epochs=2")


def warm_up(optimizer: Optimizer) -> Any:
    first = schedules.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    second = schedules.CosineAnnealingLR(optimizer, T_max=6)
    return schedules.SequentialLR(optimizer, [first, second], milestones=[4])


def three(optimizer: Optimizer) -> Any:
    parts = [
        schedules.ConstantLR(optimizer, factor=0.5),
        schedules.MultiStepLR(optimizer, milestones=[1, 2]),
        schedules.PolynomialLR(optimizer),
    ]
    return schedules.SequentialLR(optimizer, parts, milestones=[2, 5])


def chained(optimizer: Optimizer) -> Any:
    first = schedules.ConstantLR(optimizer, factor=0.1, total_iters=2)
    return schedules.ChainedScheduler([first, schedules.ExponentialLR(optimizer, 0.5)], optimizer)


@pytest.mark.parametrize(
    ("says", "schedule", "by_epoch"),
    [
        (
            "{name: SequentialLR, milestones: [4], interval: step, schedulers: "
            "[{name: LinearLR, start_factor: 0.1, total_iters: 4}, {name: CosineAnnealingLR}]}",
            warm_up,
            False,
        ),
        (
            "{name: sequential_lr, milestones: [2, 5], interval: step, schedulers: [{name: ConstantLR, factor: 0.5}, "
            "{name: MultiStepLR, milestones: [1, 2]}, {name: PolynomialLR}]}",
            three,
            False,
        ),
        (
            "{name: ChainedScheduler, schedulers: "
            "[{name: ConstantLR, factor: 0.1, total_iters: 2}, {name: ExponentialLR, gamma: 0.5}]}",
            chained,
            True,
        ),
    ],
    ids=["warm-up", "three", "chained"],
)  # fmt: skip
def test_composed_schedules(executed, says: str, schedule: Any, by_epoch: bool) -> None:
    found = executed(*BASE, *SGD_SAYS, f"train.scheduler={says}")
    plain = Plain(SGD_SAYS, sgd, schedule, by_epoch=by_epoch)
    same(found, plain.train())
    assert train_lines(found, "lr") == plain.rates
    assert len(set(plain.rates)) > 1


def test_accumulation_equals_a_plain_loop(executed) -> None:
    """A group by module name, one by glob with another weight decay, and the rest; a smaller micro-batch at the end."""

    def grouped(model: nn.Module) -> Optimizer:
        conv1 = list(model.conv1.parameters())
        weights = [model.conv2.weight, model.fc.weight]
        rest = [model.conv2.bias, model.fc.bias]
        groups = [{"params": rest}, {"params": conv1, "lr": 1e-4}, {"params": weights, "weight_decay": 0.5}]
        return AdamW(groups, lr=0.01)

    says = (
        "train.optimizer={name: AdamW, lr: 0.01, groups: [{select: conv1, lr: 1e-4}, "
        '{select: ["{conv2,fc}.weight"], weight_decay: 0.5}]}',
        *("train.accumulate=3", "data.batch_size=300", "train.epochs=1"),
    )
    same(executed(*BASE, *says), Plain(says, grouped).train(), tolerance=1e-5)


def test_only_the_named_parameters_are_trained(executed, capsys) -> None:
    says = ("train.parameters=[fc, conv2.bias]", "train.epochs=1")
    printed = "trains 3 of 6 parameters"

    def some(model: nn.Module) -> Optimizer:
        assert [name for name, each in model.named_parameters() if each.requires_grad] == [
            "conv2.bias", "fc.weight", "fc.bias"
        ]  # fmt: skip
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return AdamW([model.conv2.bias, model.fc.weight, model.fc.bias], lr=0.001)

    same(executed(*BASE, *says), Plain(says, some).train(), tolerance=1e-5)
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("by_value", [False, True])
def test_clipping_comes_after_unscaling(executed, fp16: bool, by_value: bool) -> None:
    key, bound = ("clip_grad_value", 0.003) if by_value else ("clip_grad_norm", 0.2)
    precision = f"compute.precision={'fp16' if fp16 else 'fp32'}"
    says = (*SGD_SAYS, "train.accumulate=2", precision, "train.epochs=1")
    clip = clip_grad_value_ if by_value else clip_grad_norm_
    plain = Plain(says, sgd, clip=lambda parameters: clip(parameters, bound), fp16=fp16)
    found = executed(*BASE, *says, f"train.{key}={bound}")
    same(found, plain.train())
    assert train_lines(found, "grad_norm") == pytest.approx(plain.norms)
    assert max(plain.norms) > 0.2, "it clips"


def test_hooks_on_gradients_run_before_clipping(executed) -> None:
    hooks = [
        f"+hooks.{kind}={{select: fc.bias, hook: {kind}, action: capture}}"
        for kind in ("grad", "post_accumulate_grad", "optimizer_step_pre")
    ]
    found = executed(*BASE, *SGD_SAYS, "train.steps=1", "train.clip_grad_value=0.001", *hooks)
    seen = {kind: found.captures[kind]["fc.bias"][0] for kind in ("grad", "post_accumulate_grad")}
    for each in seen.values():
        assert each.abs().max() > 0.001
    assert torch.equal(found.captures["optimizer_step_pre"]["fc.bias"][0], seen["grad"].clamp(-0.001, 0.001))


def test_the_average_of_the_weights_is_validated(executed, own_model) -> None:
    """With batch norm: its running statistics are averaged, its counts are the model's."""
    body = """
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(1)
            self.fc = nn.Linear(64, 10)

        def forward(self, x):
            return self.fc(self.norm(x).flatten(1))
    """
    says = (*own_model(body), *STEPS, "train.epochs=1")
    seen = "+hooks.seen={select: fc, hook: forward, action: capture, when: {mode: eval}}"
    found = executed(*BASE, *says, "train.ema={decay: 0.9}", seen)
    plain = Plain(says, sgd, decay=0.9)
    model = plain.train()
    same(found, model, "last")
    average = average_of(plain, model)
    same(found, average, "ema")
    same(found, average, "best")
    prepared: Any = prepared_by(says)
    batches = list(Batches(prepared, "val").epoch(0))
    with torch.no_grad():
        expected = torch.cat([average.eval()(batch.inputs) for batch in batches])
    assert torch.equal(found.captures["seen"]["fc"][:], expected), "hooks see the averages"


def test_a_loop_without_the_skipped_steps(executed, own_model, capsys) -> None:
    """Weights, running statistics, rates and averages are those of a loop that goes past the steps."""
    says = (*own_model(POISONED), "+model.args.at=[3,8]", *STEPS, "train.epochs=2", "train.accumulate=2")
    found = executed(
        *(*BASE, *says, "train.ema={decay: 0.9}", "train.on_nonfinite=skip"),
        "train.scheduler={name: StepLR, step_size: 1, gamma: 0.5, interval: step}",
        "+hooks.seen={select: drop, hook: forward, action: stats, when: {mode: train}}",
    )
    said = capsys.readouterr().out
    assert "step 1: the loss is nan: in micro-batch 1 of 2, first made by" in said, said
    assert "steps skipped in epoch 1: 1, so far: 2" in said
    epochs = [line for line in found.metrics if line.get("of") == "epoch" and line["split"] == "train"]
    assert [line["skipped_steps"] for line in epochs] == [1, 1]
    assert all(line["loss"] == line["loss"] for line in epochs), "a batch that was left out is in no mean"
    steps = [line["step"] for line in found.metrics if line.get("of") == "batch"]
    assert steps == [0, 2, 3, 5], "the step counts on"
    assert len(found.stats) == 10, "the second run of a step leaves no record"
    plain = Plain(says, sgd, lambda optimizer: schedules.StepLR(optimizer, 1, 0.5), decay=0.9, skips=True)
    model = plain.train()
    same(found, model)
    same(found, average_of(plain, model), "ema")
    assert train_lines(found, "lr") == plain.rates


def prepared_by(overrides: Iterable[str]) -> Any:
    return prepare(parse_experiment(compose_dict([*BASE, *overrides])), trust=frozenset({"own_models"}))


@dataclass
class Plain:
    """A loop as one would write it; `clip` is called on the parameters of the optimizer."""

    overrides: tuple[str, ...]
    optimizer: Callable[[nn.Module], Optimizer]
    schedule: Callable[[Optimizer], Any] | None = None
    clip: Callable[[Iterable[nn.Parameter]], object] | None = None
    decay: float | None = None
    fp16: bool = False
    by_epoch: bool = False
    skips: bool = False
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    averaged: AveragedModel | None = None

    def train(self) -> nn.Module:
        prepared: Any = prepared_by(self.overrides)
        settings = prepared.settings.train
        model = prepared.model
        batches = Batches(prepared, "train")
        torch.manual_seed(0)  # the seed of a run
        optimizer = self.optimizer(model)
        schedule = self.schedule(optimizer) if self.schedule else None
        scaler = torch.amp.GradScaler("cpu", enabled=self.fp16)
        if self.decay is not None:
            average = get_ema_multi_avg_fn(self.decay)
            self.averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        model.train()
        for epoch in range(settings.epochs):
            everything = list(batches.epoch(epoch))
            for start in range(0, len(everything), settings.accumulate):
                group = everything[start : start + settings.accumulate]
                samples = sum(len(batch.ids) for batch in group)
                optimizer.zero_grad()
                losses = list[Tensor]()
                before = {key: each.clone() for key, each in model.state_dict().items()}
                for batch in group:
                    with torch.autocast("cpu", torch.float16, enabled=self.fp16):
                        loss = F.cross_entropy(model(batch.inputs), batch.target)
                    losses.append(loss)
                    scaler.scale(loss * (len(batch.ids) / samples)).backward()
                if self.skips and not torch.stack(losses).isfinite().all():  # what is finite stays
                    now = model.state_dict().items()
                    model.load_state_dict(before | {key: each for key, each in now if each.isfinite().all()})
                    continue
                scaler.unscale_(optimizer)
                stepped = [parameter for each in optimizer.param_groups for parameter in each["params"]]
                if self.clip is not None:
                    self.norms.append(float(nn.utils.get_total_norm([each.grad for each in stepped])))
                    self.clip(stepped)
                self.rates.append(optimizer.param_groups[0]["lr"])
                scaler.step(optimizer)
                scaler.update()
                if self.averaged is not None:
                    self.averaged.update_parameters(model)
                if schedule is not None and not self.by_epoch:
                    schedule.step()
            if schedule is not None and self.by_epoch:
                schedule.step()
        return model  # type: ignore[no-any-return]


def average_of(plain: Plain, model: nn.Module) -> nn.Module:
    """The averages that a loop made beside the model."""
    assert plain.averaged is not None
    average: nn.Module = plain.averaged.module
    average.load_state_dict({**average.state_dict(), **counts_of(model)})
    return average


def counts_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that count batches, which are not averaged."""
    return {key: each for key, each in model.state_dict().items() if not each.is_floating_point()}


def same(run: Any, model: nn.Module, name: str = "last", *, tolerance: float = 0.0) -> None:
    """Compare results; tolerance: for convolutions, whose CPU kernels may round differently from call to call."""
    found = load_file(run.path / f"checkpoints/{name}.safetensors")
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor.detach(), rtol=tolerance, atol=tolerance)


def train_lines(run: Any, key: str) -> list[float]:
    return [line[key] for line in run.metrics if line["split"] == "train" and key in line]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)
