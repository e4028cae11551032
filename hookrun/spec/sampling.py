"""`task.sampling`: how the next token is drawn while generating. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hookrun.spec.experiment import MOST, Section


class Sampling(Section):
    """The distribution from which each token is drawn; the keys apply in this order.

    temperature: divides the logits; below 1 the most probable tokens become more probable
    top_k:       draw from this many of the most probable tokens; null: all
    top_p:       draw from the most probable tokens that together have this probability, at least one; null: all
    """

    temperature: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=1, le=MOST, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None

    def __str__(self) -> str:
        parts = [f"temperature {self.temperature:g}"]
        parts += [f"top_k {self.top_k}"] if self.top_k is not None else []
        parts += [f"top_p {self.top_p:g}"] if self.top_p is not None else []
        return ", ".join(parts)
