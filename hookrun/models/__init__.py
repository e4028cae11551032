"""Models by name: hookrun's own small ones, torchvision's, transformers', and a user's factory. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hookrun.engine.keys import GIVEN
from hookrun.engine.trust.load import MODELS, load
from hookrun.engine.validation import missing_arguments, parameters, unknown_arguments, wrong_call
from hookrun.errors import Mistakes, Problem, nearest, refuse, shown, spec_error
from hookrun.models import language, vision
from hookrun.models.arguments import DataDefaults, checked, construct, not_null, too_large
from hookrun.models.weights import RANDOM, applied_hooks, load_weights, origin, require_weights

if TYPE_CHECKING:
    from torch import nn

    from hookrun.models.settings import Model

__all__ = ["RANDOM", "applied_hooks", "build", "load_weights", "names", "origin"]


PYTHON = "python"
DECODER = "decoder"

# Name -> module and class, so that listing the names imports no torch, and building one of them no torchvision.
_OWN: Mapping[str, tuple[str, str]] = {
    "mlp": ("networks", "MLP"),
    "cnn": ("networks", "CNN"),
    "decoder": ("decoder", "Decoder"),
    "tutorial/doubling": ("tutorial", "Doubling"),
    "tutorial/regression": ("tutorial", "Regression"),
    "tutorial/testnet": ("tutorial", "TestNet"),
    "tutorial/pooling": ("tutorial", "Pooling"),
    "tutorial/activations": ("tutorial", "Activations"),
    "tutorial/add": ("tutorial", "AddTwo"),
    "tutorial/product": ("tutorial", "Product"),
    "tutorial/functions": ("tutorial", "Functions"),
}


def names() -> tuple[str, ...]:
    """The name of every model: hookrun's own, torchvision's, `transformers` and `python`; imports torchvision."""
    return (*_OWN, *vision.names(), language.TRANSFORMERS, PYTHON)


def build(
    config: Model,
    *,
    sample_shape: tuple[int, ...] | None,
    num_classes: int | None,
    trust: frozenset[str],
    vocab_size: int | None = None,
    length: int | None = None,
) -> nn.Module:
    """The module that `config` names, on the CPU, in training mode, with published weights if it asks for them.

    Initial weights are drawn from torch's global generator: a seed that is set before the call determines them.

    sample_shape: of one sample of the data set, without the batch; -1 where it differs, None where there is none
    num_classes:  of the data set; with sample_shape it fills in the arguments that `config.args` leaves out or null
    vocab_size:   of the data set's tokens, None where it has none; likewise `length`, the most tokens of a sample
    trust:        packages that the command line trusts, beside those of HOOKRUN_TRUST and installed entry points

    Raises SpecError with every mistake: an unknown name or argument, a value that the constructor refuses, weights
    that are missing, a factory that is not trusted, cannot be imported or does not return a module.
    """
    if config.name == GIVEN:
        from hookrun.models.given import lent_module

        return lent_module()
    mistakes = Mistakes()
    data = DataDefaults(sample_shape, num_classes, vocab_size, length)
    build_model = mistakes.tried(_prepared, config, data, trust)
    has_published = config.name not in (*_OWN, language.TRANSFORMERS, PYTHON)
    mistakes.tried(require_weights, config, published=has_published)
    mistakes.refuse()
    assert build_model is not None  # else there is a mistake
    return construct(build_model, config.factory or config.name)


def _prepared(config: Model, data: DataDefaults, trust: frozenset[str]) -> partial[Any]:
    """The call that makes the module. Raises SpecError with every mistake in its name and arguments."""
    if config.name in _OWN:  # before torchvision, whose import costs two seconds
        return _own(config, data)
    if config.name == language.TRANSFORMERS:
        return language.prepare(config, data)
    if config.name == PYTHON:
        return _from_factory(config, trust)
    if config.name in vision.names():
        return vision.prepare(config, data)
    raise spec_error(
        "model.name",
        f"there is no model '{config.name}'; {nearest(config.name, names())}",
        "correct the name",
    )


def _own(config: Model, data: DataDefaults) -> partial[Any]:
    module, name = _OWN[config.name]
    cls: type[nn.Module] = getattr(import_module(f"hookrun.models.{module}"), name)
    accepted = parameters(cls) or {}
    given = not_null(config.args)
    if config.name == DECODER:
        given = {key: value for key, value in given.items() if value is not None}
        if "path" in given:
            path = given["path"]
            raise spec_error(
                "model.args.path",
                f"found {shown(path)}: the decoder does not read GPT-2 from a folder",
                f"use model=transformers model.args.path={path} model.args.attention=points"
                ", with the module names of GPT-2",
            )
    args = data.values() | given
    problems = unknown_arguments(given, accepted, "model.args", config.name)
    problems += missing_arguments(args, accepted, "model.args", config.name, why=data.lack)
    args, wrong = checked(cls, {name: args[name] for name in accepted if name in args})
    problems += wrong
    if config.name == DECODER and not problems:
        with suppress(ValueError):  # of sizes that do not go together, which building it says
            # Sizes multiply: each of them may be right, and the model larger than any memory.
            if why := too_large(lambda: cls(**args)):
                problems = [Problem("model.args", why, "give smaller sizes")]
    refuse(problems)
    return partial(cls, **args)


def _from_factory(config: Model, trust: frozenset[str]) -> partial[Any]:
    """The imported factory. Raises SpecError if it is not trusted, does not exist, or cannot be called."""
    factory = load(config.factory or "", MODELS, "model.factory", trust)

    def call(**args: Any) -> object:
        with factory.refused("model.args"):
            return factory(**args)

    refuse(wrong_call(factory.target, config.args, "model.args", factory.text))
    return partial(call, **config.args)
