"""A network that has the sequence first, with as many steps as samples: samples are those of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hookrun.run.passes.batches import Batches

LINES = ("task=predict", "data.batch_size=8", "train.limit_batches=2")


@pytest.fixture
def argv(own_model) -> tuple[str, ...]:
    return (*own_model(ROWS), *LINES)


@pytest.fixture
def plain(argv, ready) -> Any:
    """The model, its inputs [16, 1, 8, 8] and labels."""
    prepared = ready(*argv)
    batches = list(Batches(prepared, "val").epoch(0))[:2]
    images = torch.cat([batch.inputs for batch in batches])
    labels = torch.cat([batch.target for batch in batches])
    return prepared.model.eval(), images, labels


def test_captures_have_a_row_for_each_sample(argv, plain, executed) -> None:
    model, images, _ = plain
    captures = executed(*argv, hook("seen", "rnn", "capture")).captures["seen"]["rnn"]
    output, states = sequence(model, images)
    torch.testing.assert_close(captures["[0]"][:], output.transpose(0, 1))
    torch.testing.assert_close(captures["[1][0]"][:], states[0].transpose(0, 1))
    assert captures["[0]"].sample_ids.tolist() == [*range(16)]
    assert captures["[1][1]"].sample_ids.tolist() == [*range(16)]


@pytest.mark.parametrize(
    ("keys", "of"),
    [
        ({"index": "'-1'"}, lambda x: x[-1]),
        ({"index": "'..., 0:2'"}, lambda x: x[..., :2].transpose(0, 1)),
        ({"reduce": "'mean'"}, lambda x: x.transpose(0, 1).mean((1, 2))),
        ({"reduce": "{mean: 0}"}, lambda x: x.mean(0)),
        ({"reduce": "{mean: 2}"}, lambda x: x.mean(2).T),
        ({"keep": "{every: 3}"}, lambda x: x.transpose(0, 1)[::3]),
    ],
    ids=["index of a step", "index of channels", "reduced", "reduced steps", "reduced channels", "kept"],
)
def test_what_is_kept_of_a_tensor_keeps_its_samples(argv, plain, executed, keys, of) -> None:
    model, images, _ = plain
    found = executed(*argv, hook("seen", "act", "capture", **keys)).captures["seen"]["act"]
    expected = of(torch.tanh(sequence(model, images)[0]))
    torch.testing.assert_close(found[:], expected)
    assert found.sample_ids.tolist() == [*range(0, 16, 3 if "keep" in keys else 1)]


@pytest.mark.parametrize(
    ("select", "keys"),
    [("position", {}), ("act", {"reduce": "{mean: 1}"}), ("act", {"index": "':, 0'"})],
    ids=["table", "mean over samples", "one sample"],
)
def test_without_a_batch_dimension_a_row_is_one_firing(argv, executed, select, keys) -> None:
    found = executed(*argv, hook("seen", select, "capture", **keys)).captures["seen"][select]
    assert found.sample_ids.tolist() == [-1, -1]


def test_conditions_choose_samples(argv, plain, executed) -> None:
    model, images, labels = plain
    edit = hook("cut", "rnn", "scale", factor="0", target="'[0]'", when="{data: {label: [1, 3, 5]}}")
    found = executed(*argv, edit).predictions[:]
    output = sequence(model, images)[0]
    chosen = torch.isin(labels, torch.tensor([1, 3, 5]))
    torch.testing.assert_close(found, scores(model, output * ~chosen[None, :, None]))


def test_conditions_on_values_are_those_of_each_sample(argv, plain, executed) -> None:
    model, images, _ = plain
    output = sequence(model, images)[0]
    norms = output.transpose(0, 1).flatten(1).norm(dim=1)
    above = float(norms.median())
    edit = hook(
        "cut", "rnn", "scale", factor="0", target="'[0]'", when=f"{{value: {{of: norm, above: {above}}}}}"
    )
    expected = scores(model, output * ~(norms > above)[None, :, None])
    torch.testing.assert_close(executed(*argv, edit).predictions[:], expected)


def test_each_sample_gets_its_own_value_of_another_run(argv, plain, executed) -> None:
    model, images, _ = plain
    clean = executed(*argv, hook("seen", "rnn", "capture", target="'[0]'"))
    value = f"{{run: {clean.path}, capture: seen, module: rnn, sample: same}}"
    blank = hook("blank", "position", "scale", factor="0")
    patch = hook("patch", "rnn", "replace", value=value, target="'[0]'")
    found = executed(*argv, blank, patch).predictions[:]
    torch.testing.assert_close(found, scores(model, sequence(model, images)[0]))


def test_a_part_of_a_sample_is_replaced_by_the_same_part(argv, plain, executed) -> None:
    model, images, _ = plain
    clean = executed(*argv, hook("seen", "rnn", "capture", target="'[0]'"))
    value = f"{{run: {clean.path}, capture: seen, module: rnn, sample: same, at: same}}"
    zero = hook("zero", "rnn", "scale", factor="0", target="'[0]'")
    patch = hook("patch", "rnn", "replace", value=value, target="'[0]'", index="'..., 0:3'")
    expected = sequence(model, images)[0]
    expected[..., 3:] = 0
    torch.testing.assert_close(executed(*argv, zero, patch).predictions[:], scores(model, expected))


def test_each_sample_has_as_many_faults(argv, executed) -> None:
    flips = hook("flip", "act", "flip_bits", count="3", per="sample", bits="[0]")
    faults = executed(*argv, flips).faults
    samples = torch.tensor([line["sample"] for line in faults]).bincount(minlength=16)
    assert samples.tolist() == [3] * 16
    for line in faults:
        assert line["element"] // (8 * 6) == line["sample"] % 8


def test_the_limit_of_bytes_keeps_whole_samples(argv, plain, executed) -> None:
    model, images, _ = plain
    of_sample = 8 * 6 * 4
    found = executed(*argv, hook("seen", "act", "capture", max_bytes=f"{5 * of_sample + 7}")).captures[
        "seen"
    ]["act"]
    torch.testing.assert_close(found[:], torch.tanh(sequence(model, images)[0]).transpose(0, 1)[:5])


def test_the_plan_shows_where_the_batch_is(argv, ready) -> None:
    said = str(
        ready(
            *argv, hook("a", "rnn", "capture"), hook("b", "position", "capture"), hook("c", "head", "capture")
        ).plan
    )
    assert "a: batch dimension 1, on rnn" in said
    assert "b: no batch dimension, on position" in said
    assert "c: batch dimension" not in said


def test_the_plan_shows_where_the_batch_is_in_a_part(argv, ready) -> None:
    said = str(
        ready(
            *argv,
            hook("one", "act", "capture", index="':, 0'"),
            hook("last", "act", "capture", index="'..., 0'"),
            hook("mean", "act", "capture", reduce="{mean: [1]}"),
        ).plan
    )
    assert "one: no batch dimension, on act" in said
    assert "last: batch dimension 1, on act" in said
    assert "mean: no batch dimension, on act" in said


@pytest.mark.parametrize(
    "keys",
    [
        {"when": "{data: {label: 3}}", "action": "scale", "factor": "0"},
        {"when": "{value: {of: norm, above: 1}}", "action": "scale", "factor": "0"},
        {"action": "capture", "keep": "{every: 2}"},
        {"action": "flip_bits", "count": "1", "per": "sample"},
    ],
    ids=["data", "value", "keep", "flip_bits"],
)
def test_what_works_by_sample_is_refused_where_there_are_none(argv, refused, keys) -> None:
    said = refused(*argv, hook("h", "position", keys.pop("action"), **keys))
    assert "hooks.h: on position" in said
    assert "no dimension of the tensor follows the batch: it has shape [8, 8]" in said


ONE = """
def __init__(self):
    super().__init__()
    self.last = nn.Linear(64, 10)

