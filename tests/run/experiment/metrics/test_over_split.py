"""Metrics over a whole split are the numbers of scikit-learn and SciPy, whatever the batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import spearmanr
from sklearn import metrics as sklearn
from torch import Tensor

from hookrun.errors import HookrunError, SpecError
from hookrun.run.experiment.metrics.metrics import load_metrics
from hookrun.run.experiment.metrics.rows import of_samples
from hookrun.run.passes.average import Average
from hookrun.run.passes.over_ranks import sum_of
from hookrun.store.objective import MetricKeys
from hookrun.store.reader import Run

Runs = Callable[..., Run]
OF_CLASSES = ("auroc", "average_precision", "f1", "balanced_accuracy")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("name", ["auroc", "average_precision"])
@pytest.mark.parametrize("average", ["macro", "micro", "none"])
def test_the_ranks_of_class_scores_are_those_of_their_softmax(name: str, average: str) -> None:
    scores = drawn(61, 4) * 3
    targets = torch.arange(61) % 4
    truth = np.eye(4)[targets.numpy()]
    score = sklearn.roc_auc_score if name == "auroc" else sklearn.average_precision_score
    wanted = score(truth, scores.double().softmax(1).numpy(), average=None if average == "none" else average)
    found, notes = over_split([{"name": name, "average": average}], scores, targets)
    keys = [f"{name}_{number}" for number in range(4)] if average == "none" else [name]
    close(found, dict(zip(keys, np.atleast_1d(wanted), strict=True)))
    assert not notes


def test_auroc_of_classes_is_scikit_learns_one_against_the_rest() -> None:
    scores = drawn(61, 4)
    targets = torch.arange(61) % 4
    wanted = sklearn.roc_auc_score(targets, scores.double().softmax(1).numpy(), multi_class="ovr")
    close(over_split(["auroc"], scores, targets)[0], {"auroc": wanted})


def test_probabilities_are_taken_as_they_are() -> None:
    scores = drawn(61, 4).mul(5).softmax(1)
    targets = torch.arange(61) % 4
    found, notes = over_split(["auroc"], scores, targets)
    close(found, {"auroc": sklearn.roc_auc_score(np.eye(4)[targets], scores.numpy())})
    assert notes == ["auroc: the scores of each row add up to 1, and are taken as probabilities"]


@pytest.mark.parametrize("shape", [(61,), (61, 1), (61, 2)])
def test_two_classes_may_have_one_score_or_two(shape: tuple[int, ...]) -> None:
    scores = drawn(*shape)
    targets = (drawn(61, 1, 1).flatten() > 0.3).long()
    one = (scores[:, 1] - scores[:, 0] if shape[-1] == 2 else scores.flatten()).numpy()
    wanted = {
        "auroc": sklearn.roc_auc_score(targets, one),
        "average_precision": sklearn.average_precision_score(targets, one),
        "f1": sklearn.f1_score(targets, one > 0, average="macro"),
        "balanced_accuracy": sklearn.balanced_accuracy_score(targets, one > 0),
        "f1_0": sklearn.f1_score(targets, one > 0, pos_label=0),
        "f1_1": sklearn.f1_score(targets, one > 0),
        "average_precision_0": sklearn.average_precision_score(1 - targets, -one),
        "average_precision_1": sklearn.average_precision_score(targets, one),
    }
    of_each = [by_average("f1")[2], by_average("average_precision")[2]]
    close(over_split([*OF_CLASSES, *of_each], scores, targets)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_targets_of_one_score_may_be_floats_or_bools(dtype: torch.dtype) -> None:
    scores = drawn(61, 1)
    targets = drawn(61, 1, 1)[..., 0] > 0
    wanted = sklearn.roc_auc_score(targets, scores.numpy())
    close(over_split(["auroc"], scores, targets.to(dtype))[0], {"auroc": wanted})


def test_a_threshold_decides_where_there_is_one_score() -> None:
    scores = drawn(61).sigmoid()
    targets = (drawn(61, 1).flatten() > 0).long()
    entries = [{"name": name, "threshold": 0.4} for name in ("f1", "balanced_accuracy")]
    found, notes = over_split(entries, scores, targets)
    predicted = scores > 0.4
    wanted = {
        "f1": sklearn.f1_score(targets, predicted, average="macro"),
        "balanced_accuracy": sklearn.balanced_accuracy_score(targets, predicted),
    }
    close(found, wanted)
    assert not notes
    assert "for probabilities set threshold: 0.5" in over_split(["f1"], scores, targets)[1][0]


@pytest.mark.parametrize("average", ["macro", "micro", "none"])
def test_several_labels_of_a_sample_are_columns(average: str) -> None:
    scores = drawn(61, 3)
    targets = (drawn(61, 3, 1)[..., 0] > 0.4).float()
    way = None if average == "none" else average
    wanted = {
        "auroc": sklearn.roc_auc_score(targets, scores, average=way),
        "average_precision": sklearn.average_precision_score(targets, scores, average=way),
        "f1": sklearn.f1_score(targets, scores > 0, average=way),
    }
    found, _ = over_split([{"name": name, "average": average} for name in wanted], scores, targets)
    keys = [f"{name}_{number}" if average == "none" else name for name in wanted for number in range(3)]
    close(found, dict(zip(dict.fromkeys(keys), np.hstack(list(wanted.values())), strict=True)))


@pytest.mark.parametrize("average", ["macro", "micro", "none"])
def test_f1_is_that_of_predicted_classes(average: str) -> None:
    scores = drawn(61, 4)
    targets = torch.arange(61) % 3
    scores[:, 3] = -9.0  # of class 3 there is no row, and none is predicted
    predicted = scores.argmax(1)
    way = None if average == "none" else average
    wanted = np.atleast_1d(sklearn.f1_score(targets, predicted, average=way)).tolist()
    found, notes = over_split([{"name": "f1", "average": average}, "balanced_accuracy"], scores, targets)
    keys = [f"f1_{number}" for number in range(3)] if average == "none" else ["f1"]
    balanced = sklearn.balanced_accuracy_score(targets, predicted)
    last = found.pop("f1_3", math.nan)
    assert math.isnan(last)
    assert len(notes) == (average == "none")
    close(found, {**dict(zip(keys, wanted, strict=True)), "balanced_accuracy": balanced})


@pytest.mark.parametrize("shapes", [((61,), (61,)), ((61, 1), (61,)), ((61,), (61, 1)), ((61, 3), (61, 3))])
def test_values_have_a_rank_correlation(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    scores = drawn(*shapes[0])
    targets = drawn(*shapes[1], 1)[..., 0]
    columns = scores.reshape(61, -1).double().numpy()
    truth = targets.reshape(61, -1).double().numpy()
    correlations = [spearmanr(column, of_truth).statistic for column, of_truth in zip(columns.T, truth.T)]  # noqa: B905
    wanted = {"r2": sklearn.r2_score(truth, columns), "spearman": np.mean(correlations)}
    close(over_split(["r2", "spearman"], scores, targets)[0], wanted)


def test_rows_without_a_label_are_left_out() -> None:
    scores = drawn(61, 4)
    targets = torch.arange(61) % 4
    targets[::5] = -100
    there = targets >= 0
    wanted = sklearn.balanced_accuracy_score(targets[there], scores[there].argmax(1))
    close(over_split(["balanced_accuracy"], scores, targets)[0], {"balanced_accuracy": wanted})


@pytest.mark.parametrize(
    ("names", "scores", "targets", "says"),
    [
        (["auroc", "average_precision"], drawn(9), torch.ones(9), "targets: 1"),
        (["auroc"], drawn(9, 3), torch.tensor([0, 1, 0] * 3), "targets: 0, 1"),
        (["auroc", "f1", "balanced_accuracy"], drawn(9, 3) / 0, torch.arange(9) % 3, "NaN or infinite"),
        (["r2", "spearman"], drawn(9), torch.ones(9), "targets: 1"),
        (["spearman"], torch.ones(9), drawn(9), "all values are equal"),
        (["r2", "spearman"], drawn(1), torch.ones(1), "targets: 1"),
    ],
)
def test_a_value_that_is_not_defined_is_nan_with_a_note(
    names: list[str], scores: Tensor, targets: Tensor, says: str
) -> None:
    found, notes = over_split(names, scores, targets)
    assert list(found) == names
    for value in found.values():
        assert math.isnan(value)
    assert len(notes) == len(names)
    for name, note in zip(names, notes, strict=True):
        assert note.startswith(f"{name}: not defined, because ")
        assert says in note


def test_two_rows_are_enough_for_a_rank_correlation() -> None:
    close(over_split(["spearman"], torch.tensor([1.0, 2.0]), torch.tensor([4.0, 3.0]))[0], {"spearman": -1.0})


@pytest.mark.parametrize(
    ("name", "scores", "targets"),
    [
        ("auroc", drawn(9), drawn(9)),
        ("auroc", drawn(9, 3), torch.arange(9) % 4),
        ("f1", drawn(9, 2, 5), torch.zeros(9, 5).long()),
        ("balanced_accuracy", drawn(9, 2), torch.zeros(9, 2)),
        ("r2", drawn(9, 3), torch.arange(9) % 3),
    ],
)
def test_what_does_not_fit_the_targets_is_refused(name: str, scores: Tensor, targets: Tensor) -> None:
    with pytest.raises(HookrunError, match=rf"^task.metrics.0: '{name}' needs .* the targets have shape"):
        over_split([name], scores, targets)


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        ({"name": "auroc", "by": "sample"}, "task.metrics.0.by"),
        ({"name": "loss", "average": "macro"}, "task.metrics.0.average"),
        ({"name": "auroc", "threshold": 0.5}, "task.metrics.0.threshold"),
    ],
)
def test_a_key_that_a_metric_does_not_take_is_refused(entry: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as raised:
        load_metrics([MetricKeys(**entry)])
    assert [each.where for each in raised.value.errors] == [where]


def test_the_rows_of_several_ranks_go_on_in_one() -> None:
    scores = drawn(61, 4)
    targets = torch.arange(61) % 4
    metrics = load_metrics(["auroc"])
    states = []
    for rank in range(2):
        average = Average(metrics)
        ids = torch.arange(rank, 40, 2)
        average.add(None, of_samples(scores[ids], targets[ids]), ids=ids, split="val")
        states.append(average.state_dict())
    resumed = Average(metrics)
    resumed.load_state_dict(sum_of(states).state_dict())
    rest = torch.arange(40, 61)
    resumed.add(None, of_samples(scores[rest], targets[rest]), ids=rest, split="val")
    assert resumed.over_split() == over_split(["auroc"], scores, targets)


# ---- runs -----------------------------------------------------------------------------------------------------------

DIGITS = ("model=mlp", "train.limit_batches=3", "data.batch_size=50")
ALL = "[auroc,average_precision,{name: f1, average: none},balanced_accuracy]"


def of_digits(run: Run) -> dict[str, float]:
    """The metrics of the stored predictions."""
    scores = run.predictions[:]
    labels = run.labels_of(run.predictions)
    truth = np.eye(10)[labels]
    shares = scores.double().softmax(1).numpy()
    by_class = sklearn.f1_score(labels, scores.argmax(1), average=None, labels=range(10), zero_division=0)
    return {
        "auroc": sklearn.roc_auc_score(truth, shares),
        "average_precision": sklearn.average_precision_score(truth, shares),
        **{f"f1_{number}": value for number, value in enumerate(by_class)},
        "balanced_accuracy": sklearn.recall_score(labels, scores.argmax(1), average="macro"),
    }


def values_of(line: dict[str, Any], wanted: dict[str, float]) -> dict[str, float]:
    return {name: line[name] for name in wanted}


@pytest.mark.parametrize("size", [1, 50])
def test_evaluate_has_the_numbers_of_the_predictions(executed: Runs, size: int) -> None:
    few = ("model=mlp", f"train.limit_batches={150 // size}", f"data.batch_size={size}")
    predicted = executed("task=predict", *few, f"task.metrics={ALL}")
    wanted = of_digits(predicted)
    close(values_of(predicted.metrics[-1], wanted), wanted)
    evaluated = executed("task=evaluate", *few, f"task.metrics={ALL}")
    close(values_of(evaluated.metrics[-1], wanted), wanted)


def test_training_computes_them_in_validation_alone(executed: Runs) -> None:
    trained = executed("task=train", *DIGITS, "train.epochs=2", "train.log_every=1", f"task.metrics={ALL}")
    weights = f"model.weights={trained.path / 'checkpoints' / 'last.safetensors'}"
    wanted = of_digits(executed("task=predict", *DIGITS, weights))
    close(values_of(trained.metrics[-1], wanted), wanted)
    assert not any(name in line for line in trained.metrics if line["split"] == "train" for name in wanted)


def test_over_all_splits_the_rows_of_both_count(executed: Runs) -> None:
    both = executed("task=predict", *DIGITS, "task.split=all", f"task.metrics={ALL}")
    wanted = of_digits(both)
    close(values_of(both.metrics[-1], wanted), wanted)


@pytest.mark.parametrize("objective", ["val/f1_3", "val/auroc"])
def test_they_can_be_an_objective(run: Runs, objective: str) -> None:
    found = run("task=train", *DIGITS, "train.epochs=1", f"task.metrics={ALL}", f"objective={objective}")
    result = found.status["objective"]
    assert result["direction"] == "maximize"
    assert result["value"] == found.metrics[-1][objective[4:]]


@pytest.mark.parametrize(
    ("objective", "near"), [("val/f1", "did you mean 'val/f1_"), ("val/auroc", "task=train logs val/f1_0")]
)
def test_an_objective_that_the_run_does_not_log_is_refused(refused: Any, objective: str, near: str) -> None:
    said = refused(*DIGITS, "task.metrics=[{name: f1, average: none}]", f"objective={objective}")
    assert f"objective.metric: found '{objective}', which this run does not log" in said
    assert near in said


def test_tokens_are_rows(executed: Runs) -> None:
    decoder = ("model=decoder", "model.args={width: 16, layers: 1, heads: 2}", "data=repeated_tokens")
    small = ("data.args={vocab_size: 12, val_size: 9, half: [3, 6]}", "data.batch_size=4")
    found = executed("task=predict", *decoder, *small, "task.metrics=[accuracy,{name: f1, average: micro}]")
    assert found.metrics[-1]["f1"] == pytest.approx(found.metrics[-1]["accuracy"])


@pytest.fixture
def values(tmp_path: Any) -> Callable[..., tuple[str, ...]]:
    """Data whose target is the given tensor, for a linear model with one output."""

    def values(target: Tensor) -> tuple[str, ...]:
        save_file({"input": drawn(len(target), 5), "target": target}, tmp_path / "values.safetensors")
        data = f"data.args={{file: '{tmp_path}/values.safetensors', val_fraction: 1}}"
        return (
            "data=tensors",
            data,
            "model=mlp",
            "model.args.num_classes=1",
            "train.loss=bce",
            "data.batch_size=8",
        )

    return values


def test_a_binary_split_of_floats(executed: Runs, values: Any) -> None:
    data = values((drawn(40) > 0).float())
    found = executed("task=predict", *data, "task.metrics=[auroc,f1]")
    scores = found.predictions[:].flatten()
    targets = (drawn(40) > 0).long()
    wanted = {
        "auroc": sklearn.roc_auc_score(targets, scores),
        "f1": sklearn.f1_score(targets, scores > 0, average="macro"),
    }
    close(values_of(found.metrics[-1], wanted), wanted)


def test_targets_that_are_no_labels_are_refused_before_the_run(
    refused: Callable[..., str], values: Any
) -> None:
    said = refused("task=evaluate", *values(drawn(40)), "task.metrics=[loss,r2,auroc]")
    assert "task.metrics.2: 'auroc' needs labels, or targets 0 and 1" in said


def test_one_class_in_the_split_is_told(run: Runs, values: Any, capsys: Any) -> None:
    found = run("task=evaluate", *values(torch.ones(40)), "task.metrics=[loss,auroc]")
    noted, line = found.metrics
    assert math.isnan(line["auroc"])
    assert line["loss"] > 0
    assert noted["note"].startswith("auroc: not defined, because")
    assert "targets: 1" in noted["note"]
    assert f"NOTE: val: {noted['note']}" in capsys.readouterr().out


def test_too_many_rows_are_refused_with_their_size(
    refused: Callable[..., str], fails: Callable[..., str]
) -> None:
    metrics = "task.metrics=[auroc]"
    said = refused("task=evaluate", metrics, "task.max_rows=100")
    assert "task.max_rows: 'auroc' is computed from the scores of 359 rows, and 100 are allowed" in said
    decoder = ("model=decoder", "model.args={width: 16, layers: 1, heads: 2}", "data=repeated_tokens")
    said = fails("task=evaluate", *decoder, "task.metrics=[f1]", "task.max_rows=900")
    assert said.startswith("task.max_rows: f1 of the whole split: the scores of ")


def test_a_training_without_a_validation_split_is_refused(refused: Callable[..., str], values: Any) -> None:
    data = [each.replace("val_fraction: 1", "val_fraction: 0") for each in values(drawn(40))]
    assert "task.metrics.0: 'r2' is computed over the split 'val'" in refused(*data, "task.metrics=[r2]")


def test_of_all_splits_those_that_the_data_lacks_do_not_count(executed: Runs, values: Any) -> None:
    only_train = [each.replace("val_fraction: 1", "val_fraction: 0") for each in values(drawn(40))]
    found, of_train = (
        executed("task=evaluate", f"task.split={split}", *only_train, "task.metrics=[r2]")
        for split in ("all", "train")
    )
    assert found.metrics[-1]["r2"] == of_train.metrics[-1]["r2"]


# ---- a user's own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def own(trusted: Callable[..., None]) -> None:
    trusted(ownmetrics=OWN)


@pytest.mark.usefixtures("own")
def test_a_function_that_declares_it_gets_the_whole_split(executed: Runs) -> None:
    found = executed("task=predict", *DIGITS, "task.metrics=[accuracy,'ownmetrics:wer']")
    assert found.metrics[-1]["wer"] == pytest.approx(1 - found.metrics[-1]["accuracy"])
    assert load_metrics(["ownmetrics:wer"])[0].direction == "minimize"


@pytest.mark.usefixtures("own")
def test_its_rows_are_in_the_order_of_the_samples_split_by_split() -> None:
    scores = drawn(61, 4)
    targets = torch.arange(61) % 4
    average = Average(load_metrics(["ownmetrics:ordered"]))
    for ids in torch.randperm(61).split(7):
        for split, there in (("val", scores), ("train", -scores)):
            average.add(None, of_samples(there[ids], targets[ids]), ids=ids, split=split)
    wanted = float((torch.cat([-scores, scores])[:, 0] * torch.arange(122)).sum())
    assert average.over_split()[0]["ordered"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.usefixtures("own")
def test_rows_of_different_shapes_come_as_lists() -> None:
    average = Average(load_metrics(["ownmetrics:first_words"]))
    for number, length in ((1, 4), (0, 6)):
        rows = of_samples(drawn(1, length, 3), torch.zeros(1, length).long())
        average.add(None, rows, ids=torch.tensor([number]), split="val")
    assert average.over_split() == ({"first_words": 6.0}, [])


@pytest.mark.usefixtures("own")
def test_one_value_for_each_sample_is_taken_as_such(executed: Runs) -> None:
    metric = "{name: 'ownmetrics:per_row', by: sample}"
    found = executed("task=predict", *DIGITS, f"task.metrics=[{metric}]")
    wanted = found.predictions[:].double().logsumexp(1)
    lines = [line["per_row"] for line in found.metrics if line.get("of") == "sample"]
    assert lines == pytest.approx(wanted.tolist())
    assert found.metrics[-1]["per_row"] == pytest.approx(float(wanted.mean()))


@pytest.mark.usefixtures("own")
def test_one_value_for_a_batch_has_no_samples(fails: Callable[..., str]) -> None:
    said = fails(
        "task=predict", *DIGITS, "task.metrics=['ownmetrics:spread',{name: 'ownmetrics:spread', by: sample}]"
    )
    assert said.startswith("task.metrics.1.by: 'spread' returned one number for a batch")


@pytest.mark.usefixtures("own")
def test_what_a_function_declares_is_checked() -> None:
    with pytest.raises(SpecError, match="has the attribute over='epoch'"):
        load_metrics(["ownmetrics:whole"])
    found, notes = over_split(["ownmetrics:nothing"], drawn(9), drawn(9))
    assert math.isnan(found["nothing"])
    assert notes == ["nothing: not defined, because the function returned NaN"]


# ---- effects --------------------------------------------------------------------------------------------------------

MOVED = ("task=effects", "task.hook=h", "task.over={factor: [1.0, 0.2], module: [relu1, relu2]}")
SCALED = "+hooks.h={{select: {}, hook: forward, action: scale, factor: {}}}"
FEW = ("train.limit_batches=3", "data.batch_size=20")


@pytest.mark.parametrize("metric", ["auroc", "{name: f1, average: micro}"])
def test_a_cell_has_the_metric_of_its_run(executed: Runs, metric: str) -> None:
    clean = executed("task=predict", *FEW)
    against = f"task.against={{run: '{clean.path}'}}"
    moved = SCALED.format("[relu1, relu2]", 1.0)
    found = executed(*MOVED, f"task.metric={metric}", moved, against, *FEW).effects
    name = "auroc" if metric == "auroc" else "f1"
    for row, factor in enumerate((1.0, 0.2)):
        for column, path in enumerate(("relu1", "relu2")):
            of_cell = executed("task=evaluate", f"task.metrics=[{metric}]", SCALED.format(path, factor), *FEW)
            assert float(found["exact"][row, column]) == pytest.approx(of_cell.metrics[-1][name], rel=1e-6)
    assert float(found["clean"]) == pytest.approx(float(found["unedited"]))
    assert not [key for key in found if key.endswith("_samples")], "no sample has a value"


@pytest.mark.usefixtures("own")
def test_a_batch_metric_is_computed_on_each_batch_of_a_cell(executed: Runs) -> None:
    found = executed(
        *MOVED, "task.metric='ownmetrics:spread'", SCALED.format("[relu1, relu2]", 1.0), *FEW
    ).effects
    metrics = "task.metrics=['ownmetrics:spread']"
    for column, path in enumerate(("relu1", "relu2")):
        of_cell = executed("task=evaluate", metrics, SCALED.format(path, 0.2), *FEW)
        assert float(found["exact"][1, column]) == pytest.approx(of_cell.metrics[-1]["spread"], rel=1e-5)


def test_what_a_grid_cannot_measure_over_the_split_is_refused(refused: Callable[..., str]) -> None:
    moved = (*MOVED, SCALED.format("[relu1, relu2]", 1.0), *FEW, "task.metric=auroc")
    assert "task.method: 'auroc' is computed over the whole split" in refused(*moved, "task.method=gradient")
    assert "task.max_rows: 'auroc' is computed from the scores of 300 rows" in refused(
        *moved, "task.max_rows=299"
    )
    each = "task.metric={name: f1, average: none}"
    assert "a cell has one value" in refused(*moved, each)


def test_a_metric_that_does_not_fit_is_an_error_at_its_key(executed: Runs) -> None:
    moved = (*MOVED, SCALED.format("[relu1, relu2]", 1.0), *FEW, "task.metric=r2")
    with pytest.raises(HookrunError, match=r"task\.metric: 'r2' needs one score for each target"):
        executed(*moved)


def test_cells_that_are_not_defined_are_told(executed: Runs) -> None:
    moved = ("task=effects", "task.hook=h", "task.over={factor: [1.0, 3e38]}", "task.metric=auroc", *FEW)
    larger = "+hooks.larger={select: relu2, hook: forward, action: scale, factor: 1e4}"
    found = executed(*moved, SCALED.format("relu1", 1.0), larger).effects
    assert found.faults == ["factor=3e+38: auroc (exact) is NaN or infinite"]
    assert found["exact"][1].isnan()
    assert found["exact"][0].isfinite()


OWN = """
import torch

