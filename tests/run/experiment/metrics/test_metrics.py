"""Metrics of each token and each sample: the numbers of plain PyTorch, for any padding and any batches; mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hookrun
from hookrun.data import DataInfo, describe
from hookrun.data.samples import IGNORED
from hookrun.run.experiment.metrics import rows as rows_of
from hookrun.run.experiment.metrics.metrics import DEFAULT, METRICS, kl, load_metrics, probability, rank
from hookrun.run.experiment.metrics.problems import metric_problems
from hookrun.run.experiment.metrics.rows import RowPart, of_samples, of_tokens, own_token_scores
from hookrun.run.tasks import parse_experiment, task_of
from hookrun.store.reader import Run


def test_metrics_are_loaded_in_the_given_order_or_by_default() -> None:
    assert load_metrics(None) == DEFAULT
    assert [each.name for each in load_metrics(["rank", "loss"])] == ["rank", "loss"]


def test_a_perplexity_beyond_the_largest_number_is_infinite() -> None:
    shown = METRICS["perplexity"].shown
    assert shown(1.0) == pytest.approx(math.e)
    assert shown(1e4) == math.inf
    assert math.isnan(shown(math.nan))


Runs = Callable[..., Run]
DECODER = ("model=decoder", "model.args.width=16", "model.args.layers=1", "model.args.heads=2")
NAMES = (*DECODER, "data=names", "data.args.val_size=7", "data.args.train_size=8", "data.batch_size=3")
NOISE = "+hooks.noise={select: blocks.0, hook: forward, action: noise, std: 2}"
ALL = "loss,accuracy,perplexity,probability,rank,logit_difference,kl"


def lines(run: Run, of: str) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line.get("of") == of]


def by_hand(*overrides: str) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """Sample, log-probabilities, logits, answer and wrong answer at the last token, from the model as it is built."""
    model, data = hookrun.build(overrides=[*NAMES, *overrides, "compute.device=cpu"])
    model.eval()
    for batch in data.loader("val"):
        with torch.no_grad():
            logits = model(**batch.inputs)
        last = (batch.target != IGNORED).nonzero()
        for row, (sample, place) in enumerate(last.tolist()):
            scores = logits[sample, place]
            answer = batch.target[sample, place]
            yield int(batch.ids[row]), scores.log_softmax(0), scores, answer, batch.wrong[row]


@pytest.mark.parametrize("padding, most", [("right", rows_of.MOST_NUMBERS), ("left", 1)])
def test_they_equal_plain_pytorch(executed: Runs, padding: str, most: int, monkeypatch: Any) -> None:
    """Whatever number of scores is converted at once."""
    monkeypatch.setattr(rows_of, "MOST_NUMBERS", most)
    side = f"data.args.padding={padding}"
    metrics = f"task.metrics=[{ALL},{{name: loss, by: sample}},{{name: rank, by: sample}}]"
    found = executed("task=evaluate", *NAMES, side, metrics)
    expected = list(by_hand(side))
    losses = torch.tensor([-float(logs[answer]) for _, logs, _, answer, _ in expected])
    ranks = [1 + int((scores > scores[answer]).sum()) for _, _, scores, answer, _ in expected]
    whole = found.metrics[-1]
    assert whole["of"] == "epoch"
    assert whole["kl"] == 0
    assert whole["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert whole["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert whole["probability"] == pytest.approx(float((-losses).exp().mean()), rel=1e-5)
    assert whole["rank"] == sum(ranks) / 7
    differences = [float(scores[answer] - scores[wrong]) for _, _, scores, answer, wrong in expected]
    assert whole["logit_difference"] == pytest.approx(sum(differences) / 7, rel=1e-4)
    samples = lines(found, "sample")
    assert [line["sample"] for line in samples] == list(range(7))
    assert samples[0]["split"] == "val"
    assert [line["rank"] for line in samples] == ranks
    assert [line["loss"] for line in samples] == pytest.approx(losses.tolist(), rel=1e-5)


def test_positions_count_from_the_first_real_token(executed: Runs) -> None:
    """The loss is there even where it is listed by position only."""
    data = (*DECODER, "data=repeated_tokens", "data.args.val_size=6", "data.args.half=[3,8]")
    metrics = "task.metrics=[{name: loss, by: position},{name: perplexity, by: position}]"
    sides = [
        executed("task=evaluate", *data, metrics, f"data.args.padding={side}") for side in ("right", "left")
    ]
    right, left = (lines(each, "position") for each in sides)
    assert [line["position"] for line in right] == sorted({line["position"] for line in right})
    assert [(each["position"], each["tokens"]) for each in right] == [
        (each["position"], each["tokens"]) for each in left
    ]
    assert [line["loss"] for line in right] == pytest.approx([line["loss"] for line in left], rel=1e-4)
    total = sum(line["tokens"] for line in right)
    mean = sum(line["loss"] * line["tokens"] for line in right) / total
    assert sides[0].metrics[-1]["loss"] == pytest.approx(mean, rel=1e-6)
    assert right[0]["perplexity"] == pytest.approx(math.exp(right[0]["loss"]), rel=1e-5)
    expected = right[len(right) // 2]
    at = f"task.tokens={{position: {expected['position']}, missing: skip}}"
    found = executed("task=evaluate", *data, metrics, at)
    assert lines(found, "position") == [expected]
    assert found.metrics[-1]["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_kl_compares_with_the_model_without_hooks_or_with_a_run(executed: Runs) -> None:
    clean = executed("task=predict", *NAMES)
    own = executed("task=predict", *NAMES, NOISE, "task.metrics=[kl, {name: kl, by: sample}]")
    against = f"task.metrics=[{{name: kl, against: {{run: '{clean.path}'}}}}]"
    other = executed("task=evaluate", *NAMES, NOISE, against)
    assert own.metrics[-1]["kl"] == pytest.approx(other.metrics[-1]["kl"], rel=1e-6)
    assert own.metrics[-1]["kl"] > 0.001
    for sample, logs, _, _, _ in by_hand():
        (place,) = (clean.predictions[sample].log_softmax(1) - logs).abs().sum(1).argsort()[:1].tolist()
        theirs = own.predictions[sample][place].log_softmax(0)
        expected = F.kl_div(theirs, logs, log_target=True, reduction="sum")
        assert lines(own, "sample")[sample]["kl"] == pytest.approx(float(expected), rel=1e-3)
    (used,) = other.plan["runs"]
    assert used["where"] == "task.metrics.0.against.run"
    assert used["manifest"] == clean.status["manifest"]


def test_impossible_metrics_are_refused_before_the_run(refused: Callable[..., str], executed, fails) -> None:
    said = refused("task=evaluate", *NAMES, "task.metrics=[los,{name: rank, against: {run: x}}]")
    assert "did you mean 'loss'" in said
    assert "`against` is a key of 'kl'" in said
    wrong = refused("task=evaluate", *NAMES, "task.metrics=[rank]", "task.tokens={query: 0}")
    assert "that are not padding" in wrong
    small = executed("task=predict", *NAMES, "train.limit_batches=1")
    for place, says in ((str(small.path), "has no row of sample 3"), ("nowhere", "nowhere")):
        metric = f"task.metrics=[{{name: kl, against: {{run: '{place}'}}}}]"
        assert says in refused("task=evaluate", *NAMES, metric)
    metric = f"task.metrics=[{{name: kl, against: {{run: '{small.path}'}}}}]"
    stored = small.path / ".hydra" / "config.yaml"
    assert stored.is_file()
    text = stored.read_text()
    stored.write_text(text.replace("val_size: 7", "val_size: 7\n    special_tokens: false"))
    assert "data.args.special_tokens is False there and None here" in refused("task=evaluate", *NAMES, metric)
    stored.unlink()
    assert "has no saved configuration" in refused("task=evaluate", *NAMES, metric)
    for position in (0, 40):
        assert "task.tokens" in fails(
            "task=evaluate", *NAMES, "task.metrics=[rank]", f"task.tokens={position}"
        )


def test_nonfinite_values_are_logged() -> None:
    scores = torch.tensor([[math.nan, 1.0, 2.0], [0.0, 1.0, 2.0], [-math.inf, 0.0, 0.0]])
    part = RowPart(scores, torch.tensor([1, 1, 0]), others=scores.flip(0))
    ranks = rank(part)
    assert ranks[0].isnan()
    assert ranks[1:].tolist() == [2, 3]
    assert probability(part)[0].isnan()
    assert probability(part)[2] == 0
    same = RowPart(scores[2:], torch.tensor([1]), others=scores[2:])
    assert kl(same).tolist() == [0]
    assert kl(RowPart(scores[2:], torch.tensor([1]), others=scores[1:2])).isinf()
    assert kl(RowPart(scores[:1], torch.tensor([1]), others=scores[:1])).isnan()


def test_kl_is_not_below_zero_where_two_predictions_nearly_agree() -> None:
    torch.manual_seed(0)
    scores = torch.randn(200, 1000) * 5
    near = kl(RowPart(scores, torch.zeros(200).long(), others=scores + 1e-5 * torch.randn(200, 1000)))
    assert (near >= 0).all()
    assert near.max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_metrics_are_computed_from_scores_in_at_least_float32(dtype: torch.dtype) -> None:
    scores = torch.randn(1, 5, 4).to(dtype)
    target = torch.tensor([[3, IGNORED, 1, 0, 2]])
    found = of_tokens(scores, target, target > IGNORED, torch.arange(5)[None])
    assert found is not None
    for rows in (found, of_samples(scores[0], target[0])):
        (part,) = rows.parts()
        assert part.scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_samples_have_a_row_of_the_main_tensor() -> None:
    scores = torch.ones(2, 3, requires_grad=True)
    labels = torch.tensor([0, 1])
    found = of_samples({"aux": labels, "logits": scores}, labels).scores
    assert found is not None
    assert torch.equal(found, scores)
    assert not found.requires_grad
    for output in (scores[None], {}, None, scores.sum()):
        assert of_samples(output, labels).scores is None


def test_scores_of_tokens_are_always_the_logits() -> None:
    first = torch.ones(1, 2, 3, requires_grad=True)
    second = torch.zeros(1, 2, 3)
    for output in (first, (first, second), {"hidden": second, "logits": first}):
        found = own_token_scores(output)
        assert found is not None
        assert torch.equal(found, first)
    assert own_token_scores({"hidden": second}) is own_token_scores(()) is own_token_scores(object()) is None
    assert torch.equal(own_token_scores([None, second]), second)
    target = torch.zeros(1, 2, dtype=torch.int64)
    rows = of_tokens(first, target, target == 0, target)
    assert rows is not None
    assert rows.scores is not None
    assert not rows.scores.requires_grad, "sums of metrics would keep the graph of each step"
    assert of_tokens(first[0], target, target == 0, target) is None, "no score for each token"
    assert of_tokens(first, target[:, :1], target == 0, target) is None


def test_one_sample_is_a_batch_of_one_in_float32() -> None:
    hidden = torch.randn(2, 3).half()
    shared = torch.ones(3)
    output = {"logits": hidden, "shared": shared, "ids": torch.tensor([7, 8]), "none": None}
    output["loss"] = torch.ones(())
    found, target = of_samples(output, torch.tensor([5, 6])).of_sample(1)
    assert target.tolist() == [6]
    assert found["ids"].tolist() == [8]
    assert found["ids"].dtype == torch.int64
    assert found["logits"].dtype == torch.float32
    assert torch.equal(found["logits"], hidden[1:].float())
    assert found["shared"] is shared
    assert found["loss"].dim() == 0
    assert found["none"] is None


def said(data: str, metrics: list[Any], loss: str = "cross_entropy", **task: Any) -> list[str]:
    plain = {"model": {"name": "cnn"}, "data": {"name": data}, "train": {"loss": loss}}
    experiment = parse_experiment({**plain, "task": {"name": "evaluate", "metrics": metrics, **task}})
    info: DataInfo = describe(experiment.settings.data, "val")
    return [str(each) for each in metric_problems(task_of(experiment), experiment.settings, info)]


def by(name: str, way: str) -> dict[str, str]:
    return {"name": name, "by": way}


CE = "cross_entropy"


@pytest.mark.parametrize("data, metrics, loss, task, where", [
    ("digits", [by("accuracy", "position")], CE, {}, "task.metrics.0.by: the samples of"),
    ("digits", ["loss", "logit_difference"], CE, {}, "task.metrics.1: 'logit_difference' needs"),
    ("digits", ["loss"], CE, {"tokens": -1}, "task.tokens: the samples of the data 'digits'"),
    ("digits", [by("loss", "sample")], "output", {}, "task.metrics.0.by: with train.loss=output"),
    ("repeated_tokens", [by("mean_squared_error", "position")], CE, {}, "for a whole batch"),
    ("repeated_tokens", [by("loss", "position")], "mse", {}, "train.loss=mse is not computed token by token"),
    ("repeated_tokens", ["loss"], CE, {"tokens": {"phase": "generation"}}, "phase"),
    ("names", ["loss"], CE, {"tokens": {"span": "subjekt"}}, "subjekt"),
])  # fmt: skip
def test_each_mistake_is_reported_at_its_key(
    data: str, metrics: list[Any], loss: str, task: dict[str, Any], where: str
) -> None:
    found = said(data, metrics, loss, **task)
    assert len(found) == 1, found
    assert where in found[0], found


def test_valid_settings_have_no_problems() -> None:
    assert not said("digits", ["loss", by("accuracy", "sample"), "perplexity"])
    assert not said("repeated_tokens", [by("loss", "position"), by("rank", "sample")], tokens=-2)
    assert not said("names", ["logit_difference", "kl"])
