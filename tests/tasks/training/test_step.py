"""The parts of a step: gradients of micro-batches, whether all is finite, and the average of the weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookrun.ranks import ALONE
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.sharded.rank_gradients import StepGradientsOfRanks, step_gradients
from hookrun.tasks.training.ema import WeightAverage
from hookrun.tasks.training.finite import all_finite, not_finite
from hookrun.tasks.training.step import StepGradients


def context(model: nn.Module, after: list[Any]) -> RunContext:
    """The running task: the model as its forward, and cross entropy as its loss."""
    made = SimpleNamespace(
        ranks=ALONE,
        forward=lambda batch: model(batch.inputs),
        loss=lambda output, batch: F.cross_entropy(output, batch.target),
        scaler=GradScaler("cpu", enabled=False),
        after=after.append,
    )
    return cast(RunContext, made)


def batch(inputs: torch.Tensor, target: torch.Tensor, weight: int, tokens: bool = False) -> Batch:
    made = SimpleNamespace(
        inputs=inputs, target=target, weight=weight, data=SimpleNamespace(of_tokens=tokens)
    )
    return cast(Batch, made)


def test_micro_batches_of_different_sizes_give_the_gradient_of_all_samples() -> None:
    torch.manual_seed(0)
    model, pixels, labels = nn.Linear(4, 3), torch.randn(7, 4), torch.randint(0, 3, (7,))
    (expected,) = torch.autograd.grad(F.cross_entropy(model(pixels), labels), [model.weight])
    after = list[Any]()
    gradients = step_gradients(context(model, after))
    assert type(gradients) is StepGradients
    group = [
        batch(part, target, len(part)) for part, target in zip(pixels.split(5), labels.split(5), strict=True)
    ]
    shares = gradients.shares(group)
    assert shares == [5 / 7, 2 / 7]
    results = [
        gradients.compute(each, share, last=each is group[-1])
        for each, share in zip(group, shares, strict=True)
    ]
    torch.testing.assert_close(model.weight.grad, expected)
    assert after == group, "the run is told after each"
    losses = [loss for _, loss in results]
    assert all(
        torch.equal(one, other) for one, other in zip(gradients.losses(losses, shares), losses, strict=True)
    )
    assert gradients.losses([None, losses[1]], shares) == [losses[1]]


def test_a_single_batch_of_images_is_not_weighted_and_one_of_tokens_without_targets_counts_nothing() -> None:
    gradients, nothing = step_gradients(context(nn.Linear(1, 1), [])), torch.zeros(0)
    assert gradients.shares([batch(nothing, nothing, 5)]) == [1.0]
    assert gradients.shares([batch(nothing, nothing, 5, tokens=True)]) == [1.0]
    empty = [batch(nothing, nothing, 0, tokens=True)] * 2
    assert gradients.shares(empty) == [0.0, 0.0], "no division by 0"


@pytest.mark.parametrize("sums", [False, True])
def test_a_rank_weights_by_its_rows_and_a_sum_by_whole_batches(sums: bool) -> None:
    gradients = object.__new__(StepGradientsOfRanks)  # without torch's process group
    loss = SimpleNamespace(sums=sums)
    gradients.context = cast(RunContext, SimpleNamespace(prepared=SimpleNamespace(loss=loss)))
    images = SimpleNamespace(of_tokens=False)
    group = [
        SimpleNamespace(whole=8, ids=range(3), data=images),
        SimpleNamespace(whole=2, ids=(), data=images),
    ]
    assert gradients.shares(cast(list[Batch], group)) == ([0.8, 0.2] if sums else [0.3, 0.0])


WRONG = torch.tensor([1.0, torch.inf])
KINDS = {
    "float64": WRONG.double(),
    "float16": WRONG.half(),
    "complex": torch.complex(torch.zeros(2), WRONG),
    "sparse": WRONG.to_sparse(),
    "expanded": WRONG[1:].expand(3),
    "of a graph": WRONG.clone().requires_grad_(),
    "negative": torch.tensor([-torch.inf]),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_nonfinite_tensor_is_found_among_others_and_none_is_changed(kind: str) -> None:
    wrong, right, largest = KINDS[kind], torch.ones(2), torch.tensor([torch.finfo(torch.float32).max])
    assert not all_finite([right, wrong, largest]) and not all_finite([wrong])
    assert all_finite([right, torch.ones(2).double(), largest, torch.tensor([1, 2])]) and all_finite([])
    assert right.tolist() == [1, 1] and largest.item() == torch.finfo(torch.float32).max
    assert "1 infinite of" in not_finite(wrong) or kind == "expanded"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_result_does_not_depend_on_torch_s_defaults(dtype: torch.dtype) -> None:
    value = torch.ones(3, dtype=torch.float32)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            for each in (value, value[:1].expand(3)):
                assert all_finite([each]) and not all_finite([each, value, each / 0])
    finally:
        torch.set_default_dtype(torch.float32)


def test_nonfinite_elements_are_counted_in_containers_of_floats_only() -> None:
    value = [torch.tensor([torch.nan, 1, -torch.inf]), {"a": torch.tensor([torch.nan])}, torch.tensor([3])]
    assert not_finite(value) == "2 NaN and 1 infinite of 4 elements"
    assert not_finite(torch.ones(2)) == not_finite(torch.tensor([1])) == ""


def test_the_average_is_torchs_and_the_weights_are_restored_after_an_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = WeightAverage(model, 0.9)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model(torch.randn(5, 3))
        average.update()
        theirs.update_parameters(model)
    own = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), average.swapped_in():
        for name, each in theirs.module.state_dict().items():
            if each.is_floating_point():
                torch.testing.assert_close(model.state_dict()[name], each)
                assert not torch.equal(each, own[name])
        with average.swapped_out():
            assert all(torch.equal(each, own[name]) for name, each in model.state_dict().items())
        raise ZeroDivisionError
    assert all(torch.equal(each, own[name]) for name, each in model.state_dict().items())
