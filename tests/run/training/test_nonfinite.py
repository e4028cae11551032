"""`train.on_nonfinite`: what is not finite takes no step; whoever made it first is named, and nothing is changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_nets import POISONED
from torch import Tensor, nn
from torch.nn import functional as F

import hookrun
from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.records import Memory
from hookrun.run.experiment.metrics.losses import TrainLoss
from hookrun.run.experiment.settings import Train
from hookrun.run.passes.batches import Batch
from hookrun.run.training.loop import train
from hookrun.run.training.nonfinite import BeforeStep, NonFiniteTracer, source_of

FOUR_STEPS = ("train.epochs=1", "train.limit_batches=4", "train.log_every=1", "train.shuffle=false")
SKIP = "train.on_nonfinite=skip"
STOP = "train.on_nonfinite=stop"


UNWRITTEN = """
def __init__(self):
    super().__init__()
    self.flat, self.last = nn.Flatten(), nn.Linear(64, 10)

def forward(self, x):
    rows = torch.empty(len(x) + 1, 64)
    rows[: len(x)] = self.flat(x)
    return self.last(rows[1:])
"""


def test_memory_read_before_it_is_written_is_found(fails, own_model) -> None:
    said = fails(*own_model(UNWRITTEN), *FOUR_STEPS)
    assert "epoch 0, step 0: the loss is nan: first made by the forward of (root) (Net)" in said, said


@pytest.mark.parametrize(("select", "hook", "factor", "on"), [
    ("relu1", "forward", "1e39", "relu1, call 0"), ("conv2", "forward_pre", "1e39", "conv2, call 0"),
    ("fc.bias", "grad", "1e39", "fc.bias"), ("relu2", "output_grad", "1e300", "relu2"),
    ("fc", "optimizer_step_pre", "1e39", "fc."),
])  # fmt: skip
def test_a_hook_is_named(select, hook, factor, on, fails) -> None:
    """Whatever type it is of; with a probability it draws as it did."""
    when = "when: {step: {start: 1}, probability: 0.7}"
    keys = f"select: {select}, hook: {hook}, action: scale, factor: {factor}, {when}"
    said = fails("model=cnn", *FOUR_STEPS, f"+hooks.h={{{keys}}}")
    assert f"first made by hook 'h' ({hook}, scale) on {on}" in said, said


def test_a_hook_that_takes_the_value_of_another_is_named(fails) -> None:
    seen = "{select: conv2, hook: forward, action: capture}"
    moved = "{select: relu2, hook: forward, action: scale, factor: {hook: seen, module: conv2}}"
    big = "{select: conv2, hook: forward, action: scale, factor: 1e30}"
    hooks = (f"+hooks.big={big}", f"+hooks.seen={seen}", f"+hooks.moved={moved}")
    said = fails("model=cnn", *FOUR_STEPS, *hooks)
    assert "first made by hook 'moved' (forward, scale) on relu2, call 0" in said, said


BY_STEP = "train.scheduler={name: StepLR, step_size: 1, gamma: 0.5, interval: step}"


def test_overflows_of_the_scaler_do_not_count(run, executed, fails, own_model) -> None:
    """`stop` ends with exit 3 and the weights from before; an overflow under fp16 is not a failure; a bad loss is."""
    net = (*own_model(POISONED), "+model.args.at=[2]")
    found = run(*net, *FOUR_STEPS, STOP, code=3)
    assert found.status["status"] == "stopped"
    assert "step 2: the loss is nan" in found.status["reason"]
    saved = load_file(found.path / "checkpoints/last.safetensors")
    for tensor in saved.values():
        assert tensor.isfinite().all()
    assert not [line for line in found.metrics if line.get("of") == "epoch" and line["split"] == "train"]

    fp16 = ("model=cnn", *FOUR_STEPS, "compute.precision=fp16", "data.batch_size=4")
    overflows = "+hooks.o={select: fc.bias, hook: grad, action: scale, factor: 1e39, when: {step: [1]}}"
    bad_loss = "+hooks.h={select: fc, hook: forward, action: scale, factor: 1e39, when: {step: [2]}}"
    said = fails(*fp16, overflows, bad_loss)
    assert "step 2: the loss is" in said
    assert "first made by hook 'h' (forward, scale) on fc, call 0" in said
    found = executed(*fp16, overflows, bad_loss, SKIP, BY_STEP)
    *steps, epoch = [line for line in found.metrics if line["split"] == "train"]
    assert [line["step"] for line in steps] == [0, 1, 3]
    assert epoch["skipped_steps"] == 1
    assert [line["lr"] for line in steps] == [1e-3, 5e-4, 5e-4], "neither advances the schedule"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_last_hook_on_gradients_is_checked_in(precision: str, executed) -> None:
    """A hook before the optimizer's step acts after the gradient scaler has looked at the gradients."""
    late = (
        "+hooks.h={select: fc.bias, hook: optimizer_step_pre, action: scale, factor: 1e39, when: {step: [1]}}"
    )
    small = ("model=mlp", "train.log_every=1", "train.limit_batches=3", "train.epochs=1")
    found = executed(*small, f"compute.precision={precision}", late, SKIP)
    *steps, epoch = [line for line in found.metrics if line["split"] == "train"]
    assert [line["step"] for line in steps] == [0, 2]
    assert epoch["skipped_steps"] == 1
    weights = load_file(found.path / "checkpoints/last.safetensors")
    for tensor in weights.values():
        assert tensor.isfinite().all()


