"""Computes logits from the parts of a batch: the most probable tokens, the answer's logit, the KL to the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookrun.errors import HookrunError
from hookrun.tasks.loop.lens.norms import FrozenNorm, frozen, rounding, step, wide
from hookrun.tasks.loop.lens.observing import ObservedForward
from hookrun.tasks.loop.lens.parts import BIAS, HOOKS, StreamPart, contributions, residual
from hookrun.tasks.loop.lens.places import Places

AT_ONCE = 2**24
"""The number of logits that are computed at once: positions x vocabulary."""

WHOLE_MODEL = f"(root) {HOOKS}"
"""The name of the part that is the change of the model's logits by hooks on the model itself."""

_SLACK = 32
_FACTORS = {"logit_scale": 1.0, "logits_scaling": -1.0, "lm_head_multiplier": 1.0}
"""Keys of model configs that scale the logits -> the power of the factor."""
_CAP = "final_logit_softcapping"


@dataclass(frozen=True)
class ScoredPositions:
    """The N positions that are read.

    rows:   (sequence, column), each [N] on the model's device
    answer: [N] int64, the right token; -100 if it is not known
    wrong:  [N] int64, the wrong token to compare with; -100 if it is not known
    """

    rows: tuple[Tensor, Tensor]
    answer: Tensor
    wrong: Tensor


@dataclass
class PartRead:
    """What was computed for one part at N positions, on the CPU.

    name, layer, head:          as in `StreamPart`
    top, probabilities:         [N, k], the tokens with the largest logits, and their probabilities
    answer_logit, wrong_logit:  [N]
    right:                      [N] bool, whether the most probable token is the answer
    kl:                         [N], KL(output || part) in nats; None: not compared with the output
    """

    name: str
    layer: int | None
    head: int | None
    top: Tensor
    probabilities: Tensor
    answer_logit: Tensor
    wrong_logit: Tensor
    right: Tensor
    kl: Tensor | None = None


