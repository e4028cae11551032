"""The section `model` of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field
from pydantic import Tag as Kind

from hookrun.engine.validation import FromRegistry, Section


class RunWeights(Section):
    """Weights that another run has trained.

    run:        one of `needs`, `previous`, or the directory of a run
    checkpoint: which checkpoint of the run; `ema` is the moving average of its weights
    """

    run: Annotated[str, Field(min_length=1, max_length=4_096)]
    checkpoint: Literal["last", "best", "ema"] = "last"


Weights = Annotated[
    Annotated[str, Kind("a name")] | Annotated[RunWeights, Kind("a run")],
    Discriminator(lambda raw: "a run" if isinstance(raw, Mapping | RunWeights) else "a name"),
]
"""A path or a name, or a mapping; an error message is about the form that was given."""


class Model(FromRegistry):
    """Which network: a name of the closed registry, its arguments, and where its weights come from.

    weights:      a path, the name of published weights, or the weights of another run
    strip_prefix: what is removed from the names in the file that begin with it
    """

    weights: Weights | None = None
    strip_prefix: str | None = None

    @property
    def own_weights(self) -> str | None:
        """The path or the name in `weights`; None for the weights of a run, until it is replaced by its file."""
        return None if isinstance(self.weights, RunWeights) else self.weights