RULE = {"over": {"steps": 5}, "max_ratio": 10}


@pytest.mark.parametrize("keys", [{}, {"of": "norm", **RULE}, {"of": "loss", **RULE}])
def test_a_check_that_stops_comes_first(keys: dict[str, Any], performed) -> None:
    """Where a `check` hook asks for the end of the run, that is why it ends; also a rule over steps."""
    check = {"select": "fc", "hook": "forward", "action": "check", "policy": "stop", **keys}
    bad = {"select": "fc", "hook": "forward_pre", "action": "scale", "factor": 1e39}
    assert "hook 'c' on fc" in str(performed(train, task={"name": "train"}, hooks={"b": bad, "c": check}))


def test_a_rule_over_steps_fails_before_the_step(performed) -> None:
    check = {"select": "fc", "hook": "forward", "action": "check", "of": "norm", **RULE}
    bad = {"select": "fc", "hook": "forward_pre", "action": "scale", "factor": 1e39}
    with pytest.raises(hookrun.CheckFailed, match="norm is not finite, step 0"):
        performed(train, task={"name": "train"}, hooks={"b": bad, "c": check})


NAN = float("nan")
INF = float("inf")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.factor = nn.BatchNorm1d(2), nn.Linear(2, 2), 1.0
        self.register_buffer("mask", torch.tensor([0.0, -INF]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x)) * self.factor  # type: ignore[no-any-return]


def batch(*values: float, target: float = 0.0) -> Batch:
    """The samples 10, 11, …, each with one value twice."""
    inputs = torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, 2)
    ids = torch.arange(len(values)) + 10
    data: Any = None
    targets = torch.full_like(inputs, target)
    return Batch(ids, inputs, targets, 99, "train", data, len(values), targets)


