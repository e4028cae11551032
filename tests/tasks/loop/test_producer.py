"""A step that was not finite is repeated with checks, in a copy: what made it so is named, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookrun
from hookrun.spec.experiment import Train
from hookrun.tasks.loop.batches import Batch
from hookrun.tasks.loop.before_step import BeforeStep
from hookrun.tasks.loop.producer import producer

NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")


class Net(nn.Module):
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
    return Batch(ids, inputs, torch.full_like(inputs, target), 99, "train", data, len(values))


def asked(
    *group: Batch,
    wrong: int | None = 0,
    spoil: Callable[[Net], Any] = lambda model: None,
    loss: Any = F.mse_loss,
    **hooks: Any,
) -> str:
    """What is said of a step of these micro-batches; that it leaves the run as it was is checked each time."""
    torch.manual_seed(0)
    model = Net()
    with hookrun.hooked(model, hooks) as installed, torch.no_grad():
        installed.clock.step, installed.clock.epoch = 3, 2
        spoil(model)
        before = BeforeStep(model, installed, CPU, own_code=True)
        before.take()
        running: Any = SimpleNamespace(
            model=model, hooks=installed, scaler=torch.amp.GradScaler("cpu", enabled=False), autocast=nullcontext,
            prepared=SimpleNamespace(plan=installed.plan, loss=loss),
            settings=SimpleNamespace(train=Train(loss="mse")),
        )  # fmt: skip
        torch.rand(3)  # as the step did
        state = [each.clone() for each in model.state_dict().values()], torch.get_rng_state()
        records, fired = list(installed.records), dict(installed.fired)
        with torch.enable_grad():
            said = producer(running, before, group, wrong)
        for old, new in zip(state[0], model.state_dict().values(), strict=True):
            assert torch.equal(old.nan_to_num(), new.nan_to_num())
        assert torch.equal(torch.get_rng_state(), state[1])
        assert all(each.grad is None for each in model.parameters())
        assert (installed.records, installed.fired) == (records, fired)
        assert installed.clock.samples is None
    return said


def edit(select: str, hook: str, action: str = "scale", **keys: Any) -> dict[str, Any]:
    given = {"factor": INF} if action == "scale" else {}
    return {"select": select, "hook": hook, "action": action, **given, **keys}


def test_inputs_and_targets_that_are_not_finite_are_named_with_their_samples() -> None:
    said = asked(batch(1, NAN, 2, INF))
    assert (
        said
        == "the inputs of the batch are not finite: 2 NaN and 2 infinite of 8 elements (train samples 11, 13)"
    )
    said = asked(batch(1, 2), batch(3, 4, target=NAN), wrong=1)
    assert said.startswith(
        "in micro-batch 1 of 2, the targets of the batch are not finite: 4 NaN of 4 elements"
    )
    assert said.endswith("(train samples 10, 11)")


def test_a_parameter_that_was_not_finite_before_is_named_with_the_hooks_that_change_it_and_a_mask_is_not() -> (
    None
):
    def spoil(model: Net) -> None:
        model.fc.weight[0] = NAN
        model.fc.bias[1] = INF

    later = edit("fc", "optimizer_step_post", when={"step": 5})
    seen = edit("fc", "grad", "stats")
    said = asked(batch(1, 2), spoil=spoil, later=later, seen=seen)
    assert said == (
        "not finite before the forward of this step: the parameter fc.weight: 2 NaN of 4 elements; so are fc.bias; "
        "hook 'later' (optimizer_step_post, scale) changes it"
    )


def test_a_hook_of_this_step_a_module_or_the_loss_is_named_where_it_makes_it_first() -> None:
    now, gone = ({**edit("norm", "forward"), "when": {"step": step, "epoch": 2}} for step in (3, 1))
    assert asked(batch(1, 2), h=now).startswith("first made by hook 'h' (forward, scale) on norm")
    assert "the step is finite, so the model, the loss or a hook depends on" in asked(batch(1, 2), h=gone)
    said = asked(batch(1, 2), spoil=lambda model: setattr(model, "factor", INF))
    assert said.startswith(
        "first made by the forward of (root) (Net), call 0, itself, outside its submodules"
    )
    healed = {"h": now, "again": edit("fc", "forward", "replace", value=1)}
    said = asked(batch(1, 2), loss=lambda output, target: output.sum() / 0, **healed)
    assert said == "first made by the loss mse, from a finite output and finite targets"


def test_the_repetition_draws_what_the_step_drew() -> None:
    drawn = torch.rand((), generator=torch.Generator().manual_seed(7))

    def unlucky(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() / (torch.rand(()) - drawn)

    said = asked(batch(1, 2), loss=unlucky, spoil=lambda model: torch.manual_seed(7))
    assert said.startswith("first made by the loss mse")


def test_gradients_that_overflow_in_their_sum_or_before_the_step_are_told() -> None:
    def huge(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() * 2e38

    said = asked(batch(1, 2), batch(3, 4), wrong=None, loss=huge)
    assert (
        said
        == "the gradient of fc.bias, added up over 2 micro-batches, is not finite: 2 infinite of 2 elements"
    )
    for select, hook in (("fc", "optimizer_step_pre"), ("fc.bias", "grad")):
        said = asked(batch(1, 2), wrong=None, h=edit(select, hook))
        assert said.startswith(f"first made by hook 'h' ({hook}, scale) on fc.")


def test_a_step_that_cannot_be_repeated_is_told_and_does_not_end_the_run() -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError("in the loss")

    said = asked(batch(1, 2), loss=fails)
    assert said.startswith("its source is not known, because the step could not be repeated: ")
    assert "in the loss" in said
