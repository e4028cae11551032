"""hookrun's own models: built from the data's shape alone, one file in conf/, cheap to import."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.testing import assert_close

from hookrun.models import _OWN, build, names
from hookrun.models.decoder import Decoder
from hookrun.models.language import TransformersArgs
from hookrun.models.networks import CNN, MLP
from hookrun.models.settings import Model

CONF = Path(__file__).parents[2] / "conf" / "model"
OF_IMAGES = [name for name in _OWN if name != "decoder"]  # it takes token ids: see test_decoder.py
each_own = pytest.mark.parametrize("name", OF_IMAGES)
each_file = pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")))


def built(name: str, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, **args: object) -> nn.Module:
    config = Model(name=name, args=args)
    return build(config, sample_shape=shape, num_classes=classes, trust=frozenset())


@each_own
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 10, 10)])
def test_a_model_trains_by_the_mean_of_its_output_on_any_images(name: str, shape: tuple[int, ...]) -> None:
    model = built(name, shape)
    output = model(torch.rand(4, *shape))
    output.mean().backward()
    assert output.isfinite().all()
    for parameter in model.parameters():
        assert parameter.grad is not None


@each_own
def test_one_seed_gives_equal_weights(name: str) -> None:
    assert yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))["name"] == name
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(built(name).state_dict())
    for key in states[0]:
        assert torch.equal(states[0][key], states[1][key])


@each_file
def test_conf_names_arguments_that_the_model_takes(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    config = Model(**yaml.safe_load(text))
    assert text.startswith("# ")
    assert config.name in names()
    if config.name == "decoder":
        assert set(config.args) == {"path", *signature(Decoder).parameters}
    elif config.name == "transformers":
        assert set(config.args) == {
            field.alias or name for name, field in TransformersArgs.model_fields.items()
        }
    elif config.name in OF_IMAGES:
        build(config, sample_shape=(3, 32, 32), num_classes=10, trust=frozenset())
        assert set(config.args) <= set(signature(type(built(config.name))).parameters)
    else:
        assert set(config.args) <= {"num_classes"}


def test_names_import_no_torch() -> None:
    program = (
        "import sys\n"
        "from hookrun.data import describe, load, names\n"
        "from hookrun.models import _OWN, build\n"
        "from hookrun.run.experiment.settings import Data, Model\n"
        "assert 'cnn' in _OWN and 'digits' in names() and 'torch' not in sys.modules\n"
        "describe(Data(name='digits'))\n"
        "load(Data(name='digits'), 'val', seed=0)\n"
        "build(Model(name='cnn'), sample_shape=(1, 8, 8), num_classes=10, trust=frozenset())\n"
        "print(sorted({'torch', 'torchvision', 'sklearn', 'scipy', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=CONF.parents[1]
    )
    assert done.stdout == "['torch']\n"
    assert done.stderr == ""


def test_no_relu_works_in_place() -> None:
    modules = [module for name in OF_IMAGES for module in built(name).modules()]
    relus = [module for module in modules if isinstance(module, nn.ReLU)]
    assert relus
    for relu in relus:
        assert not relu.inplace
    assert not [name for module in modules for name in module._modules if hasattr(nn.Module, name)]


def test_mlp_alternates_linear_with_relu() -> None:
    model = MLP(64, 10, (7, 5))
    assert [(name, type(m).__name__) for name, m in model.named_modules() if not list(m.children())] == [
        ("flatten", "Flatten"),
        ("layers.0", "Linear"),
        ("layers.1", "ReLU"),
        ("layers.2", "Linear"),
        ("layers.3", "ReLU"),
        ("fc", "Linear"),
    ]
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    linear = MLP(6, 10, ())
    assert list(dict(linear.named_parameters())) == ["fc.weight", "fc.bias"]
    assert linear(torch.rand(2, 6)).shape == (2, 10)


def test_cnn_runs_its_modules_in_the_order_of_names() -> None:
    model = CNN(1, (8, 8), 10)
    ran: list[str] = []
    for name, module in model.named_children():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    model(torch.rand(2, 1, 8, 8))
    assert ran == ["conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten", "fc"]
    assert ran == [name for name, _ in model.named_children()]


# --- the tutorials' models, beside the numbers that tests/conf compares with hand-written hooks


def tutorial(name: str, shape: tuple[int, ...] = (1, 8, 8)) -> Any:
    """The model with the tutorial's seed."""
    torch.manual_seed(2)
    return built(f"tutorial/{name}", shape)


def test_testnet_draws_its_input_before_its_layers() -> None:
    model = tutorial("testnet")
    torch.manual_seed(2)
    assert torch.equal(model.x, torch.randn(1, 3, 8, 8))
    assert torch.equal(model.conv.weight, nn.Conv2d(3, 10, 2, stride=2).weight)


def test_pooling_returns_eight_channels_of_4x4() -> None:
    model = tutorial("pooling", (3, 10, 10))
    seen = list[Any]()
    model.pool.register_forward_hook(lambda _m, _args, output: seen.append(list(output.shape)))
    assert model(torch.randn(1, 3, 10, 10)).shape == (1, 1)
    assert seen == [[1, 8, 4, 4]]


def test_functions_compute_elementwise() -> None:
    model = tutorial("functions")
    named = [name for name, m in model.named_modules() if type(m).__name__.startswith("Function_")]
    assert named == ["ab.a", "ab.b", "cd.c", "cd.d"]
    a, b, c, d = (model.get_submodule(name).W for name in named)
    assert_close(model(), (model.x + a - b) * c / d)