def asked(
    *group: Batch,
    wrong: int | None = 0,
    spoil: Callable[[Normed], Any] = lambda model: None,
    loss: Any = F.mse_loss,
    **hooks: Any,
) -> str:
    """What is said of a step of these micro-batches; that it leaves the run as it was is checked each time."""
    torch.manual_seed(0)
    model = Normed()
    with hookrun.hooked(model, hooks) as installed, torch.no_grad():
        installed.clock.step = 3
        installed.clock.epoch = 2
        spoil(model)
        before = BeforeStep(model, installed, own_code=True)
        before.take()
        context: Any = SimpleNamespace(
            model=model, hooks=installed, scaler=torch.amp.GradScaler("cpu", enabled=False), autocast=nullcontext,
            prepared=SimpleNamespace(plan=installed.plan, loss=TrainLoss("mse", loss)),
            settings=SimpleNamespace(train=Train()),
        )  # fmt: skip
        torch.rand(3)  # as the step did
        state = [each.clone() for each in model.state_dict().values()], torch.get_rng_state()
        records = list(installed.records)
        fired = dict(installed.fired)
        python = random.getstate()
        numpy = np.random.get_state()[1].tolist()
        with torch.enable_grad():
            said = source_of(context, before, group, wrong)
        assert random.getstate() == python
        assert np.random.get_state()[1].tolist() == numpy
        for old, new in zip(state[0], model.state_dict().values(), strict=True):
            assert torch.equal(old.nan_to_num(), new.nan_to_num())
        assert torch.equal(torch.get_rng_state(), state[1])
        for each in model.parameters():
            assert each.grad is None
        assert installed.records == records
        assert installed.fired == fired
        assert installed.clock.samples is None
    return said


def edit(select: str, hook: str, action: str = "scale", **keys: Any) -> dict[str, Any]:
    given = {"factor": INF} if action == "scale" else {}
    return {"select": select, "hook": hook, "action": action, **given, **keys}


def test_inputs_that_are_not_finite_name_their_samples() -> None:
    counted = "2 NaN and 2 infinite of 8 elements (train samples 11, 13)"
    assert asked(batch(1, NAN, 2, INF)) == f"the inputs of the batch are not finite: {counted}"
    said = asked(batch(1, 2), batch(3, 4, target=NAN), wrong=1)
    assert said.startswith("in micro-batch 1 of 2, the targets of the batch are not finite: 4 NaN")
    assert said.endswith("(train samples 10, 11)")


def test_a_parameter_not_finite_before_is_named_with_its_hooks() -> None:
    def spoil(model: Normed) -> None:
        model.fc.weight[0] = NAN
        model.fc.bias[1] = INF

    later = edit("fc", "optimizer_step_post", when={"step": 5})
    seen = edit("fc", "grad", "stats")
    said = asked(batch(1, 2), spoil=spoil, later=later, seen=seen)
    assert said == (
        "not finite before the forward of this step: the parameter fc.weight: 2 NaN of 4 elements; so are fc.bias; "
        "hook 'later' (optimizer_step_post, scale) changes it"
    )


def test_what_makes_it_first_is_named() -> None:
    now = {**edit("norm", "forward"), "when": {"step": 3, "epoch": 2}}
    gone = {**edit("norm", "forward"), "when": {"step": 1, "epoch": 2}}
    assert asked(batch(1, 2), h=now).startswith("first made by hook 'h' (forward, scale) on norm")
    assert "the step is finite, so the model, the loss or a hook depends on" in asked(batch(1, 2), h=gone)
    said = asked(batch(1, 2), spoil=lambda model: setattr(model, "factor", INF))
    assert said.startswith("first made by the forward of (root) (Normed), call 0, itself, outside")
    healed = {"h": now, "again": edit("fc", "forward", "replace", value=1)}
    said = asked(batch(1, 2), loss=lambda output, target: output.sum() / 0, **healed)
    assert said == "first made by the loss mse, from a finite output and finite targets"


