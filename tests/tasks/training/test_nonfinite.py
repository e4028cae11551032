"""`train.on_nonfinite`: what is not finite takes no step, and whoever made it first is named."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookrun.compose.compose import compose_dict
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.run.batches import Batches
from hookrun.tasks.training.loop import train

FOUR_STEPS = ("train.epochs=1", "train.limit_batches=4", "train.log_every=1", "train.shuffle=false")
SKIP, STOP = "train.on_nonfinite=skip", "train.on_nonfinite=stop"


UNWRITTEN = """
def __init__(self):
    super().__init__()
    self.flat, self.last = nn.Flatten(), nn.Linear(64, 10)

def forward(self, x):
    rows = torch.empty(len(x) + 1, 64)
    rows[: len(x)] = self.flat(x)
    return self.last(rows[1:])
"""


def test_memory_read_before_it_is_written_is_found_in_the_first_step(fails, own_model) -> None:
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


POISONED = """
def __init__(self, at=()):
    super().__init__()
    self.at, self.last = at, nn.Linear(64, 10)
    self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.5)
    self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

def forward(self, x):
    bad = self.training and int(self.seen) in self.at
    self.seen += self.training
    x = self.norm(x.flatten(1) * (float("nan") if bad else 1.0))
    return self.last(self.drop(x))
"""
LOOP = ("train.epochs=2", "train.limit_batches=5", "train.log_every=1", "train.shuffle=false")
SCHEDULE = (
    "train.optimizer.name=SGD",
    "train.optimizer.lr=0.1",
    "train.ema={decay: 0.9}",
    "train.accumulate=2",
)
SEEN = "+hooks.seen={select: drop, hook: forward, action: stats, when: {mode: train}}"
BY_STEP = "train.scheduler={name: StepLR, step_size: 1, gamma: 0.5, interval: step}"


def test_skip_equals_a_loop_without_these_steps(run, own_model, capsys) -> None:
    """Weights, running statistics, rates and averages equal a plain loop that goes past the steps, bit for bit."""
    net = (
        *own_model(POISONED),
        "+model.args.at=[3,8]",
    )  # the second micro-batches of steps 1 and 4; epochs have 3
    found = run(*net, *LOOP, *SCHEDULE, BY_STEP, SKIP, SEEN)
    said = capsys.readouterr().out
    assert "step 1: the loss is nan: in micro-batch 1 of 2, first made by" in said, said
    assert "steps skipped in epoch 1: 1, so far: 2" in said
    epochs = [line for line in found.metrics if line.get("of") == "epoch" and line["split"] == "train"]
    assert [line["skipped_steps"] for line in epochs] == [1, 1]
    assert all(line["loss"] == line["loss"] for line in epochs), "a batch that was left out is in no mean"
    steps = [line["step"] for line in found.metrics if line.get("of") == "batch"]
    assert steps == [0, 2, 3, 5], "the step counts on"

    settings = parse_experiment(compose_dict(["compute.device=cpu", *net, *LOOP, *SCHEDULE, BY_STEP]))
    assert len(found.stats) == 10, "the second run of a step leaves no record"
    prepared = prepare(settings, trust=frozenset({"own_models"}))
    torch.manual_seed(0)
    model, batches = prepared.model, Batches(prepared, "train")
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1, 0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    model.train()
    for epoch in range(2):
        everything = list(batches.epoch(epoch))
        for group in (everything[:2], everything[2:4], everything[4:]):
            before = {key: each.clone() for key, each in model.state_dict().items()}
            samples = sum(len(batch.ids) for batch in group)
            optimizer.zero_grad()
            losses = [F.cross_entropy(model(batch.inputs), batch.target) for batch in group]
            tracked = model.norm.num_batches_tracked.clone
            if not all(loss.isfinite() for loss in losses):
                model.load_state_dict({**before, "seen": model.seen, "norm.num_batches_tracked": tracked()})
                continue
            sum(
                loss * (len(batch.ids) / samples) for loss, batch in zip(losses, group, strict=True)
            ).backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
    for name, expected in (("last", model), ("ema", average.module)):
        saved = load_file(found.path / f"checkpoints/{name}.safetensors")
        for key, tensor in expected.state_dict().items():
            if tensor.is_floating_point():
                assert torch.equal(saved[key], tensor.detach()), key
    rates = [line["lr"] for line in found.metrics if line.get("of") == "batch"]
    assert rates == [0.1, 0.05, 0.025, 0.0125]


def test_stop_saves_and_overflows_of_the_scaler_do_not_count(run, fails, own_model) -> None:
    """`stop` ends with exit 3 and the weights from before; an overflow under fp16 is not a failure; a bad loss is."""
    net = (*own_model(POISONED), "+model.args.at=[2]")
    found = run(*net, *FOUR_STEPS, STOP, code=3)
    assert found.status["status"] == "stopped" and "step 2: the loss is nan" in found.status["reason"]
    saved = load_file(found.path / "checkpoints/last.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert not [line for line in found.metrics if line.get("of") == "epoch" and line["split"] == "train"]

    fp16 = ("model=cnn", *FOUR_STEPS, "compute.precision=fp16", "data.batch_size=4")
    overflows = "+hooks.o={select: fc.bias, hook: grad, action: scale, factor: 1e39, when: {step: [1]}}"
    bad_loss = "+hooks.h={select: fc, hook: forward, action: scale, factor: 1e39, when: {step: [2]}}"
    said = fails(*fp16, overflows, bad_loss)
    assert "step 2: the loss is" in said and "first made by hook 'h' (forward, scale) on fc, call 0" in said
    found = run(*fp16, overflows, bad_loss, SKIP, BY_STEP)
    *steps, epoch = [line for line in found.metrics if line["split"] == "train"]
    assert [line["step"] for line in steps] == [0, 1, 3] and epoch["skipped_steps"] == 1
    assert [line["lr"] for line in steps] == [1e-3, 5e-4, 5e-4], "neither advances the schedule"


def test_a_check_that_stops_comes_first(performed) -> None:
    """Where a `check` hook asks for the end of the run, that is why it ends."""
    check = {"select": "fc", "hook": "forward", "action": "check", "policy": "stop"}
    bad = {"select": "fc", "hook": "forward_pre", "action": "scale", "factor": 1e39}
    assert "hook 'c' on fc" in str(performed(train, task={"name": "train"}, hooks={"b": bad, "c": check}))