def forward(self, image):
    return self.last(image.view(64)).view(1, 10)
"""


def test_a_model_of_one_sample_at_a_time_keeps_samples(own_model, ready, executed) -> None:
    argv = (*own_model(ONE), "task=predict", "data.batch_size=1", "train.limit_batches=3")
    hooks = hook("seen", "''", "capture")
    assert ready(*argv, hooks).plan.unchecked is None
    assert executed(*argv, hooks).captures["seen"][""].sample_ids.tolist() == [0, 1, 2]


FIXED = ONE.replace("image.view(64)).view(1, 10)", "image.view(2, 64))")


def test_the_plan_says_why_the_batch_dimension_is_unknown(own_model, ready, executed) -> None:
    argv = (*own_model(FIXED), "task=predict", "data.batch_size=2", "train.limit_batches=1")
    plan = ready(*argv, hook("seen", "last", "capture")).plan
    assert "the model runs with 2 samples and not with 3" in str(plan)
    assert "if it has one, name it with batch_dim" in str(plan)
    unknown = executed(*argv, hook("seen", "last", "capture")).captures["seen"]["last"]
    said = executed(*argv, hook("seen", "last", "capture", batch_dim="0")).captures["seen"]["last"]
    assert unknown.sample_ids.tolist() == [-1]
    assert said.sample_ids.tolist() == [0, 1]


def test_a_probe_reads_samples(argv, executed, tmp_path: Path) -> None:
    run = executed(
        *argv[:2],
        *LINES[:2],
        "task.split=all",
        "train.limit_batches=12",
        hook("seen", "rnn", "capture", target="'[0]'"),
    )
    assert run.captures["seen"]["rnn"].sample_ids.min() >= 0
    assert run.captures["seen"]["rnn"].shape[1:] == (8, 6)


def test_a_batch_that_is_taken_for_a_sequence_is_noted(own_model, ready) -> None:
    argv = (*own_model(ROWS.replace("rows.transpose(0, 1)", "rows").replace("[-1]", "[:, -1]")), *LINES)
    said = str(ready(*argv, hook("seen", "rnn", "capture")).plan)
    assert "rnn: batch_first is false, and dimension 0 of the input has the samples" in said


SIMILAR = """
def __init__(self):
    super().__init__()
    self.embed, self.compare = nn.Linear(64, 4), nn.Identity()

