"""torchvision's models by name, their published weights by name, and no unrequested download."""

from __future__ import annotations

import os
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import ResNet18_Weights, list_models

from hookrun.errors import Problem, SpecError
from hookrun.models import build, load_weights, vision
from hookrun.models.arguments import DataDefaults
from hookrun.models.settings import Model

DIGITS = DataDefaults((1, 8, 8), 10)
RESNET18_FILE = "resnet18-f37072fd.pth"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of downloaded weights, and no network."""

    def offline(url: str, *_args: object, **_kwargs: object) -> None:
        raise urllib.error.URLError(OSError("Network is unreachable"))

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    yield folder


def small(name: str, **args: object) -> nn.Module:
    return build(Model(name=name, args=args), sample_shape=(3, 64, 64), num_classes=10, trust=frozenset())


def problems(config: Model) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        build(config, sample_shape=(3, 64, 64), num_classes=10, trust=frozenset())
    return caught.value.errors


@pytest.mark.parametrize("name", list_models())
def test_every_torchvision_model_needs_no_download(name: str) -> None:
    args = vision.prepare(Model(name=name), DIGITS).keywords
    assert args.get("weights_backbone") is None
    assert args.get("num_classes", 10) == 10


def test_the_number_of_classes_comes_from_the_data() -> None:
    assert small("squeezenet1_1")(torch.rand(2, 3, 64, 64)).shape == (2, 10)
    assert small("squeezenet1_1", num_classes=None)(torch.rand(2, 3, 64, 64)).shape == (2, 10)
    assert small("squeezenet1_1", num_classes=3)(torch.rand(2, 3, 64, 64)).shape == (2, 3)

    assert "num_classes" not in vision.prepare(Model(name="raft_small"), DIGITS).keywords  # it has none


def test_arguments_are_those_of_the_builder() -> None:
    # a default that torchvision will change would be a warning
    assert vision.prepare(Model(name="googlenet"), DIGITS).keywords["init_weights"] is True
    with torch.device("meta"):
        model = small("vit_b_16", image_size=16)
    assert model.image_size == 16


@pytest.mark.parametrize(
    ("section", "where", "said"),
    [
        # of a class that would ignore it
        ({"name": "convnext_tiny", "args": {"num_clases": 3}}, "args.num_clases", "mean 'num_classes'"),
        ({"name": "resnet18", "args": {"layers": [1, 1, 1, 1]}}, "args", "multiple values"),
        ({"name": "resnet18", "args": {"weights": None}}, "args.weights", "no argument 'weights'"),
        ({"name": "resnet18", "args": {"progress": None}}, "args.progress", "no argument 'progress'"),
        ({"name": "resnet18", "args": {"groups": 3}}, "args", "BasicBlock only supports groups=1"),
        ({"name": "resnet50", "weights": "IMAGENET1K_V3"}, "weights", "'IMAGENET1K_V2'"),
        (
            {"name": "resnet18", "weights": "ResNet50_Weights.IMAGENET1K_V2"},
            "weights",
            "'ResNet18_Weights.IMAGENET1K_V1'",
        ),
        (
            {"name": "resnet18", "weights": "DEFAULT", "args": {"num_classes": 10}},
            "args",
            "expected value 1000 but got 10",
        ),
    ],
)
def test_arguments_that_the_model_lacks_are_refused(
    cache: Path, section: dict[str, Any], where: str, said: str
) -> None:
    [problem] = problems(Model(**section))
    assert problem.where == f"model.{where}"
    assert said in problem.what


@pytest.mark.parametrize("weights", ["DEFAULT", "IMAGENET1K_V1", "ResNet18_Weights.IMAGENET1K_V1"])
def test_published_weights_bring_their_own_number_of_classes(weights: str) -> None:
    assert vision.prepare(Model(name="resnet18", weights=weights), DIGITS).keywords == {}


def test_offline_the_error_says_where_it_looked(cache: Path) -> None:
    [problem] = problems(Model(name="resnet18", weights="IMAGENET1K_V1"))
    assert problem.where == "model.weights"
    assert str(cache / RESNET18_FILE) in problem.what
    assert "Network is unreachable" in problem.what
    assert ResNet18_Weights.IMAGENET1K_V1.url in problem.hint
    assert "TORCH_HOME" in problem.hint


def test_published_weights_are_taken_from_the_cache(cache: Path) -> None:
    source = small("resnet18", num_classes=1000).state_dict()
    torch.save(source, cache / RESNET18_FILE)
    config = Model(name="resnet18", weights="DEFAULT")
    model = build(config, sample_shape=(3, 64, 64), num_classes=10, trust=frozenset())
    assert load_weights(model, "DEFAULT") == {}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source[name])


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["TORCH_HOME"] + "/exploded",)


def test_a_cached_file_that_holds_code_is_not_run(cache: Path) -> None:
    torch.save({"conv1.weight": Bomb()}, cache / RESNET18_FILE)
    [problem] = problems(Model(name="resnet18", weights="DEFAULT"))
    assert problem.where == "model.weights"
    assert str(cache / RESNET18_FILE) in problem.what
    assert not (cache.parents[1] / "exploded").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
