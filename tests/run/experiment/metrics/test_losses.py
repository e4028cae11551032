"""Losses by name, of hookrun's or of a trusted package: arguments are checked before the run, results in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from own_losses import SOURCE
from torch import Tensor
from torch.nn import functional as F

from hookrun.errors import HookrunError, SpecError
from hookrun.run.experiment.metrics.losses import LOSSES, NEED_TARGET, load_loss
from hookrun.run.experiment.metrics.rows import main_tensor
from hookrun.run.experiment.settings import Named

SCORES = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
LABELS = torch.tensor([0, 2])


class NamedOutput(NamedTuple):
    hidden: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize("output", [
    SCORES, (SCORES, torch.zeros(2)), [None, SCORES], {"aux": torch.zeros(2), "out": SCORES},
    {"loss": torch.tensor(1.0), "logits": SCORES}, NamedOutput(torch.zeros(2), SCORES),
    {"first": SCORES, "second": torch.zeros(2)},
])  # fmt: skip
def test_the_main_tensor_is_the_logits_or_the_first(output: object) -> None:
    assert main_tensor(output) is SCORES


def test_an_output_without_a_tensor_is_an_error() -> None:
    with pytest.raises(HookrunError, match="returned an object of type str"):
        main_tensor("nothing")


def test_classification_losses_take_labels_or_probabilities() -> None:
    assert torch.equal(LOSSES["cross_entropy"](SCORES, LABELS), F.cross_entropy(SCORES, LABELS))
    probabilities = SCORES.softmax(1)
    assert torch.equal(LOSSES["cross_entropy"](SCORES, probabilities), F.cross_entropy(SCORES, probabilities))
    logs = SCORES.log_softmax(1)
    assert torch.equal(LOSSES["nll"](logs, LABELS), F.nll_loss(logs, LABELS))


def test_a_loss_of_pixels_takes_one_label_for_each() -> None:
    scores = torch.randn(2, 3, 4, 4)
    labels = torch.randint(0, 3, (2, 4, 4))
    assert torch.equal(LOSSES["cross_entropy"](scores, labels), F.cross_entropy(scores, labels))


@pytest.mark.parametrize("name", ["mse", "l1", "smooth_l1", "huber", "bce"])
def test_integer_targets_take_the_form_of_the_output(name: str) -> None:
    column = torch.tensor([[0.5], [0.25]])
    targets = torch.tensor([1, 0])
    same = LOSSES[name](column, targets.float()[:, None])
    assert torch.equal(LOSSES[name](column, targets), same)
    assert same.shape == ()


@pytest.mark.parametrize("name", sorted(NEED_TARGET))
def test_a_misfit_is_told_with_both_shapes(name: str) -> None:
    with pytest.raises(HookrunError, match=rf"train.loss={name}: .*shape \[5\] for targets of shape \[2\]"):
        LOSSES[name](torch.ones(5), LABELS)


@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_a_label_without_a_score_is_told(name: str) -> None:
    said = r"labels of this batch go from 0 to 3, .* scores of the labels 0 to 2; .*num_classes"
    with pytest.raises(HookrunError, match=said):
        LOSSES[name](SCORES, torch.tensor([0, 3]))


def test_a_matrix_is_never_compared_with_one_label() -> None:
    with pytest.raises(HookrunError, match=r"shape \[2, 2\]"):  # torch would broadcast, and warn
        LOSSES["mse"](torch.ones(2, 2), LABELS)


def test_a_model_may_return_its_own_loss() -> None:
    own = LOSSES["output"]
    for output in (torch.tensor([3.0]), torch.tensor(3.0), {"logits": SCORES, "loss": torch.tensor(3.0)}):
        assert own(output, LABELS).shape == ()
        assert own(output, LABELS).item() == 3.0
    with pytest.raises(HookrunError, match=r"shape \[2, 3\], not one number"):
        own(SCORES, LABELS)


def test_any_output_has_a_mean() -> None:
    assert LOSSES["output_mean"]((SCORES,), LABELS) == SCORES.mean()
    assert LOSSES["output_sum"]((SCORES,), LABELS) == SCORES.sum()


OWN = """
class Uncallable:
    pass

class OfOne(nn.Module):
    def forward(self, output):
        return output.mean()

class Fails:
    def __init__(self):
        raise ZeroDivisionError("in __init__")
    def __call__(self, output, target):
        pass

def weighted(output, target, weight):
    return weight

def detached(output, target):
    return output.detach().mean()

def number(output, target):
    return 3.0

def labels(output, target):
    return target[:1]

def one(output, target):
    return output.mean().reshape(1, 1)
