"""The registry of models: one flat namespace, arguments from the data, every mistake at once with its key path."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from hookrun.errors import Problem, SpecError
from hookrun.models import build
from hookrun.models.arguments import positions_of, unfit_tokens
from hookrun.models.networks import CNN
from hookrun.models.settings import Model


def problems(
    config: Model, shape: tuple[int, ...] | None = (1, 8, 8), classes: int | None = 10
) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        build(config, sample_shape=shape, num_classes=classes, trust=frozenset())
    return caught.value.errors


@pytest.mark.parametrize(
    ("typo", "meant"), [("ccn", "cnn"), ("resnet-18", "resnet18"), ("tutorial/ad", "tutorial/add")]
)
def test_an_unknown_model_is_refused_with_the_nearest_names(typo: str, meant: str) -> None:
    [problem] = problems(Model(name=typo))
    assert problem.where == "model.name"
    assert f"'{typo}'" in problem.what
    assert f"'{meant}'" in problem.what


def test_sizes_come_from_the_data_unless_they_are_given() -> None:
    model = build(Model(name="cnn"), sample_shape=(3, 32, 32), num_classes=100, trust=frozenset())
    assert isinstance(model, CNN)
    assert model.conv1.in_channels == 3
    assert model.fc.weight.shape == (100, 128 * 8 * 8)
    # null is the data's value, and not passed to a model without the argument
    config = Model(name="mlp", args={"num_classes": 3, "in_features": None, "image_size": None})
    given = build(config, sample_shape=(1, 8, 8), num_classes=10, trust=frozenset())
    shapes = {name: tuple(p.shape) for name, p in given.named_parameters()}
    assert shapes["fc.weight"] == (3, 64)
    assert shapes["layers.0.weight"] == (64, 64)
    own = build(Model(name="tutorial/add"), sample_shape=None, num_classes=None, trust=frozenset())
    assert own().shape == (1,)


def test_an_argument_that_the_data_cannot_supply_is_required() -> None:
    found = problems(Model(name="cnn"), shape=(8, 8), classes=None)
    assert [p.where for p in found] == [
        "model.args.in_channels",
        "model.args.image_size",
        "model.args.num_classes",
    ]
    assert "the data set's samples have the shape [8, 8]" in found[0].what
    assert "the data set names no number of classes" in found[2].what
    # sizes that differ between samples
    assert [p.where for p in problems(Model(name="mlp"), shape=(3, -1, -1))] == ["model.args.in_features"]
    assert [p.where for p in problems(Model(name="cnn"), shape=(3, -1, -1))] == ["model.args.image_size"]
    assert [p.where for p in problems(Model(name="cnn"), shape=(-1, 4, 5))] == ["model.args.in_channels"]


def test_every_mistake_is_reported_at_once(tmp_path) -> None:
    gone = tmp_path / "gone.pt"
    config = Model(
        name="mlp",
        args={"hiden": [1], "hidden": [64, "a"], "in_features": 0, "num_classes": "10"},
        weights=str(gone),
    )
    found = {p.where: p.what for p in problems(config)}
    assert set(found) == {
        "model.args.hiden", "model.args.hidden.1", "model.args.in_features", "model.args.num_classes",
        "model.weights",
    }  # fmt: skip
    assert "did you mean 'hidden'?" in found["model.args.hiden"]
    assert "'a'" in found["model.args.hidden.1"]
    assert str(gone) in found["model.weights"]


@pytest.mark.parametrize("value", [5, "32", [32], [32, 64, 128], [32, 0], [32, 1.5], [32, True], None])
def test_a_misfit_is_refused_before_a_module_is_built(value: object) -> None:
    found = problems(Model(name="cnn", args={"channels": value}))
    assert {p.where.removesuffix(".0").removesuffix(".1") for p in found} == {"model.args.channels"}
    [too_small] = problems(Model(name="cnn"), shape=(1, 3, 8))
    assert (too_small.where, "found 3" in too_small.what) == ("model.args.image_size.0", True)


def test_a_wrong_type_is_reported_in_the_words_of_yaml() -> None:
    found = problems(Model(name="mlp", args={"hidden": 64})) + problems(
        Model(name="cnn", args={"channels": [1]})
    )
    assert [p.what for p in found] == ["found 64: expected a valid list", "is missing"]


def test_wrong_weights_are_reported_beside_an_unknown_model(tmp_path) -> None:
    [problem] = problems(Model(name="cnn", weights="DEFAULT"))
    assert problem.where == "model.weights"
    assert "'cnn'" in problem.what
    assert ".safetensors" in problem.hint
    config = Model(name="ccn", weights=str(tmp_path / "gone.pt"))
    assert [p.where for p in problems(config)] == ["model.name", "model.weights"]


class Net(nn.Module):
    def __init__(self, positions: int, **config: int) -> None:
        super().__init__()
        self.h = nn.ModuleDict({"wpe": nn.Embedding(positions, 2), "wte": nn.Embedding(3, 2)})
        self.config = SimpleNamespace(**config)


def test_too_few_positions_are_reported_with_the_module() -> None:
    model = Net(8, vocab_size=10)
    assert list(unfit_tokens(model, 10, 8)) == []
    texts = [problem.what for problem in unfit_tokens(model, 11, 9)]
    assert texts == [
        "the model has 10 tokens, and the data has 11",
        "the model has 8 positions (h.wpe), and samples of the data 9 tokens",
    ]
    # data without tokens, and a model without a configuration
    for other, vocabulary in ((model, None), (nn.Embedding(3, 2), 100)):
        assert list(unfit_tokens(other, vocabulary, 100)) == []


def test_the_smallest_number_of_positions_counts() -> None:
    assert positions_of(Net(8, max_position_embeddings=6)) == (6, "max_position_embeddings")
    assert positions_of(Net(8, max_position_embeddings=16)) == (8, "h.wpe")
    assert positions_of(nn.Linear(2, 2)) is None
