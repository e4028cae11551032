"""Computes logits from the parts of a batch: the most probable tokens, the answer's logit, the KL to the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookrun.errors import HookrunError
from hookrun.tasks.lens.contributions import (
    BIAS,
    FrozenNorm,
    ObservedForward,
    StreamPart,
    Structure,
    contributions,
    frozen,
    residual,
    rounding,
)
from hookrun.tasks.lens.places import Places, text_config
from hookrun.values.tensors import computable

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


PartKey = tuple[str, int | None, int | None]
"""The name, the layer and the head of a part."""


@dataclass
class PartRead:
    """What was computed for one part at N positions, on the CPU.

    key:                        its name, layer and head, as in `StreamPart`
    top, probabilities:         [N, k], the tokens with the largest logits, and their probabilities
    answer_logit, wrong_logit:  [N]
    right:                      [N] bool, whether the most probable token is the answer
    kl:                         [N], KL(output || part) in nats; None: not compared with the output
    """

    key: PartKey
    top: Tensor
    probabilities: Tensor
    answer_logit: Tensor
    wrong_logit: Tensor
    right: Tensor
    kl: Tensor | None = None


Score = Callable[[Tensor, slice], Tensor]
"""(rows [n, D], their slice of the positions) -> logits [n, V]"""


class Lens:
    """Computes the readings of observed forwards.

    places: the module paths to read
    parts:  residual, layers or heads
    frozen: the final norm keeps the scale that it has on the final stream of each position
    top:    how many tokens are recorded for each part
    edited: hooks change the logits after the unembedding, at a module around it
    """

    def __init__(
        self, model: nn.Module, places: Places, parts: str, frozen: bool, top: int, edited: bool = False
    ) -> None:
        self.parts = parts
        self.places = places
        self._model, self._frozen, self._top, self._edited = model, frozen, top, edited
        self._unembed: Any = model.get_submodule(places.unembed)
        weight = self._unembed.weight
        assert isinstance(weight, Tensor)
        self._weight = weight.detach()
        self._at_once = max(1, AT_ONCE // len(self._weight))
        self._cap = cap_of(model)
        self._factor = 1.0  # by which the model multiplies the output of its unembedding
        for name, power in _FACTORS.items():
            value = getattr(text_config(model), name, None)
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                self._factor *= float(value) ** power

    def read(
        self, seen: ObservedForward, output: Tensor, asked: ScoredPositions, structure: Structure | None
    ) -> Iterator[PartRead]:
        """The reading of each part, in the order of the model.

        structure: which modules add to the stream; not needed for the parts `residual`
        """
        self._check_scores(seen, output, asked)
        if structure is not None and self._frozen:
            yield from self._summing(seen, output, asked, structure)
            return
        score: Score = self._by_frozen(seen) if self._frozen else self._by_norm(seen)
        if structure is None:
            for part in residual(self._model, self.places, seen):
                yield self._read(part, score, asked, output)
        else:
            for part in contributions(self._model, self.places, structure, seen):
                yield self._read(part, score, asked)

    def read_output(self, output: Tensor, asked: ScoredPositions) -> PartRead:
        """The reading of the model's own output, after all hooks."""
        part = StreamPart("", None, None, torch.zeros(len(asked.answer), 0))
        return self._read(part, lambda rows, at: _at(output, asked, at), asked)

    def _summing(
        self, seen: ObservedForward, output: Tensor, asked: ScoredPositions, structure: Structure
    ) -> Iterator[PartRead]:
        """Contributions, and the part `(rest)` if they do not add up to the logits (before a soft cap)."""
        norm, constant = self._final_norm(seen)
        scores, factor = seen.scores, self._factor
        assert scores is not None
        total = torch.zeros_like(computable(seen.inputs[self.places.final_norm]))

        def linear(rows: Tensor, at: slice) -> Tensor:
            return rows @ computable(self._weight).T.to(rows.dtype) * factor

        def rest(rows: Tensor, at: slice) -> Tensor:
            logits = _at(output, asked, at) if self._cap is None else _at(scores, asked, at) * factor
            return logits - linear(rows, at) - constant * factor

        for part in contributions(self._model, self.places, structure, seen):
            rows = norm(part.rows)
            total += rows
            yield self._read(replace(part, rows=rows), linear, asked)
        if any(
            bool((rest(total[at], at).abs() > rounding(scores.dtype, _at(scores, asked, at) * factor)).any())
            for at in self._blocks(len(total))
        ):
            yield self._read(StreamPart(REST, None, None, total), rest, asked)
        nothing = StreamPart(BIAS, None, None, total[:, :0])
        yield self._read(nothing, lambda rows, at: (constant * factor).expand(len(rows), -1), asked)

    def _final_norm(self, seen: ObservedForward) -> tuple[FrozenNorm, Tensor]:
        """The final norm on the final stream, without the hooks on its output.

        And [V]: the contribution of the biases of the norm and of the unembedding to the logits.
        """
        path = self.places.final_norm
        module: Any = self._model.get_submodule(path)
        norm = frozen(path, module, seen.inputs[path], module.forward(seen.inputs[path]))
        weight, bias = computable(self._weight), getattr(self._unembed, "bias", None)
        constant = weight.new_zeros(len(weight)) if bias is None else computable(bias.detach())
        return norm, constant if norm.bias is None else constant + weight @ norm.bias.to(weight.dtype)

    def _by_norm(self, seen: ObservedForward) -> Score:
        """Logits of whole streams by the model's own norm and unembedding, without their hooks."""
        norm: Any = self._model.get_submodule(self.places.final_norm)
        dtype = seen.outputs[self.places.blocks[-1]].dtype
        return lambda rows, at: self._finished(self._unembed.forward(norm.forward(rows.to(dtype))))

    def _by_frozen(self, seen: ObservedForward) -> Score:
        """Logits of whole streams, with the scale that the final norm has on the final stream."""
        norm, constant = self._final_norm(seen)

        def score(rows: Tensor, at: slice) -> Tensor:
            normed = replace(norm, scale=norm.scale[at])(computable(rows))
            return self._finished(normed @ computable(self._weight).T + constant)

        return score

    def _finished(self, scores: Tensor) -> Tensor:
        """The logits that the model computes from the output of its unembedding."""
        scores = scores * self._factor
        return scores if self._cap is None else torch.tanh(scores / self._cap) * self._cap

    def _blocks(self, count: int) -> Iterator[slice]:
        """Slices of the positions whose logits are computed at once."""
        for start in range(0, count, self._at_once):
            yield slice(start, start + self._at_once)

    def _read(
        self, part: StreamPart, score: Score, asked: ScoredPositions, output: Tensor | None = None
    ) -> PartRead:
        """The reading of a part, computed in blocks of positions.

        output: the model's logits, with which the part's distribution is compared; None: not compared
        """
        blocks = list[tuple[Tensor, ...]]()
        for at in self._blocks(len(part.rows)):
            scores = computable(score(part.rows[at], at))
            logs = F.log_softmax(scores, dim=-1)
            best = logs.topk(min(max(self._top, 1), logs.shape[-1]), dim=-1)
            answer, wrong = asked.answer[at].clamp_min(0), asked.wrong[at].clamp_min(0)
            kl = scores.new_zeros(len(scores))
            if output is not None:
                expected = F.log_softmax(_at(output, asked, at), dim=-1)
                kl = F.kl_div(logs, expected, reduction="none", log_target=True).sum(-1).clamp_min(0)
            blocks.append(
                (
                    best.indices[:, : self._top], best.values[:, : self._top].exp(),
                    scores.gather(1, answer[:, None])[:, 0], scores.gather(1, wrong[:, None])[:, 0],
                    best.indices[:, 0] == answer, kl,
                )
            )  # fmt: skip
        top, probabilities, answers, wrongs, right, kl = (
            torch.cat(each).cpu() for each in zip(*blocks, strict=True)
        )
        key, compared = (part.name, part.layer, part.head), kl if output is not None else None
        return PartRead(key, top, probabilities, answers, wrongs, right, compared)

    def _check_scores(self, seen: ObservedForward, output: Tensor, asked: ScoredPositions) -> None:
        """Check at the first positions that the lens computes the model's logits from the unembedding's output."""
        if self._edited:
            if self._frozen and self.parts != "residual" and self._cap is not None:
                raise HookrunError(
                    "a hook changes the model's output after the soft cap on the logits, but contributions add up "
                    f"only before the cap; hook {self.places.unembed} instead, or use task.parts=residual"
                )
            return
        assert seen.scores is not None
        at = slice(0, self._at_once)
        made = computable(self._finished(seen.scores[asked.rows[0][at], asked.rows[1][at]]))
        expected = _at(output, asked, at) if output.shape == seen.scores.shape else None
        if expected is None or bool(((made - expected).abs() > rounding(output.dtype, expected)).any()):
            raise HookrunError(
                f"the model changes the output of {self.places.unembed} before it returns it, in a way that the lens "
                "does not know: name the module that computes the model's output with task.unembed"
            )


def _at(tensor: Tensor, asked: ScoredPositions, at: slice) -> Tensor:
    """[n, V] in float32 or float64: the tensor [batch, length, V] at the positions."""
    sequences, columns = asked.rows
    return computable(tensor[sequences[at], columns[at]])


def cap_of(model: nn.Module) -> float | None:
    """The soft cap on the logits, as in Gemma 2; None: there is none."""
    value = getattr(text_config(model), _CAP, None)
    return float(value) if isinstance(value, int | float) and value else None
