"""Losses by name, and the output tensor that they use."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from hookrun.errors import HookrunError, SpecError
from hookrun.tasks.loop.losses import LOSSES, NEED_TARGET, loss_named, main_tensor

SCORES = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
LABELS = torch.tensor([0, 2])


class Named(NamedTuple):
    hidden: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize(
    "output",
    [
        SCORES,
        (SCORES, torch.zeros(2)),
        [None, SCORES],
        {"aux": torch.zeros(2), "out": SCORES},
        {"loss": torch.tensor(1.0), "logits": SCORES},
        Named(torch.zeros(2), SCORES),
        {"first": SCORES, "second": torch.zeros(2)},
    ],
)
def test_the_main_tensor_is_the_output_or_its_logits_or_out_or_its_first(output: object) -> None:
    assert main_tensor(output) is SCORES


def test_an_output_without_a_tensor_is_an_error() -> None:
    with pytest.raises(HookrunError, match="returned an object of type str"):
        main_tensor("nothing")


def test_classification_losses_take_labels_or_probabilities() -> None:
    assert torch.equal(loss_named("cross_entropy")(SCORES, LABELS), F.cross_entropy(SCORES, LABELS))
    probabilities = SCORES.softmax(1)
    assert torch.equal(
        loss_named("cross_entropy")(SCORES, probabilities), F.cross_entropy(SCORES, probabilities)
    )
    logs = SCORES.log_softmax(1)
    assert torch.equal(loss_named("nll")(logs, LABELS), F.nll_loss(logs, LABELS))


def test_a_loss_of_pixels_takes_one_label_for_each() -> None:
    scores, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    assert torch.equal(loss_named("cross_entropy")(scores, labels), F.cross_entropy(scores, labels))


@pytest.mark.parametrize("name", ["mse", "l1", "smooth_l1", "huber", "bce"])
def test_regression_losses_convert_integer_targets_to_the_shape_and_dtype_of_the_output(name: str) -> None:
    column, targets = torch.tensor([[0.5], [0.25]]), torch.tensor([1, 0])
    same = loss_named(name)(column, targets.float()[:, None])
    assert torch.equal(loss_named(name)(column, targets), same)
    assert same.shape == ()


@pytest.mark.parametrize("name", sorted(NEED_TARGET))
def test_an_output_that_does_not_fit_the_targets_is_an_error_with_both_shapes(name: str) -> None:
    with pytest.raises(HookrunError, match=rf"train.loss={name}: .*shape \[5\] for targets of shape \[2\]"):
        loss_named(name)(torch.ones(5), LABELS)


@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_a_label_without_a_score_is_told_with_the_scores_that_there_are(name: str) -> None:
    said = (
        r"labels of this batch go from 0 to 3, .* shape \[2, 3\], scores of the labels 0 to 2; .*num_classes"
    )
    with pytest.raises(HookrunError, match=said):
        loss_named(name)(SCORES, torch.tensor([0, 3]))


def test_a_matrix_of_outputs_is_never_compared_with_one_label_per_sample() -> None:
    with pytest.raises(HookrunError, match=r"shape \[2, 2\]"):  # torch would broadcast, and warn
        loss_named("mse")(torch.ones(2, 2), LABELS)


def test_a_model_may_return_its_own_loss() -> None:
    own = loss_named("output")
    for output in (torch.tensor([3.0]), torch.tensor(3.0), {"logits": SCORES, "loss": torch.tensor(3.0)}):
        assert own(output, LABELS).shape == ()
        assert own(output, LABELS).item() == 3.0
    with pytest.raises(HookrunError, match=r"shape \[2, 3\], not one number"):
        own(SCORES, LABELS)


def test_any_output_has_a_mean_and_a_sum() -> None:
    assert loss_named("output_mean")((SCORES,), LABELS) == SCORES.mean()
    assert loss_named("output_sum")((SCORES,), LABELS) == SCORES.sum()


def test_an_unknown_loss_is_refused_with_the_nearest_name() -> None:
    assert set(LOSSES) >= {"cross_entropy", "mse", "output", "output_mean"}
    with pytest.raises(SpecError, match="did you mean 'cross_entropy'"):
        loss_named("crossentropy")
