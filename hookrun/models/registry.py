"""The closed registry of models under one flat list of names: hookrun's own, torchvision's, and a user's factory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from hookrun.arguments import missing_arguments, parameters, unknown_arguments
from hookrun.errors import Problem, SpecError, nearest
from hookrun.models import factory, vision
from hookrun.models.arguments import DataDefaults, ModelCall, checked, construct, given
from hookrun.models.weights import misplaced

if TYPE_CHECKING:
    from torch import nn

    from hookrun.spec.experiment import Model

PYTHON = "python"

# Name -> module and class, so that listing the names imports no torch, and building one of them no torchvision.
_OWN: Mapping[str, tuple[str, str]] = {
    "mlp": ("mlp", "MLP"),
    "cnn": ("cnn", "CNN"),
    "tutorial/doubling": ("tutorial.doubling", "Doubling"),
    "tutorial/regression": ("tutorial.regression", "Regression"),
    "tutorial/testnet": ("tutorial.testnet", "TestNet"),
    "tutorial/pooling": ("tutorial.pooling", "Pooling"),
    "tutorial/activations": ("tutorial.activations", "Activations"),
    "tutorial/add": ("tutorial.add", "AddTwo"),
    "tutorial/product": ("tutorial.product", "Product"),
    "tutorial/functions": ("tutorial.functions", "Functions"),
}


def own_names() -> tuple[str, ...]:
    """The names of hookrun's own models; imports no torch."""
    return tuple(_OWN)


def names() -> tuple[str, ...]:
    """The name of every model: hookrun's own, torchvision's, and `python`; imports torchvision."""
    return (*_OWN, *vision.names(), PYTHON)


def build(
    config: Model, *, sample_shape: tuple[int, ...] | None, num_classes: int | None, trust: frozenset[str]
) -> nn.Module:
    """The module that `config` names, on the CPU, in training mode, with published weights if it asks for them.

    Initial weights are drawn from torch's global generator: a seed that is set before the call determines them.

    sample_shape: of one sample of the data set, without the batch; -1 where it differs, None where there is none
    num_classes:  of the data set; with sample_shape it fills in the arguments that `config.args` leaves out or null
    trust:        packages that the command line trusts, beside those of HOOKRUN_TRUST and installed entry points

    Raises SpecError with every mistake: an unknown name or argument, a value that the constructor refuses, weights
    that are missing, a factory that is not trusted, cannot be imported or does not return a module.
    """
    data = DataDefaults(sample_shape, num_classes)
    wrong = misplaced(config, published=config.name not in (*_OWN, PYTHON))
    try:
        call = _prepare(config, data, trust)
    except SpecError as error:
        raise SpecError([*error.errors, *wrong]) from error
    return construct(
        ModelCall(call.target, call.args, (*call.problems, *wrong)), config.factory or config.name
    )


def _prepare(config: Model, data: DataDefaults, trust: frozenset[str]) -> ModelCall:
    if config.name in _OWN:  # before torchvision, whose import costs two seconds
        return _own(config, data)
    if config.name == PYTHON:
        return factory.prepare(config, trust)
    if config.name in vision.names():
        return vision.prepare(config, data)
    what = f"there is no model '{config.name}'; {nearest(config.name, names())}"
    raise SpecError([Problem("model.name", what, "correct the name")])


def _own(config: Model, data: DataDefaults) -> ModelCall:
    module, name = _OWN[config.name]
    cls: type[nn.Module] = getattr(import_module(f"hookrun.models.{module}"), name)
    found = parameters(cls) or {}
    args = data.values() | given(config.args)
    problems = unknown_arguments(given(config.args), found, "model.args", config.name)
    problems += missing_arguments(args, found, "model.args", config.name, why=data.lack)
    args, wrong = checked(cls, {name: args[name] for name in found if name in args})
    return ModelCall(cls, args, (*problems, *wrong))
