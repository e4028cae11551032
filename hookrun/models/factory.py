"""A user's own model, `name: python`: the factory function of a package that the user trusts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookrun.arguments import wrong_call
from hookrun.errors import Problem, SpecError
from hookrun.models.arguments import ModelCall
from hookrun.trusted import MODELS, load

if TYPE_CHECKING:
    from hookrun.spec.experiment import Model

_WHERE = "model.factory"
_ARGS = "model.args"


def prepare(config: Model, trust: frozenset[str]) -> ModelCall:
    """Import the factory. Raises SpecError if it is not trusted, does not exist, or cannot be called."""
    factory = load(config.factory or "", MODELS, _WHERE, trust)

    def call(**args: Any) -> object:
        try:
            return factory(**args)
        except Exception as error:
            raise SpecError(
                [Problem(_ARGS, factory.failure(error), "correct it, or its arguments")]
            ) from error

    return ModelCall(call, config.args, tuple(wrong_call(factory.target, config.args, _ARGS, factory.text)))