def forward(self, images):
    embedded = self.embed(images.flatten(1))
    return self.compare(embedded @ embedded.T)
"""


def test_the_first_of_two_batch_dimensions_is_taken(own_model, ready, executed) -> None:
    argv = (*own_model(SIMILAR), "task=predict", "data.batch_size=4", "train.limit_batches=1")
    said = str(ready(*argv, hook("seen", "compare", "capture")).plan)
    assert "seen: batch dimension 0 (dimension 1 follows the batch too" in said
    columns = hook("seen", "compare", "capture", batch_dim="1", index="':, 0:1'")
    found = executed(*argv, columns).captures["seen"]["compare"]
    assert found.sample_ids.tolist() == [-1]


def test_a_model_whose_path_depends_on_numbers_shows_it_too(own_model, ready, executed) -> None:
    by_number = ROWS.replace(
        "    output, _", "    rows = rows if float(rows.sum()) < 1e9 else -rows\n    output, _"
    )
    argv = (*own_model(by_number), *LINES)
    plan = ready(*argv, hook("seen", "rnn", "capture")).plan
    assert plan.unchecked is not None
    assert "seen: batch dimension 1, on rnn" in str(plan)
    found = executed(*argv, hook("seen", "rnn", "capture")).captures["seen"]["rnn"]["[0]"]
    assert found.sample_ids.tolist() == [*range(16)]
    assert found.shape[1:] == (8, 6)
    part = hook("seen", "act", "capture", index="'-1'")
    assert "seen: captures a row for each firing" in str(ready(*argv, part).plan)


ROWS = """
def __init__(self):
    super().__init__()
    torch.manual_seed(0)
    self.position = nn.Embedding(8, 8)
    self.rnn = nn.LSTM(8, 6)
    self.act = nn.Tanh()
    self.head = nn.Linear(6, 10)

def forward(self, images):
    rows = images.reshape(-1, 8, 8) + self.position(torch.arange(8))
    output, _ = self.rnn(rows.transpose(0, 1))
    return self.head(self.act(output)[-1])
"""
"""The rows of a picture are the steps of an LSTM [steps, samples, width]; the table of positions has no samples."""


def sequence(model: Any, images: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What the LSTM returns: [steps, samples, 6] and two states [1, samples, 6]."""
    with torch.no_grad():
        rows = images.reshape(-1, 8, 8) + model.position.weight
        return model.rnn(rows.transpose(0, 1))  # type: ignore[no-any-return]


def scores(model: Any, output: Tensor) -> Tensor:
    with torch.no_grad():
        return model.head(torch.tanh(output)[-1])  # type: ignore[no-any-return]


def hook(name: str, select: str, action: str, **keys: str) -> str:
    given = {"select": select, "hook": "forward", "action": action, **keys}
    return f"+hooks.{name}={{" + ", ".join(f"{key}: {value}" for key, value in given.items()) + "}"