def test_the_repetition_draws_what_the_step_drew() -> None:
    def draws() -> Tensor:
        return torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand())])

    def seed(model: Normed) -> None:
        torch.manual_seed(7), random.seed(7), np.random.seed(7)

    seed(Normed())
    drawn = draws()

    def unlucky(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() / (draws() - drawn).sum()

    said = asked(batch(1, 2), loss=unlucky, spoil=seed)
    assert said.startswith("first made by the loss mse")


def test_gradients_that_overflow_in_their_sum_are_told() -> None:
    def huge(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() * 2e38

    said = asked(batch(1, 2), batch(3, 4), wrong=None, loss=huge)
    assert said.startswith(
        "the gradient of fc.bias, added up over 2 micro-batches, is not finite: 2 infinite"
    )


def test_a_step_that_cannot_be_repeated_does_not_end_the_run() -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError("in the loss")

    said = asked(batch(1, 2), loss=fails)
    assert said.startswith("its source is not known, because the step could not be repeated: ")
    assert "in the loss" in said


# ---- where values first become non-finite in a pass ----

Step = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Layers that double, cut off below 0 and normalize, called as `step` says."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.first, self.relu, self.soft, self.step = nn.Linear(3, 3), nn.ReLU(), nn.Softmax(-1), step
        self.first.weight.data, self.first.bias.data = 2 * torch.eye(3), torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def traced(
    step: Step,
    x: Tensor | None = None,
    inner: nn.Module | None = None,
    loss_of: Callable[[Tensor], Tensor] = torch.square,
    **hook: Any,
) -> tuple[str, str]:
    """What is said of the forward and of the backward pass of one step, under a hook or none; "" for nothing."""
    model = Net(step)
    model.inner = inner
    tracer = NonFiniteTracer(model)
    with following(tracer, model, {"h": hook} if hook else {}):
        output = tracer(torch.tensor([[1.0, 2.0, -3.0]]) if x is None else x)
        loss = loss_of(output).sum()
        tracer.follow_backward(loss, "the loss")
        loss.backward()
    for each in model.modules():
        assert not (each._forward_hooks)
        assert not (each._forward_pre_hooks)
    assert tracer.origin is None or tracer.origin.path is not None
    return tracer.origin.text if tracer.origin else "", tracer.backward or ""


def following(tracer: NonFiniteTracer, model: nn.Module, hooks: dict[str, Any]) -> Installation:
    plan = hookrun.compile(hooks, model)
    sink = Memory()
    sink.wants_calls = True
    plan = replace(plan, hooks=(*tracer.observers, *plan.hooks))
    return Installation(plan, model, sink=sink, replace_op=tracer.replace_op)


ROOT = "first made by the forward of (root) (Net), call 0, itself"
FIRST = "first made by the forward of first (Linear), call"


@pytest.mark.parametrize(("step", "named"), [
    (lambda net, x: net.first(x), ""),
    (lambda net, x: net.relu(net.first(x * 0 - 1).log()), f"{ROOT}, before it calls relu: 3 NaN of 3 elements"),
    (lambda net, x: net.relu(net.first(x)) / 0, f"{ROOT}, outside its submodules, from finite inputs: 1 NaN and 2"),
    (lambda net, x: net.soft(net.first(x * 0) / 0).sum() + net.relu(x * torch.inf), f"{ROOT}, before it calls soft"),
    (lambda net, x: net.first(x * 1e38), ""),
    (lambda net, x: net.soft(net.first(x * 3e38)), f"{FIRST} 0, from finite inputs: 2 infinite of 3 elements"),
    (lambda net, x: net.first(net.relu(net.first(x * 1e38))), f"{FIRST} 1, from finite inputs"),
])  # fmt: skip
def test_the_call_that_makes_them_is_named(step: Step, named: str) -> None:
    forward, _ = traced(step, torch.tensor([[1.0, 1.0, -0.1]]))
    assert forward.startswith(named)
    assert bool(named) == bool(forward)


def test_values_that_become_finite_again_are_not_to_blame() -> None:
    mask = torch.tensor([0.0, -torch.inf, 0.0])
    inner = Net(lambda net, x: net.relu(net.first(x) / 0).nan_to_num(0.0, 0.0, 0.0))
    for step in (
        lambda net, x: net.relu(net.soft(net.first(x) + mask)) / 0,
        lambda net, x: net.relu(net.inner(x)) / 0,
    ):
        assert traced(step, inner=inner)[0].startswith(f"{ROOT}, outside its submodules")
    assert traced(lambda net, x: net.soft(net.first(x) + mask)) == ("", "")


@pytest.mark.parametrize(("kind", "select", "on"), [
    ("forward", "relu", "relu, call 1"), ("output_grad", "relu", "relu, call 1"), ("grad", "first.bias", "first.bias"),
])  # fmt: skip
def test_a_hook_is_named_with_its_call(kind: str, select: str, on: str) -> None:
    hook = {"hook": kind, "select": select, "action": "scale", "factor": 1e39}
    when = {"when": {"call": 1}} if select == "relu" else {}
    said = traced(lambda net, x: net.relu(net.relu(net.first(x))), **hook, **when)
    assert "".join(said).startswith(f"first made by hook 'h' ({kind}, scale) on {on}, from finite values: ")


@pytest.mark.parametrize(("step", "clamp", "named"), [
    (lambda net, x: net.relu(net.first(x * 1e38)) / 0, {"hook": "forward", "max": 9.0}, ROOT),
    (lambda net, x: net.first(x / 0), {"hook": "forward_pre", "max": 3e38}, f"{FIRST} 0, from finite inputs"),
])  # fmt: skip
def test_a_hook_that_makes_them_finite_heals_them(step: Step, clamp: dict[str, Any], named: str) -> None:
    forward, _ = traced(step, select="first", action="clamp", min=0.0, **clamp)
    assert forward.startswith(named)


@pytest.mark.parametrize(("step", "named"), [
    (lambda net, x: net.relu(net.first(x)).sqrt(), "(root) (Net), call 0 (SqrtBackward0)"),
    (lambda net, x: net.inner(x) + 1, "inner (Net), call 0 (SqrtBackward0)"),
    (lambda net, x: net.first(x)[:, :2].sum() + net.relu(x).detach().sum(), ""),
])  # fmt: skip
def test_a_backward_function_is_named_with_the_innermost_call(step: Step, named: str) -> None:
    forward, backward = traced(step, inner=Net(lambda net, x: net.first(x).relu().sqrt()))
    assert forward == ""
    assert backward.startswith(f"first made by the backward of {named}" if named else "")
    assert bool(named) == bool(backward)


def test_a_backward_function_outside_every_module_is_of_the_loss() -> None:
    _, backward = traced(lambda net, x: net.relu(net.first(x)), torch.zeros(1, 3), loss_of=torch.sqrt)
    assert "the backward of the loss (SqrtBackward0)" in backward


def test_a_call_that_the_model_catches_does_not_hide_the_origin() -> None:
    def fails(net: Net, x: Tensor) -> Tensor:
        try:
            net.first(x[:, :2])
        except RuntimeError:
            return net.relu(x) / 0
        raise AssertionError

    forward, _ = traced(fails, torch.ones(1, 3, requires_grad=True))
    assert forward.startswith(f"{ROOT}, outside its submodules")


def test_a_new_pass_forgets_the_last_one_even_if_it_failed() -> None:
    model = Net(lambda net, x: net.first(x) / 0)
    tracer = NonFiniteTracer(model)
    with following(tracer, model, {}):
        with pytest.raises(RuntimeError, match="shapes"):
            tracer(torch.ones(1, 2))
        for step, is_finite in (
            (lambda net, x: net.first(x) / 0, False),
            (lambda net, x: net.first(x), True),
        ):
            model.step = step
            tracer(torch.ones(1, 3))
            assert (tracer.origin is None) == is_finite
        model.step = lambda net, x: net.first(x) / 0
        model(torch.ones(1, 3))
        assert tracer.origin is None, "outside a pass nothing is followed"


class Gate(nn.Module):
    """Says that it has begun, and ends when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = Event(), Event()

    def forward(self, x: Tensor) -> Tensor:
        self.begun.set()
        assert self.may_end.wait(10)
        return x


def test_overlapping_modules_do_not_hide_the_origin() -> None:
    gates = nn.ModuleList([Gate(), Gate()])

    def step(net: Net, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            ends = list[Future[Tensor]]()
            for gate in gates:
                ends.append(pool.submit(gate, x))
                assert gate.begun.wait(10)
            for gate, end in zip(gates, ends, strict=True):  # the first to begin ends first
                gate.may_end.set()
                end.result(10)
        return net.first(x.log())

    assert traced(step, inner=gates)[0].startswith(ROOT)
