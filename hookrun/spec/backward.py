"""`task.backward`: the score of which gradients are computed without training. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hookrun.spec.experiment import MOST, Section


class BackwardPass(Section):
    """The score whose gradients are computed: a sum over samples, so each row of a gradient depends on one sample.

    score: label: the logit of the sample's label; top: the logit of the predicted class; class: the logit of `class`;
           output: the sum of the sample's outputs; loss: `train.loss` of the sample, as in a batch of one
    class: the number of the class, for `score: class`
    """

    score: Literal["label", "top", "class", "output", "loss"]
    class_: int | None = Field(default=None, alias="class", strict=True, ge=0, le=MOST)

    @model_validator(mode="after")
    def _class_goes_with_it(self) -> BackwardPass:
        if (self.score == "class") != (self.class_ is not None):
            raise ValueError("`class: NUMBER` goes with `score: class`, and only with it")
        return self

    def __str__(self) -> str:
        return {
            "label": "the logit of the label",
            "top": "the logit of the predicted class",
            "class": f"the logit of class {self.class_}",
            "output": "the output",
            "loss": "the loss",
        }[self.score]