@dataclass
class Lens:
    """Computes the readings of observed forwards.

    parts:  residual, layers or heads
    frozen: the final norm keeps the scale that it has on the final stream of each position
    top:    how many tokens are recorded for each part
    """

    model: nn.Module
    places: Places
    parts: str
    frozen: bool
    top: int

    def read(self, seen: ObservedForward, output: Tensor, asked: ScoredPositions) -> Iterator[PartRead]:
        """The reading of each part, in the order of the model. Raises HookrunError if contributions do not add up."""
        self._check_scores(seen, asked)
        if self.parts == "residual":
            score = self._by_frozen(seen) if self.frozen else self._by_norm(seen)
            for part in residual(self.model, self.places, seen):
                yield self._read(part, score, asked, output)
        elif not self.frozen:
            score = self._by_norm(seen)
            for part in contributions(self.model, self.places, seen, by_head=self.parts == "heads"):
                yield self._read(part, score, asked)
        else:
            yield from self._summing(seen, output, asked)

    def read_output(self, output: Tensor, asked: ScoredPositions) -> PartRead:
        """The reading of the model's own output, after all hooks."""
        rows = torch.zeros(len(asked.answer), 0)
        return self._read(
            StreamPart("", None, None, rows), lambda rows, at: _at(output, asked.rows, at=at), asked
        )

    # ---- contributions that add up to the logits ---------------------------------------------------------------

    def _summing(self, seen: ObservedForward, output: Tensor, asked: ScoredPositions) -> Iterator[PartRead]:
        assert seen.scores is not None and seen.scores_after is not None and seen.logits is not None
        linear = self._frozen_norm(seen)
        columns = _columns(seen, asked)
        total, magnitude = (
            torch.zeros(columns.shape, dtype=wide(self._weight[:1]).dtype, device=columns.device)
            for _ in "ab"
        )
        weights = wide(self._weight[columns])
        entering: StreamPart | None = None  # the change of the unembedding's input by hooks
        for part in contributions(self.model, self.places, seen, by_head=self.parts == "heads"):
            rows = part.rows if part.after else linear(part.rows)
            made = torch.einsum("nd,nkd->nk", rows, weights)
            total += made
            magnitude += torch.einsum("nd,nkd->nk", rows.abs(), weights.abs())
            if part.after:
                entering = part
            else:
                yield self._read(part, lambda rows, at: self._linear(rows), asked, rows=rows)
        constant = self._constant(linear)
        total = (total + constant[columns]) * self._factor
        self._check_total(
            seen, asked, columns, total, (magnitude + constant[columns].abs()) * abs(self._factor)
        )
        yield from self._at_unembedding(entering, (seen.scores, seen.scores_after), asked)
        none = torch.zeros(len(columns), 0, device=columns.device)
        part = StreamPart(BIAS, None, None, none)
        yield self._read(part, lambda rows, at: (constant * self._factor).expand(len(rows), -1), asked)
        if self._differ(seen.logits, output, asked):
            if self._cap is not None:
                raise HookrunError(
                    "a hook changes the model's output after the soft cap on the logits, but contributions add up "
                    f"only before the cap; hook {self.places.unembed} instead, or use task.parts=residual"
                )
            change = _change((seen.logits, output), asked)
            yield self._read(StreamPart(WHOLE_MODEL, None, None, none), lambda rows, at: change(at), asked)

    def _at_unembedding(
        self, entering: StreamPart | None, scores: tuple[Tensor, Tensor], asked: ScoredPositions
    ) -> Iterator[PartRead]:
        """One part for the changes that hooks make to the input and to the output of the unembedding; none without.

        entering: the change of the input
        scores:   the output before and after hooks
        """
        change = _change(scores, asked) if self._differ(*scores, asked) else None
        if entering is None and change is None:
            return
        name = f"{self.places.unembed} {HOOKS}"
        rows = torch.zeros(len(asked.answer), 0) if entering is None else entering.rows

        def score(rows: Tensor, at: slice) -> Tensor:
            made = 0.0 if entering is None else self._linear(rows)
            added = 0.0 if change is None else change(at) * self._factor
            return torch.as_tensor(made + added)

        yield self._read(StreamPart(name, None, None, rows), score, asked)

    def _differ(self, before: Tensor, after: Tensor, asked: ScoredPositions) -> bool:
        """Whether hooks changed the logits [batch, length, vocabulary] at the positions."""
        if before is after:
            return False
        change, size = _change((before, after), asked), self._at_once
        return any(bool(change(slice(n, n + size)).any()) for n in range(0, len(asked.answer), size))

    def _linear(self, rows: Tensor) -> Tensor:
        return rows @ wide(self._weight).T.to(rows.dtype) * self._factor

    def _constant(self, linear: FrozenNorm) -> Tensor:
        """[V]: the contribution of the biases of the final norm and of the unembedding to the logits."""
        weight = wide(self._weight)
        found = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
        if linear.bias is not None:
            found = found + weight @ linear.bias.to(weight.dtype)
        bias = getattr(self._unembed, "bias", None)
        return found if bias is None else found + wide(bias.detach())

    def _frozen_norm(self, seen: ObservedForward) -> FrozenNorm:
        norm = seen.norm
        assert norm is not None and norm.entered is not None and norm.before is not None
        return frozen(self.places.final_norm, norm.module, norm.entered, norm.before)

    def _check_total(
        self, seen: ObservedForward, asked: ScoredPositions, columns: Tensor, total: Tensor, magnitude: Tensor
    ) -> None:
        assert seen.scores is not None and seen.blocks[-1].left is not None
        expected = wide(_at(seen.scores, asked.rows, columns)) * self._factor
        eps = step(seen.scores.dtype, seen.blocks[-1].left.dtype, self._weight.dtype)
        off = (total - expected).abs()
        if bool((off > _SLACK * eps * magnitude).any()):
            raise HookrunError(
                f"the contributions do not add up to the output of {self.places.unembed}: they differ by "
                f"{float(off.max()):.3g}; use task.parts=residual task.norm=applied"
            )

    # ---- logits of whole streams -------------------------------------------------------------------------------

    def _by_norm(self, seen: ObservedForward) -> Callable[[Tensor, slice], Tensor]:
        """(rows [n, D], slice) -> logits, by the model's own norm and unembedding without their hooks."""
        norm: Any = self.model.get_submodule(self.places.final_norm)
        dtype = seen.blocks[-1].entered.dtype

        def score(rows: Tensor, at: slice) -> Tensor:
            return self._finished(self._unembed.forward(norm.forward(rows.to(dtype))))

        return score

    def _by_frozen(self, seen: ObservedForward) -> Callable[[Tensor, slice], Tensor]:
        linear = self._frozen_norm(seen)
        constant = self._constant(linear)

        def score(rows: Tensor, at: slice) -> Tensor:
            part = FrozenNorm(linear.centers, linear.scale[at], linear.weight, None)
            return self._capped((part(wide(rows)) @ wide(self._weight).T + constant) * self._factor)

        return score

    def _read(
        self,
        part: StreamPart,
        score: Callable[[Tensor, slice], Tensor],
        asked: ScoredPositions,
        output: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> PartRead:
        """The reading of a part, computed in blocks of `_at_once` positions.

        score:  (rows [n, D], their slice of the positions) -> logits [n, V]
        output: the model's logits, with which the part's distribution is compared; None: not compared
        rows:   the rows for `score`; None: those of the part
        """
        rows = part.rows if rows is None else rows
        size = self._at_once
        found = list[tuple[Tensor, ...]]()
        for start in range(0, len(rows), size):
            at = slice(start, start + size)
            scores = wide(score(rows[at], at))
            logs = F.log_softmax(scores, dim=-1)
            best = logs.topk(min(max(self.top, 1), logs.shape[-1]), dim=-1)
            answer, wrong = asked.answer[at].clamp_min(0), asked.wrong[at].clamp_min(0)
            kl = torch.zeros(len(scores), device=scores.device, dtype=scores.dtype)
            if output is not None:
                expected = F.log_softmax(wide(_at(output, asked.rows, at=at)), dim=-1)
                kl = F.kl_div(logs, expected, reduction="none", log_target=True).sum(-1).clamp_min(0)
            found.append(
                (
                    best.indices, best.values.exp(), scores.gather(1, answer[:, None])[:, 0],
                    scores.gather(1, wrong[:, None])[:, 0], best.indices[:, 0] == answer, kl,
                )
            )  # fmt: skip
        top, probabilities, answers, wrongs, right, kl = (
            torch.cat(each).cpu() for each in zip(*found, strict=True)
        )
        named = PartRead(
            part.name,
            part.layer,
            part.head,
            top[:, : self.top],
            probabilities[:, : self.top],
            answers,
            wrongs,
            right,
        )
        named.kl = kl if output is not None else None
        return named

    # ---- the unembedding ---------------------------------------------------------------------------------------

    @cached_property
    def _unembed(self) -> Any:
        return self.model.get_submodule(self.places.unembed)

    @cached_property
    def _weight(self) -> Tensor:
        weight: Tensor = self._unembed.weight.detach()
        return weight

    @cached_property
    def _at_once(self) -> int:
        """The number of positions whose logits are computed at once."""
        return max(1, AT_ONCE // len(self._weight))

    @cached_property
    def _factor(self) -> float:
        """The factor by which the model multiplies the output of its unembedding."""
        config = text_config(self.model)
        factor = 1.0
        for name, power in _FACTORS.items():
            value = getattr(config, name, None)
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                factor *= float(value) ** power
        return factor

    @cached_property
    def _cap(self) -> float | None:
        return cap_of(self.model)

    def _finished(self, scores: Tensor) -> Tensor:
        return self._capped(scores * self._factor)

    def _capped(self, scores: Tensor) -> Tensor:
        return scores if self._cap is None else torch.tanh(scores / self._cap) * self._cap

    def _check_scores(self, seen: ObservedForward, asked: ScoredPositions) -> None:
        """Check at the first positions that the lens computes the model's logits from the unembedding's output."""
        scores, logits = seen.scores_after, seen.logits
        assert scores is not None and logits is not None
        at = slice(0, self._at_once)
        made = wide(self._finished(_at(scores, asked.rows, at=at)))
        expected = wide(_at(logits, asked.rows, at=at)) if logits.shape == scores.shape else None
        if expected is None or bool(((made - expected).abs() > rounding(logits.dtype, expected)).any()):
            raise HookrunError(
                f"the model changes the output of {self.places.unembed} before it returns it, in a way that the lens "
                "does not know: name the module that computes the model's output with task.unembed"
            )


def _columns(seen: ObservedForward, asked: ScoredPositions) -> Tensor:
    """[N, 3]: the tokens at which sums are checked: the right one, the wrong one, the most probable one."""
    assert seen.scores is not None
    size = max(1, AT_ONCE // seen.scores.shape[-1])
    best = [
        _at(seen.scores, asked.rows, at=slice(start, start + size)).argmax(-1)
        for start in range(0, len(asked.answer), size)
    ]
    return torch.stack([asked.answer.clamp_min(0), asked.wrong.clamp_min(0), torch.cat(best)], dim=1)


def _change(scores: tuple[Tensor, Tensor], asked: ScoredPositions) -> Callable[[slice], Tensor]:
    """slice of the positions -> the change of the logits there by hooks.

    scores: the logits [batch, length, V] before and after the hooks
    """
    before, after = scores
    return lambda at: wide(_at(after, asked.rows, at=at)) - wide(_at(before, asked.rows, at=at))


def _at(
    tensor: Tensor, rows: tuple[Tensor, Tensor], columns: Tensor | None = None, at: slice = slice(None)
) -> Tensor:
    """[N, V], or [N, k] if columns [N, k] are given: the tensor [batch, length, V] at the positions."""
    sequences, places = rows[0][at], rows[1][at]
    if columns is not None:
        return tensor[sequences[:, None], places[:, None], columns]
    return tensor[sequences, places]


def text_config(model: nn.Module) -> Any:
    """The model's config; for a model of images and text, the config of its text part; None if there is none."""
    config: Any = getattr(model, "config", None)
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def cap_of(model: nn.Module) -> float | None:
    """The soft cap on the logits, as in Gemma 2; None: there is none."""
    value = getattr(text_config(model), _CAP, None)
    return float(value) if isinstance(value, int | float) and value else None
