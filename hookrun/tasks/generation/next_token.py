"""Chooses each next token of a generation: the most probable token, or a random draw.

This choice is used in every loop, also in transformers' `generate`. A draw depends only on the seed, the sample and the
number of the new token: it is the same in every batch, on every device, with and without hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.runtime.rng import derived_seed
from hookrun.spec.task import Sampling
from hookrun.tasks.metrics.metrics import kl
from hookrun.tasks.metrics.rows import RowPart


class Continuation(NamedTuple):
    """The continuation of one prompt.

    ids:     the chosen tokens, including the end token
    is_over: it has its end token
    first:   [V], the model's scores for the first token
    """

    ids: list[int]
    is_over: bool
    first: Tensor


class NextTokens:
    """Chooses the next token of each sequence of a batch, and records the chosen tokens.

    sampling: how to draw; None: choose the most probable token
    seeds:    the seed of each sequence's draws
    stop:     tokens that end a sequence
    most:     the largest number of new tokens of a sequence
    begins:   the first token of every answer, which some models prescribe; None: it is chosen too
    pad:      the token after the end of a sequence
    tokens:   the chosen tokens of each sequence, including its end token
    first:    [B, V], the model's scores for the first new token; None before the first choice
    """

    def __init__(
        self,
        sampling: Sampling | None,
        seeds: Sequence[int],
        *,
        stop: Collection[int],
        most: int,
        begins: int | None = None,
        pad: int = 0,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in seeds]
        self.first: Tensor | None = None
        self._sampling, self._seeds = sampling, seeds
        self._stop, self._most, self._begins, self._pad = frozenset(stop), most, begins, pad
        self._open = [True] * len(seeds)
        self._step = 0

    @property
    def is_over(self) -> bool:
        """Whether every sequence has its end token or its largest number of tokens."""
        return self._step >= self._most or not any(self._open)

    def continuation(self, row: int) -> Continuation:
        """What was chosen for a sequence. It has at least one token."""
        assert self.first is not None
        return Continuation(self.tokens[row], not self._open[row], self.first[row])

    def choose(self, logits: Tensor) -> Tensor:
        """[B] int64 on the CPU: the next token of each sequence, from the model's scores [B, V].

        Raises HookrunError if a sequence has no finite score.
        """
        if self.is_over:  # a loop on an accelerator may call once more before it stops
            return torch.full((len(self.tokens),), self._pad)
        if self.first is None:
            self.first = logits.clone()
        chosen = self._chosen(logits).tolist()
        for row, token in enumerate(chosen):
            if not self._open[row]:
                chosen[row] = self._pad
                continue
            self.tokens[row].append(token)
            self._open[row] = token not in self._stop
        self._step += 1
        return torch.tensor(chosen)

    def _chosen(self, logits: Tensor) -> Tensor:
        best = logits.max(-1)
        for row, finite in enumerate(best.values.isfinite().tolist()):
            if self._open[row] and not finite:
                raise HookrunError(
                    f"sequence {row} of the batch has no finite score for its new token {self._step}: "
                    "the model or its hooks returned NaN or infinity; a `check` hook on its layers finds where"
                )
        if self._begins is not None and self._step == 0:
            return torch.full_like(best.indices, self._begins)
        if self._sampling is None:
            return best.indices
        scores = restricted(logits, self._sampling)
        return (scores + self._noise(scores)).argmax(-1)

    def _noise(self, scores: Tensor) -> Tensor:
        """Gumbel noise [B, V]: the argmax of scores + noise is a draw from the softmax of the scores.

        The noise of a token does not depend on the scores, so small changes by hooks change few draws.
        """
        noise = torch.ones(scores.shape)
        generator = torch.Generator()
        for row, seed in enumerate(self._seeds):
            if self._open[row]:
                noise[row].exponential_(generator=generator.manual_seed(derived_seed(seed, self._step)))
        return noise.log_().neg_().to(scores)


def restricted(logits: Tensor, sampling: Sampling) -> Tensor:
    """The scores [B, V] after temperature, top_k and top_p; -infinity for tokens that cannot be drawn."""
    scores = (logits - logits.max(-1, keepdim=True).values) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, places = scores.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        beyond = (before >= sampling.top_p).index_fill(-1, torch.tensor([0], device=scores.device), False)
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, places, beyond), -torch.inf)
    return scores


def most_probable(scores: Tensor, count: int) -> list[tuple[int, float]]:
    """The most probable tokens as (token, probability), from scores [V]."""
    top = _precise(scores).softmax(-1).topk(min(count, len(scores)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def divergence(of: Tensor, other: Tensor) -> float:
    """KL(P || Q) in nats: P the softmax of the scores `of` [V], Q that of `other`."""
    p, q = (_precise(scores)[None] for scores in (of, other))
    values = kl(RowPart(q, p.new_zeros(1, dtype=torch.int64), others=p))
    assert values is not None
    return float(values)


def _precise(scores: Tensor) -> Tensor:
    """In float64 on the CPU: sums over a vocabulary are long, and some accelerators have no float64."""
    return scores.detach().to("cpu").double()