def wer(outputs, targets):
    assert outputs.dtype == torch.float32 and not outputs.requires_grad
    return (outputs.argmax(1) != targets).sum() / len(targets)

wer.over, wer.direction = "split", "minimize"

def first_words(outputs, targets):
    return [len(row) for row in outputs][0]

first_words.over = "split"

def per_row(output, target):
    return output.double().logsumexp(1)

def spread(output, target):
    return output.std()

def nothing(outputs, targets):
    return float("nan")

nothing.over = "split"

def ordered(outputs, targets):
    return (outputs[:, 0] * torch.arange(len(outputs))).sum()

ordered.over = "split"

def whole(output, target):
    return 0

whole.over = "epoch"
"""


def over_split(
    entries: list[Any], scores: Tensor, targets: Tensor, split: str = "val"
) -> tuple[dict[str, float], list[str]]:
    """The metrics of rows that come in batches of seven, in a mixed order."""
    keys = [MetricKeys(**each) if isinstance(each, dict) else each for each in entries]
    average = Average(load_metrics(keys))
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(1))
    for ids in order.split(7):
        average.add(None, of_samples(scores[ids], targets[ids]), ids=ids, split=split)
    return average.over_split()


def close(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def by_average(name: str) -> list[dict[str, Any]]:
    return [{"name": name, "average": average} for average in ("macro", "micro", "none")]
