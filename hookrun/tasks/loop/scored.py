"""The rows of scores from which metrics are computed: one for each sample, or for each chosen token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hookrun.containers import children, rebuild, tensors
from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.tasks.loop.losses import main_tensor

MOST_NUMBERS = 2**23
"""How many scores are converted to float32 at once, so that a large output is never copied as a whole."""


@dataclass(frozen=True)
class ScorePart:
    """Some of the rows, in float32 or float64.

    scores:  [n, classes], not normalized
    targets: [n] int64; IGNORED where nothing is to be predicted
    answers, wrong: [n] int64, the right and the wrong answer of each row's sample; None: not known
    others:  [n, classes], the scores to compare with; None: no comparison
    """

    scores: Tensor
    targets: Tensor
    answers: Tensor | None = None
    wrong: Tensor | None = None
    others: Tensor | None = None

    @cached_property
    def log_probabilities(self) -> Tensor:
        """[n, classes]: the log-softmax of the scores."""
        return F.log_softmax(self.scores, dim=1)

    @cached_property
    def log_others(self) -> Tensor | None:
        """[n, classes]: the log-softmax of the scores to compare with; None: no comparison."""
        return None if self.others is None else F.log_softmax(self.others, dim=1)

    def at(self, values: Tensor, classes: Tensor) -> Tensor:
        """[n]: from values [n, classes], the value of one class in each row."""
        return values.gather(1, classes[:, None].long()).squeeze(1)


@dataclass(frozen=True)
class Scored:
    """N chosen rows of scores [R, classes] on the model's device, with their samples and targets.

    scores:    [R, classes] in the model's dtype, all rows
    rows:      [N], the indices of the chosen rows
    samples:   [N], the index of each row's sample in the batch
    targets:   [N]; IGNORED where nothing is to be predicted
    positions: [N], counted from each sample's first real token; None: samples are not sequences of tokens
    answers, wrong, others: see `ScorePart`; `others` [R, classes] has all rows
    """

    scores: Tensor
    rows: Tensor
    samples: Tensor
    targets: Tensor
    positions: Tensor | None = None
    answers: Tensor | None = None
    wrong: Tensor | None = None
    others: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def with_targets(self) -> Scored:
        """The rows that have a target."""
        kept = self.targets != IGNORED
        return self if bool(kept.all()) else self._only(kept)

    def _only(self, kept: Tensor) -> Scored:
        def of(each: Tensor | None) -> Tensor | None:
            return None if each is None else each[kept]

        return replace(
            self,
            rows=self.rows[kept],
            samples=self.samples[kept],
            targets=self.targets[kept],
            positions=of(self.positions),
            answers=of(self.answers),
            wrong=of(self.wrong),
        )

    def with_answers(self, answers: Tensor, wrong: Tensor) -> Scored:
        """The rows with the right and the wrong answer [B] of each sample."""
        return replace(self, answers=answers.to(self.samples.device)[self.samples], wrong=wrong[self.samples])

    def compared_with(self, others: Tensor) -> Scored:
        """The rows with scores of the same shape to compare them with. Raises HookrunError for another shape."""
        there = others.flatten(0, -2)
        if there.shape != self.scores.shape:
            shapes = f"shape {list(self.scores.shape)}, and those to compare with {list(there.shape)}"
            raise HookrunError(f"task.metrics: 'kl': the scores have {shapes} (rows, classes)")
        return replace(self, others=there.to(self.scores.device))

    def whole(self) -> Tensor:
        """[N, classes]: a copy of the chosen rows, in the model's dtype."""
        return self.scores[self.rows]

    def parts(self) -> Iterator[ScorePart]:
        """The chosen rows in parts of at most `MOST_NUMBERS` scores."""
        step = max(1, MOST_NUMBERS // max(1, self.scores.shape[1]))
        for start in range(0, len(self), step):
            chosen = slice(start, start + step)
            rows = self.rows[chosen]
            yield ScorePart(
                _computable(self.scores[rows]),
                self.targets[chosen],
                None if self.answers is None else self.answers[chosen],
                None if self.wrong is None else self.wrong[chosen],
                None if self.others is None else _computable(self.others[rows]),
            )


def _computable(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def token_scores(output: Any) -> Tensor | None:
    """A model's scores for the next tokens, detached: its output, the output's `logits`, or its first tensor.

    None if the output has named members without `logits`: another tensor may have the same shape by chance.
    """
    members = dict(children(output))
    found = output if isinstance(output, Tensor) else members.get("logits")
    if found is None and all(isinstance(key, int) for key in members):
        found = next((each for each in members.values() if isinstance(each, Tensor)), None)
    return found.detach() if isinstance(found, Tensor) else None


def class_scores(output: Any) -> Tensor | None:
    """A model's scores [batch, classes], detached; None if its output does not have this form."""
    if next(tensors(output), None) is None:
        return None
    scores = main_tensor(output).detach()
    return scores if scores.dim() == 2 and scores.is_floating_point() else None


def one_sample(output: Any, target: Tensor, number: int) -> tuple[Any, Tensor]:
    """Output and target of sample `number` of a batch, as a batch of one; half precision becomes float32."""
    samples = len(target)

    def row(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != samples:
            return leaf
        own = leaf[number : number + 1].detach()
        return _computable(own) if own.is_floating_point() else own

    return rebuild(output, row), target[number : number + 1]


def of_labels(output: Any, target: Tensor) -> Scored | None:
    """A row for each sample, from scores [batch, classes] and labels [batch]; None if they do not have this form."""
    scores, is_label = class_scores(output), target.dim() == 1 and not target.is_floating_point()
    if scores is None or not is_label or len(target) != len(scores):
        return None
    rows = torch.arange(len(scores), device=scores.device)
    return Scored(scores, rows, rows, target)


def without_labels(output: Any) -> Scored | None:
    """A row for each sample, without targets; None if the output is not scores [batch, classes]."""
    if (scores := class_scores(output)) is None:
        return None
    rows = torch.arange(len(scores), device=scores.device)
    return Scored(scores, rows, rows, torch.full_like(rows, IGNORED))


def of_tokens(output: Any, target: Tensor, chosen: Tensor, positions: Tensor) -> Scored | None:
    """A row for each chosen token, from scores [batch, length, classes]; None if the output has no such scores.

    target:    [batch, length], the next token of each; IGNORED where nothing is to be predicted
    chosen:    [batch, length] bool
    positions: [batch, length], counted from each sample's first real token
    """
    scores = token_scores(output)
    if scores is None or scores.dim() != 3 or scores.shape[:2] != target.shape:
        return None
    samples, columns = (each.to(scores.device) for each in chosen.nonzero(as_tuple=True))
    rows = samples * target.shape[1] + columns
    places = positions.to(scores.device)[samples, columns]
    return Scored(scores.flatten(0, 1), rows, samples, target[samples, columns], places)
