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
from hookrun.tasks.lens.contributions import (
    BIAS,
    ObservedForward,
    StreamPart,
    Structure,
    contributions,
    residual,
)
from hookrun.tasks.lens.norms import FrozenNorm, frozen, rounding, wide
from hookrun.tasks.lens.places import Places

AT_ONCE = 2**24
"""The number of logits that are computed at once: positions x vocabulary."""

REST = "(rest)"
"""The name of the part that is the logits minus all other parts: changes by hooks outside of the other parts."""

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
    edited: hooks change the logits after the unembedding, at a module around it
    """

    model: nn.Module
    places: Places
    parts: str
    frozen: bool
    top: int
    edited: bool = False

    def read(
        self, seen: ObservedForward, output: Tensor, asked: ScoredPositions, structure: Structure | None
    ) -> Iterator[PartRead]:
        """The reading of each part, in the order of the model.

        structure: which modules add to the stream; not needed for the parts `residual`
        """
        self._check_scores(seen, output, asked)
        score = self._by_frozen(seen) if self.frozen else self._by_norm(seen)
        if structure is None:
            for part in residual(self.model, self.places, seen):
                yield self._read(part, score, asked, output)
        elif not self.frozen:
            for part in contributions(self.model, self.places, structure, seen):
                yield self._read(part, score, asked)
        else:
            yield from self._summing(seen, output, asked, structure)

    def read_output(self, output: Tensor, asked: ScoredPositions) -> PartRead:
        """The reading of the model's own output, after all hooks."""
        rows = torch.zeros(len(asked.answer), 0)
        return self._read(
            StreamPart("", None, None, rows), lambda rows, at: _at(output, asked.rows, at=at), asked
        )

    def _summing(
        self, seen: ObservedForward, output: Tensor, asked: ScoredPositions, structure: Structure
    ) -> Iterator[PartRead]:
        """Contributions, and the part `(rest)` if they do not add up to the logits (before a soft cap)."""
        linear = self._frozen_norm(seen)
        total = torch.zeros_like(wide(seen.inputs[self.places.final_norm]))
        for part in contributions(self.model, self.places, structure, seen):
            rows = linear(part.rows)
            total += rows
            yield self._read(part, lambda rows, at: self._linear(rows), asked, rows=rows)
        constant = self._constant(linear)
        assert seen.scores is not None
        logits, factor = (output, 1.0) if self._cap is None else (seen.scores, self._factor)

        def rest(rows: Tensor, at: slice) -> Tensor:
            return (
                wide(_at(logits, asked.rows, at=at)) * factor - self._linear(rows) - constant * self._factor
            )

        if self._is_more_than_rounding(rest, total, seen, asked):
            yield self._read(StreamPart(REST, None, None, total), rest, asked)
        none = torch.zeros(len(total), 0, device=total.device)
        part = StreamPart(BIAS, None, None, none)
        yield self._read(part, lambda rows, at: (constant * self._factor).expand(len(rows), -1), asked)

    def _is_more_than_rounding(
        self,
        rest: Callable[[Tensor, slice], Tensor],
        total: Tensor,
        seen: ObservedForward,
        asked: ScoredPositions,
    ) -> bool:
        scores = seen.scores
        assert scores is not None
        for start in range(0, len(total), self._at_once):
            at = slice(start, start + self._at_once)
            expected = wide(_at(scores, asked.rows, at=at)) * self._factor
            if bool((rest(total[at], at).abs() > rounding(scores.dtype, expected)).any()):
                return True
        return False

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
        """The final norm on the final stream, without the hooks on its output."""
        path = self.places.final_norm
        norm: Any = self.model.get_submodule(path)
        return frozen(path, norm, seen.inputs[path], norm.forward(seen.inputs[path]))

    # ---- logits of whole streams -------------------------------------------------------------------------------

    def _by_norm(self, seen: ObservedForward) -> Callable[[Tensor, slice], Tensor]:
        """(rows [n, D], slice) -> logits, by the model's own norm and unembedding without their hooks."""
        norm: Any = self.model.get_submodule(self.places.final_norm)
        dtype = seen.outputs[self.places.blocks[-1]].dtype

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

    def _check_scores(self, seen: ObservedForward, output: Tensor, asked: ScoredPositions) -> None:
        """Check at the first positions that the lens computes the model's logits from the unembedding's output."""
        if self.edited:
            if self.frozen and self.parts != "residual" and self._cap is not None:
                raise HookrunError(
                    "a hook changes the model's output after the soft cap on the logits, but contributions add up "
                    f"only before the cap; hook {self.places.unembed} instead, or use task.parts=residual"
                )
            return
        assert seen.scores is not None
        at = slice(0, self._at_once)
        made = wide(self._finished(_at(seen.scores, asked.rows, at=at)))
        expected = wide(_at(output, asked.rows, at=at)) if output.shape == seen.scores.shape else None
        if expected is None or bool(((made - expected).abs() > rounding(output.dtype, expected)).any()):
            raise HookrunError(
                f"the model changes the output of {self.places.unembed} before it returns it, in a way that the lens "
                "does not know: name the module that computes the model's output with task.unembed"
            )


def _at(tensor: Tensor, rows: tuple[Tensor, Tensor], at: slice) -> Tensor:
    """[N, V]: the tensor [batch, length, V] at the positions."""
    return tensor[rows[0][at], rows[1][at]]


def text_config(model: nn.Module) -> Any:
    """The model's config; for a model of images and text, the config of its text part; None if there is none."""
    config: Any = getattr(model, "config", None)
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def cap_of(model: nn.Module) -> float | None:
    """The soft cap on the logits, as in Gemma 2; None: there is none."""
    value = getattr(text_config(model), _CAP, None)
    return float(value) if isinstance(value, int | float) and value else None
