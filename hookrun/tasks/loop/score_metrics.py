"""Metrics that are computed row by row: a value for each sample, or for each token that is to be predicted.

Each function takes a `ScorePart` of n rows and returns [n].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.tasks.loop.scored import ScorePart

OfRows = Callable[[ScorePart], Tensor]


def surprisal(part: ScorePart) -> Tensor:
    """The negative logarithm of the target's probability, in nats; `perplexity` is exp of its mean."""
    return -part.at(part.log_probabilities, part.targets)


def probability(part: ScorePart) -> Tensor:
    """The target's probability: softmax over all classes or tokens."""
    return part.at(part.log_probabilities, part.targets).exp()


def rank(part: ScorePart) -> Tensor:
    """The target's rank by its score: 1 is the most probable; equal scores share the better rank; NaN gives NaN."""
    own = part.at(part.scores, part.targets)
    place = 1 + (part.scores > own[:, None]).sum(1)
    return place.to(part.scores.dtype).masked_fill(part.scores.isnan().any(1), torch.nan)


def logit_difference(part: ScorePart) -> Tensor:
    """The score of the right answer minus that of the wrong answer."""
    if part.answers is None or part.wrong is None:
        raise HookrunError(
            "task.metrics: 'logit_difference' needs a right and a wrong answer for each sample"
        )
    return part.at(part.scores, part.answers) - part.at(part.scores, part.wrong)


def kl(part: ScorePart) -> Tensor:
    """KL(P || Q) in nats: P the probabilities to compare with, Q those of the model under its hooks."""
    if part.log_others is None:
        raise HookrunError("task.metrics: 'kl' has nothing to compare with")
    ours, theirs = part.log_probabilities, part.log_others
    terms = theirs.exp() * (theirs - ours)
    # A class with probability 0 in P adds 0, whatever its probability in Q.
    terms = torch.where(theirs == -torch.inf, 0.0, terms)
    dtype = terms.dtype if terms.device.type == "mps" else torch.float64  # mps has no float64
    return terms.sum(1, dtype=dtype).clamp(min=0)  # rounding may give a value below 0; NaN stays NaN


def is_right(part: ScorePart) -> Tensor:
    """1 if the target has the largest score, else 0."""
    return (part.scores.argmax(1) == part.targets).to(part.scores.dtype)


def is_among(most: int) -> OfRows:
    """A metric: 1 if the target is among the `most` largest scores, else 0."""

    def is_among(part: ScorePart) -> Tensor:
        largest = part.scores.topk(min(most, part.scores.shape[1]), dim=1).indices
        return (largest == part.targets[:, None]).any(1).to(part.scores.dtype)

    return is_among
