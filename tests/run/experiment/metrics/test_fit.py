"""Which tensor loss and metrics read, what fits the targets: told in the plan, or refused before the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign_models import SOURCE
from torch.nn import functional as F

from hookrun.cli import main
from hookrun.run.passes.batches import Batches
from hookrun.store.reader import open_run

Overrides = Callable[..., tuple[str, ...]]


@pytest.fixture
def strange(trusted: Callable[..., None]) -> Overrides:
    """The overrides for a model, `Form` in a form or a class with arguments, and data of a kind."""
    trusted(foreign=SOURCE)

    def strange(model: str, kind: str, **args: Any) -> tuple[str, ...]:
        given = ", ".join(f"{name}: {str(value).lower()}" for name, value in args.items())
        name, given = (model, given) if model[0].isupper() else ("Form", f"form: {model}")
        return (
            "model=python", f"model.factory=foreign:{name}", f"model.args={{{given}}}",
            "data=python", "data.factory=foreign:data", f"data.args={{kind: {kind}}}",
            "data.batch_size=5", "train.epochs=1", "train.log_every=1",
        )  # fmt: skip

    return strange


# ---- which tensor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form, place", [
    ("scores", ""), ("pair", "[1]"), ("nested", ".heads.digit"), ("dataclass", ".logits"), ("own_loss", ".logits"),
])  # fmt: skip
def test_labels_get_cross_entropy_of_the_first_fit(
    strange: Overrides, ready: Any, form: str, place: str
) -> None:
    of = f"of output{place} [2, 10]"
    assert told(ready(*strange(form, "labels"))) == [
        f"loss: cross_entropy {of}",
        f"metrics: loss, accuracy {of}",
    ]


def test_the_second_tensor_that_fits_is_named(strange: Overrides, ready: Any) -> None:
    first = told(ready(*strange("twice", "labels")))
    assert first[0] == "loss: cross_entropy of output[0] [2, 10]"
    assert first[-1].endswith("[1] would fit too; train.output: '[1]' takes it")
    second = told(ready(*strange("twice", "labels"), "train.output='[1]'"))
    of = "of output[1] [2, 10]"
    assert second == [f"loss: cross_entropy {of}", f"metrics: loss, accuracy {of}"]


def test_an_embedding_that_fits_too_is_named(strange: Overrides, ready: Any) -> None:
    line, _, note = told(ready(*strange("pair", "unknown")))
    assert line == "loss: cross_entropy of output[0] [2, 6]"
    assert "[1] would fit too" in note
    assert len(told(ready(*strange("dataclass", "unknown")))) == 2, "a member named logits is no guess"


def test_a_loss_of_any_tensor_names_the_one_that_it_reads(strange: Overrides, ready: Any) -> None:
    for form, place in (("pair", "[0] [2, 6]"), ("dataclass", ".logits [2, 10]"), ("one", " [2, 1]")):
        lines = told(ready(*strange(form, "numbers"), "train.loss=output_mean"))
        assert lines == [f"loss: output_mean of output{place}", "metrics: loss"]


def test_the_loss_reads_the_tensor_that_was_named(strange: Overrides, executed: Any, ready: Any) -> None:
    overrides = (*strange("twice", "labels"), "task=evaluate", "task.metrics=[loss,accuracy,foreign:share]")
    prepared = ready(*overrides, "train.output='[0]'")
    batches = list(Batches(prepared, "val"))
    outputs = [prepared.model.eval()(batch.inputs) for batch in batches]
    labels = torch.cat([batch.target for batch in batches])
    for place in (0, 1):
        scores = torch.cat([output[place] for output in outputs])
        line = executed(*overrides, f"train.output='[{place}]'").metrics[-1]
        assert line["loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-5)
        right = (scores.argmax(1) == labels).float().mean().item()
        assert line["accuracy"] == pytest.approx(right)
        assert line["share"] == pytest.approx(right)


def test_a_metric_may_name_its_own_tensor(
    strange: Overrides, executed: Any, ready: Any, refused: Any
) -> None:
    overrides = (*strange("twice", "labels"), "task=evaluate")
    asked = "task.metrics=[{name: accuracy, of: '[1]', by: sample},{name: top5_accuracy},loss]"
    prepared = ready(*overrides, asked)
    assert told(prepared)[1] == (
        "metrics: accuracy of output[1] [2, 10], top5_accuracy of output[0] [2, 10], loss"
    )
    batches = list(Batches(prepared, "val"))
    labels = torch.cat([batch.target for batch in batches])
    scores = torch.cat([prepared.model.eval()(batch.inputs)[1] for batch in batches])
    *of_samples, line = executed(*overrides, asked).metrics
    right = (scores.argmax(1) == labels).float()
    assert line["accuracy"] == pytest.approx(right.mean().item())
    assert [each["accuracy"] for each in of_samples] == right.tolist()
    said = refused(*overrides, "task.metrics=[loss,{name: accuracy, of: '[2]'}]")
    assert "task.metrics.1.of: '[2]' is not in the tuple: did you mean '[1]' or '[0]'?" in said


@pytest.mark.parametrize("form, path, says", [
    ("nested", "heads.digits", "'digits' is not in the dict at 'heads': did you mean 'digit'?"),
    ("nested", "heads", "'heads' is not a tensor, and holds heads.digit"),
    ("scores", "logits", "'logits' is not in the tensor of shape [2, 10]"),
    ("pair", "'[2]'", "'[2]' is not in the tuple"),
    ("pair", "'[1'", "cannot be read from '[1' on"),
])  # fmt: skip
def test_a_path_that_is_not_there_is_refused(
    strange: Overrides, refused: Any, form: str, path: str, says: str
) -> None:
    said = refused(*strange(form, "labels"), f"train.output={path}")
    assert f"train.output: {says}" in said or (says in said and "train.output: found" in said)


def test_an_output_may_have_another_form_in_validation(strange: Overrides, executed: Any) -> None:
    for more in ((), ("train.output='[0]'",)):
        train, val = executed(*strange("aux_in_training", "labels"), *more).metrics[-2:]
        assert {"loss", "accuracy"} <= train.keys()
        assert {"loss", "accuracy"} <= val.keys()


# ---- what does not fit ---------------------------------------------------------------------------------------------


VALUES = "use mse, l1, smooth_l1, huber, bce_with_logits"


@pytest.mark.parametrize("model, kind, args, hint", [
    ("one", "numbers", {}, VALUES),
    ("scores", "tags", {}, f"{VALUES}, cross_entropy, a function of your own"),
    ("Pixels", "same", {"classes": 1}, VALUES),
    ("one", "labels", {}, VALUES),
    ("labels", "labels", {}, "use a function of your own"),
    ("nothing", "labels", {}, "use a function of your own"),
    ("embedding", "labels", {}, "give the model as many classes as the data has"),
])  # fmt: skip
def test_training_needs_a_loss_that_fits(
    strange: Overrides, refused: Any, model: str, kind: str, args: dict[str, Any], hint: str
) -> None:
    said = refused(*strange(model, kind, **args))
    assert "train.loss: is not given" in said
    assert hint in said
    assert said.count("train.loss") == 1


@pytest.mark.parametrize("model, kind, args, loss, says", [
    ("Pixels", "same", {"classes": 1}, "cross_entropy", "[2, 1, 8, 8] for targets of shape [2, 1, 8, 8] float32"),
    ("one", "labels", {}, "cross_entropy", "returned shape [2, 1] for targets of shape [2] int64"),
    ("pair", "numbers", {}, "mse", "output and target of a sample need as many elements"),
    ("pair", "labels", {}, "foreign:wants_one_tensor", "'tuple' object has no attribute 'float'"),
    ("pair", "labels", {}, "output", "returned shape [2, 6], not one number"),
    ("scores", "labels", {}, "crossentropy", "did you mean 'cross_entropy'?"),
    ("scores", "labels", {}, "{name: cross_entropy, weight: [1, 2]}", "weight tensor should be defined"),
])  # fmt: skip
def test_a_loss_that_does_not_fit_is_refused_at_its_key(
    strange: Overrides, refused: Any, model: str, kind: str, args: dict[str, Any], loss: str, says: str
) -> None:
    said = refused(*strange(model, kind, **args), f"train.loss={loss}")
    assert says in said
    assert "train.loss" in said


def test_a_label_beyond_the_scores_is_told(strange: Overrides, fails: Any) -> None:
    assert "labels of this batch go from 1 to 10" in fails(*strange("scores", "beyond"), "data.batch_size=64")


@pytest.mark.parametrize("metric, model, kind", [
    ("accuracy", "one", "labels"), ("accuracy", "scores", "tags"), ("mean_squared_error", "pair", "labels"),
    ("perplexity", "one", "numbers"), ("foreign:share", "pair", "labels"),
])  # fmt: skip
def test_a_metric_that_does_not_fit_is_refused_at_its_place(
    strange: Overrides, refused: Any, metric: str, model: str, kind: str
) -> None:
    said = refused(*strange(model, kind), "task=evaluate", f"task.metrics=[{metric}]")
    assert "task.metrics.0: " in said
    assert "train.loss" not in said


def test_elements_in_another_order_are_never_compared(strange: Overrides, refused: Any, ready: Any) -> None:
    assert "in the same order" in refused(*strange("Pixels", "tags", classes=1), "train.loss=mse")
    flat = (*strange("Pixels", "same", classes=1), "train.loss=mse")
    assert told(ready(*flat)) == ["loss: mse of output [2, 1, 8, 8]", "metrics: loss"]


# ---- what is computed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model, kind, keys, says", [
    ("scores", "labels", {"loss", "accuracy"}, "metrics: loss, accuracy of output [2, 10]"),
    ("one", "numbers", set(), "metrics: none, since train.loss is not given, and the targets are float32 [2]"),
    ("embedding", "labels", set(), "cross_entropy of output [2, 6] does not have the 10 classes of the data"),
    ("nothing", "labels", set(), "without tensors"),
])  # fmt: skip
def test_evaluating_computes_by_default_what_fits_the_targets(
    strange: Overrides, executed: Any, capsys: Any, model: str, kind: str, keys: set[str], says: str
) -> None:
    [line] = executed(*strange(model, kind), "task=evaluate").metrics
    assert {"loss", "accuracy"} & line.keys() == keys
    assert keys or line["samples"] == 23
    assert says in capsys.readouterr().out


def test_no_loss_is_computed_where_none_is_asked_for(strange: Overrides, executed: Any) -> None:
    numbers = strange("one", "numbers")
    [line] = executed(*numbers, "task=evaluate", "task.metrics=[mean_squared_error]").metrics
    assert "loss" not in line
    assert line["mean_squared_error"] > 0
    [line] = executed(*numbers, "task=predict", "task.metrics=[mean_squared_error]").metrics
    assert "loss" not in line
    assert line["samples"] == 23
    [line] = executed(*numbers, "task=evaluate", "train.loss=mse").metrics
    assert line["loss"] > 0


def test_a_predicted_class_is_not_of_an_embedding(strange: Overrides, executed: Any) -> None:
    for form, is_there in (("pair", True), ("embedding", False)):
        lines = executed(*strange(form, "labels"), "task=predict").samples.lines
        for line in lines:
            assert (line.get("predicted_class") is not None) is is_there


@pytest.mark.parametrize("form, made_by", [("softmax", "softmax"), ("sigmoid", "sigmoid"), ("scores", None)])
def test_scores_that_are_probabilities_already_are_noted(
    strange: Overrides, ready: Any, form: str, made_by: str | None
) -> None:
    notes = told(ready(*strange(form, "labels")))[2:]
    assert [f"come from a {made_by}," in note for note in notes] == ([] if made_by is None else [True])


def test_ones_own_loss_is_tried_before_the_run(strange: Overrides, ready: Any, executed: Any) -> None:
    overrides = strange("scores", "labels")
    before = torch.get_rng_state()
    prepared = ready(*overrides, "train.loss=foreign:wants_a_label", "task.metrics=[foreign:share]")
    assert torch.equal(torch.get_rng_state(), before)
    assert told(prepared) == ["loss: wants_a_label of output", "metrics: share"]
    ctc = executed(*strange("Words", "short", time_first=True), "train.loss=foreign:ctc")
    assert ctc.metrics[-1]["loss"] > 0
    assert "accuracy" not in ctc.metrics[-1]


def test_of_a_large_output_the_shapes_are_checked(
    strange: Overrides, ready: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookrun.run.experiment.metrics.fit.MOST_NUMBERS", 0)
    of = "of output[1] [2, 10]"
    assert told(ready(*strange("pair", "labels"))) == [
        f"loss: cross_entropy {of}",
        f"metrics: loss, accuracy {of}",
    ]
    assert "train.loss: is not given" in refused(*strange("one", "labels"))
    own = ready(*strange("pair", "labels"), "train.loss=foreign:wants_one_tensor")
    assert told(own)[0] == "loss: wants_one_tensor of output"


def test_jobs_of_a_sweep_share_the_trial_run(strange: Overrides, capsys: Any) -> None:
    sweep = ("-m", *strange("one", "numbers"), "task=evaluate", "compute.device=cpu")
    assert main([*sweep, "task.metrics=[loss]", "train.loss=mse,l1", "hydra.sweep.dir=swept"]) == 0
    losses = [open_run(f"swept/{job}").metrics[-1]["loss"] for job in (0, 1)]
    assert losses[0] != losses[1]
    assert main([*sweep, "task.metrics=[loss]", "train.loss=mse,nll"]) == 2
    assert "train.loss: nll: the model returned shape [2, 1]" in capsys.readouterr().err


def test_effects_read_the_tensor_that_a_metric_names(strange: Overrides, executed: Any) -> None:
    zero = "+hooks.zero={select: body, hook: forward, action: scale, factor: 0}"
    moved = (*strange("twice", "labels"), "task=effects", zero, "task.hook=zero", "task.over={factor: [1]}")
    for place in (0, 1):
        metrics = f"{{name: accuracy, of: '[{place}]'}}"
        effects = executed(*moved, f"task.metric={metrics}").effects
        [line] = executed(*strange("twice", "labels"), "task=evaluate", f"task.metrics=[{metrics}]").metrics
        assert effects["exact"].item() == pytest.approx(line["accuracy"])
        other = executed(*moved, "task.metric=accuracy", f"train.output='[{place}]'").effects
        assert torch.equal(other["exact"], effects["exact"])


def test_what_other_numbers_may_pass_is_not_refused(strange: Overrides, executed: Any, refused: Any) -> None:
    overrides = (*strange("scores", "labels"), "data.batch_size=23")
    [line] = executed(
        *overrides, "task=evaluate", "task.metrics=[accuracy,foreign:of_several_classes]"
    ).metrics
    assert line["of_several_classes"] == pytest.approx(line["accuracy"])
    assert executed(*overrides, "task=evaluate", "train.loss=foreign:detached").metrics[-1]["loss"] > 0
    assert "a loss that requires no gradient" in refused(*overrides, "train.loss=foreign:detached")


# ---- labels at many places -----------------------------------------------------------------------------------------


MANY = [
    ("Words", "masked", {}, "", lambda scores: scores.movedim(-1, 1)),
    ("Pixels", "maps", {"classes": 3, "alone": False}, "", lambda scores: scores["out"]),
    ("scores", "gaps", {}, "", lambda scores: scores),
]


@pytest.mark.parametrize("model, kind, args, more, read", MANY, ids=[each[1] for each in MANY])
def test_labels_that_are_ignored_count_in_no_mean(
    strange: Overrides, executed: Any, ready: Any, model: str, kind: str, args: Any, more: str, read: Any
) -> None:
    """Loss and accuracy of the whole split, by plain PyTorch in one batch."""
    overrides = strange(model, kind, **args)
    prepared = ready(*overrides, "task=evaluate")
    [whole] = Batches(ready(*overrides, "task=evaluate", "data.batch_size=23"), "val")
    scores = read(prepared.model.eval()(whole.inputs))
    target = whole.target
    [line] = executed(*overrides, "task=evaluate").metrics
    assert line["loss"] == pytest.approx(F.cross_entropy(scores, target).item(), rel=1e-5)
    right = (scores.argmax(1) == target)[target != -100]
    assert line["accuracy"] == pytest.approx(right.float().mean().item(), rel=1e-6)


def test_the_label_that_the_loss_ignores_counts_in_no_accuracy(strange: Overrides, executed: Any) -> None:
    [plain] = executed(*strange("Pixels", "maps", classes=3), "task=evaluate").metrics
    loss = "train.loss={name: cross_entropy, ignore_index: 255}"
    [other] = executed(*strange("Pixels", "maps255", classes=3), "task=evaluate", loss).metrics
    assert plain["loss"] == other["loss"]
    assert plain["accuracy"] == other["accuracy"]


@pytest.mark.parametrize("model, kind, args, more, read", MANY, ids=[each[1] for each in MANY])
def test_a_step_of_micro_batches_is_the_step_of_the_whole_batch(
    strange: Overrides, executed: Any, model: str, kind: str, args: Any, more: str, read: Any
) -> None:
    overrides = (*strange(model, kind, **args), "train.shuffle=false", "train.optimizer={name: SGD, lr: 1.0}")
    steps = [
        executed(*overrides, f"data.batch_size={size}", f"train.accumulate={count}").metrics[0]
        for size, count in ((23, 1), (6, 4))
    ]
    assert steps[0]["loss"] == pytest.approx(steps[1]["loss"], rel=1e-5)
    assert steps[0]["accuracy"] == pytest.approx(steps[1]["accuracy"])


def test_classes_in_either_dimension_can_be_named(strange: Overrides, ready: Any) -> None:
    words = (*strange("Words", "masked", words=7), "data.args={kind: masked, words: 7}")
    first, *_, note = told(ready(*words))
    assert first == "loss: cross_entropy of output [2, 7, 7]"
    assert note.endswith("the last dimension may have the classes too; class_dim: -1 takes it")
    assert told(ready(*words, "train.loss={name: cross_entropy, class_dim: -1}")) == [
        "loss: cross_entropy of output [2, 7, 7], classes in the last dimension",
        "metrics: loss, accuracy of output [2, 7, 7], classes in the last dimension",
    ]


def test_labels_of_any_integer_type_are_labels(strange: Overrides, executed: Any) -> None:
    [long] = executed(*strange("scores", "unknown"), "task=evaluate").metrics
    [short] = executed(*strange("scores", "int32"), "task=evaluate").metrics
    assert long["loss"] == short["loss"]
    assert long["accuracy"] == short["accuracy"]


def told(prepared: Any) -> list[str]:
    """The lines of the plan about loss and metrics, then the notes on the loss."""
    lines = [line for line in prepared.lines if line.startswith(("loss:", "metrics:"))]
    return lines + [note for note in prepared.notes if note.startswith("train.loss")]