"""


@pytest.fixture(autouse=True)
def _package(trusted: Callable[..., None]) -> None:
    trusted(ownlosses=SOURCE + OWN)


def loss(name: str, **args: Any) -> Tensor:
    return load_loss(Named(name=name, **args))(SCORES, LABELS)


def test_losses_take_torchs_arguments() -> None:
    weight = [1.0, 2.0, 3.0]
    assert torch.equal(
        loss("cross_entropy", weight=weight), F.cross_entropy(SCORES, LABELS, torch.tensor(weight))
    )
    assert torch.equal(
        loss("cross_entropy", label_smoothing=0.1), F.cross_entropy(SCORES, LABELS, label_smoothing=0.1)
    )
    assert loss("cross_entropy", ignore_index=2) == F.cross_entropy(SCORES[:1], LABELS[:1])
    huber = load_loss(Named(name="huber", delta=0.5))(SCORES, SCORES + 1)
    assert torch.equal(huber, F.huber_loss(SCORES, SCORES + 1, delta=0.5))
    own = loss("ownlosses:mine", scale=2, weight=weight)
    assert torch.equal(own, 2 * loss("cross_entropy", weight=weight))
    smooth = loss("ownlosses:Smooth", smoothing=0.2)
    assert torch.equal(smooth, loss("cross_entropy", label_smoothing=0.2))
    assert loss("ownlosses:one").shape == ()


def test_a_loss_says_whether_it_is_a_sum() -> None:
    for name, sums in (("cross_entropy", False), ("output_sum", True), ("output", False)):
        found = load_loss(Named(name=name))
        assert found.name == name
        assert found.sums == sums
        assert found.code is None
    own = load_loss(Named(name="ownlosses:mine"))
    assert own.name == "mine"
    assert own.code is not None
    assert own.code.name == "ownlosses:mine"


def test_targets_of_tokens_mean_the_next_token_loss() -> None:
    scores = SCORES[None]
    target = torch.tensor([[0, -100]])
    found = load_loss(Named(name="cross_entropy", label_smoothing=0.1), tokens=True)
    expected = F.cross_entropy(SCORES[:1], LABELS[:1], label_smoothing=0.1)
    assert found.name == "next_token"
    assert torch.allclose(found(scores, target), expected)
    assert load_loss(Named(name="output"), tokens=True).name == "output"
    with pytest.raises(SpecError, match="'mse' does not compare scores with the next token"):
        load_loss(Named(name="mse"), tokens=True)


CE = "cross_entropy"


@pytest.mark.parametrize("named, where, says", [
    ({"name": CE, "label_smooting": 1}, "train.loss.label_smooting", "did you mean 'label_smoothing'"),
    ({"name": CE, "label_smoothing": 3}, "train.loss.label_smoothing", "between 0.0 and 1.0"),
    ({"name": CE, "weight": ["a"]}, "train.loss.weight", "expected a list of numbers"),
    ({"name": CE, "weight": [[1], [1, 2]]}, "train.loss.weight", "expected a list of numbers"),
    ({"name": CE, "reduction": "sum"}, "train.loss.reduction", "takes no argument"),
    ({"name": "output", "x": 1}, "train.loss.x", "takes no argument"),
    ({"name": "ownlosses:mine", "scales": 1}, "train.loss.scales", "did you mean 'scale'"),
    ({"name": "ownlosses:Smooth", "smooth": 1}, "train.loss.smooth", "did you mean 'smoothing'"),
    ({"name": "ownlosses:OfOne"}, "train.loss", "takes 1 positional argument, and is called with 2"),
    ({"name": "ownlosses:Uncallable"}, "train.loss", "a class whose objects cannot be called"),
    ({"name": "ownlosses:Fails"}, "train.loss", "failed: ZeroDivisionError: in __init__"),
    ({"name": "ownlosses:mein"}, "train.loss", "did you mean 'mine'"),
])  # fmt: skip
def test_arguments_are_checked_before_the_run(named: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_loss(Named(**named))
    assert [(each.where, says in str(each)) for each in caught.value.errors] == [(where, True)]


def test_mistakes_of_a_user_s_loss_are_reported() -> None:
    output = SCORES.clone().requires_grad_()
    for name, says in (
        ("number", "returned 3.0, expected one floating-point number as a tensor"),
        ("vector", r"returned a tensor of shape \[2, 3\]"),
        ("labels", r"returned a tensor of shape \[1\] torch.int64"),
        ("breaks", r"'ownlosses:breaks' failed: AttributeError.*ownlosses.py:\d+"),
        ("detached", "a loss that requires no gradient"),
    ):
        with pytest.raises(HookrunError, match=f"train.loss: .*{says}"):
            load_loss(Named(name=f"ownlosses:{name}"))(output, LABELS)
    with torch.no_grad():  # in validation
        assert load_loss(Named(name="ownlosses:detached"))(output, LABELS) == SCORES.mean()


def test_a_loss_draws_nothing_of_the_run() -> None:
    before = torch.get_rng_state()
    smooth = load_loss(Named(name="ownlosses:Smooth"))
    assert torch.equal(torch.get_rng_state(), before)
    assert smooth.module is not None
    assert not smooth.module.drawn.is_meta
    weighted = load_loss(Named(name="ownlosses:weighted", weight=[3]))
    assert weighted(SCORES.to("meta"), LABELS).is_meta
    assert weighted(SCORES, LABELS) == 3


FEW = ("data.batch_size=4", "train.limit_batches=1")


def test_the_loss_is_the_mean_of_the_part(executed, hook) -> None:
    see = "+hooks.seen={select: conv2, hook: forward, action: capture}"
    double = hook(select="conv1", hook="forward", action="scale", factor=2)
    loss = "train.loss={name: activation, module: conv2, index: ':, 5', maximize: true}"
    found = executed("task=evaluate", *FEW, loss, see, double)
    expected = -found.captures["seen"]["conv2"][:][:, 5].mean()
    assert found.metrics[-1]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    lower = executed(
        *FEW, "train.loss={name: activation, module: conv2}", "train.epochs=3", "train.optimizer.lr=0.01"
    )
    losses = [line["loss"] for line in lower.metrics if line["split"] == "val"]
    assert losses[0] > losses[1] > losses[2]


def test_a_module_or_a_part_that_is_not_there_is_refused(fails, refused) -> None:
    assert "the model has no module 'conv3'" in refused("train.loss={name: activation, module: conv3}")
    assert "train.loss.module: is missing" in refused("train.loss=activation")
    assert "train.loss.index" in refused("train.loss={name: activation, module: fc, index: 'x'}")
    assert "compute.compile" in refused("train.loss={name: activation, module: fc}", "compute.compile=true")
    said = fails("task=evaluate", *FEW, "train.loss={name: activation, module: fc, index: ':, 10'}")
    assert "out of bounds for dimension 1 with size 10" in said
