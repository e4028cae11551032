"""One pass of the lens over a split: logits of the parts of each batch, their means, and the lines of lens.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookrun.engine.actions.base import TokenRows
from hookrun.engine.hook_types import FORWARD
from hookrun.engine.plan.plan import ResolvedPlan
from hookrun.engine.plan.texts import decoder_of, tokenizer_of
from hookrun.engine.runtime.tokens.calls import CallReader
from hookrun.engine.runtime.tokens.choice import Rule
from hookrun.engine.values.tensors import computable, on_device, read_together
from hookrun.errors import HookrunError
from hookrun.studies.kit.passes import IGNORED, Batch, RunContext, as_call, choose_tokens, main_tensor
from hookrun.studies.lens.contributions import (
    BIAS,
    ObservedForward,
    Observer,
    Part,
    Source,
    contributions,
    find_sources,
    frozen,
    residual,
    rounding,
)
from hookrun.studies.lens.places import Places, text_config
from hookrun.studies.lens.records import LENS

AT_ONCE = 2**24
"""The number of logits that are computed at once: positions x vocabulary."""

REST = Part("(rest)")
"""The part that is the logits minus all other parts: changes by hooks outside of the other parts."""

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

    rows: tuple[Tensor, ...]
    answer: Tensor
    wrong: Tensor

    def at(self, places: slice) -> ScoredPositions:
        """Some of the positions."""
        rows = tuple(indices[places] for indices in self.rows)
        return ScoredPositions(rows, self.answer[places], self.wrong[places])

    def of(self, tensor: Tensor) -> Tensor:
        """[N, V] in float32 or float64: a tensor [batch, length, V] at the positions."""
        return computable(tensor[self.rows])


_DIFFERS = "differs"

Reading = dict[str, Tensor]
"""What was computed for one part at N positions, on the CPU when it has been read.

top, probabilities:         [N, k], the tokens with the largest logits, and their probabilities
answer_logit, wrong_logit:  [N]
right:                      [N] bool, whether the most probable token is the answer
kl:                         [N], KL(output || part) in nats; missing where it is not compared with the output
"""

Readings = dict[Part | None, Reading]
"""The reading of each part, in the order of the model; None: of the model's own output, after all hooks."""


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
        self._model = model
        self._frozen = frozen
        self._top = top
        self._edited = edited
        self._unembed: Any = model.get_submodule(places.unembed)
        weight: Any = self._unembed.weight
        self._weight: Tensor = weight.detach()
        self._cap = cap_of(model)
        self._factor = 1.0  # by which the model multiplies the output of its unembedding
        for name, power in _FACTORS.items():
            value = getattr(text_config(model), name, None)
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                self._factor *= float(value) ** power

    def read(
        self,
        seen: ObservedForward,
        output: Tensor,
        positions: ScoredPositions,
        sources: Sequence[Source] | None,
    ) -> Readings:
        """Read the parts in blocks of positions.

        output:    the model's output, after all hooks
        sources:   what adds to the stream; None: read the parts `residual`

        Raises HookrunError if the logits cannot be computed as the model does.
        """
        assert seen.scores is not None
        blocks: dict[Part | None, list[Reading]] = {}
        at_once = max(1, AT_ONCE // len(self._weight))
        for start in range(0, len(positions.answer), at_once):
            places = slice(start, start + at_once)
            some = positions.at(places)
            scores, expected, differs = self._compared(seen, output, some)
            within = rounding(seen.scores.dtype, scores)
            for part, logits in self._scored(seen.at(places), scores, expected, sources):
                compared = expected if sources is None and part is not None else None
                read = self._reading(logits, some, compared)
                if part is None:
                    read[_DIFFERS] = differs
                if part == REST:
                    read[_DIFFERS] = (logits.abs() > within).any(-1)
                blocks.setdefault(part, []).append(read)
        readings = _joined(blocks)
        if readings[None].pop(_DIFFERS).any():
            raise HookrunError(
                f"the model changes the output of {self.places.unembed} before it returns it, in a way that the lens "
                "does not know: name the module that computes the model's output with task.unembed"
            )
        if REST in readings and not readings[REST].pop(_DIFFERS).any():
            del readings[REST]
        return readings

    def _compared(
        self, seen: ObservedForward, output: Tensor, positions: ScoredPositions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The model's logits [n, V] before a soft cap, and its output [n, V].

        And whether it is not what the lens computes from that of the unembedding, [n] bool.
        """
        assert seen.scores is not None
        scores = positions.of(seen.scores) * self._factor
        if self._edited:
            if self._frozen and self.parts != "residual" and self._cap is not None:
                raise HookrunError(
                    "a hook changes the model's output after the soft cap on the logits, but contributions add up "
                    f"only before the cap; hook {self.places.unembed} instead, or use task.parts=residual"
                )
            return scores, positions.of(output), torch.zeros_like(positions.answer, dtype=torch.bool)
        if output.shape != seen.scores.shape:
            return scores, scores, torch.ones_like(positions.answer, dtype=torch.bool)
        expected = positions.of(output)
        off = (self._capped(scores) - expected).abs() > rounding(output.dtype, expected)
        return scores, expected, off.any(-1)

    def _scored(
        self, seen: ObservedForward, scores: Tensor, output: Tensor, sources: Sequence[Source] | None
    ) -> Iterator[tuple[Part | None, Tensor]]:
        """The logits [n, V] of each part, and of the model's output.

        Contributions with a frozen norm add up to the output, or to the logits before a soft cap, with the part
        `(rest)`.
        """
        yield None, output
        places = self.places
        norm: Any = self._model.get_submodule(places.final_norm)
        if sources is None:
            parts = residual(self._model, places, seen)
        else:
            parts = contributions(self._model, places, sources, seen)
        if not self._frozen:  # by the model's own norm and unembedding, without their hooks
            dtype = seen.outputs[places.blocks[-1]].dtype
            for part, rows in parts:
                yield part, self._capped(self._unembed.forward(norm.forward(rows.to(dtype))) * self._factor)
            return
        # The norm on the final stream, without the hooks on its output.
        final = seen.inputs[places.final_norm]
        linear = frozen(places.final_norm, norm, final, norm.forward(final))
        weight = computable(self._weight)
        constant = weight.new_zeros(len(weight))
        bias = getattr(self._unembed, "bias", None)
        if bias is not None:
            constant = computable(bias.detach())
        if linear.bias is not None:
            constant = constant + weight @ linear.bias.to(weight.dtype)
        total = torch.zeros_like(computable(final))
        for part, rows in parts:
            normed = linear(computable(rows))
            total += normed
            logits = normed @ weight.T.to(normed.dtype)
            if sources is None:
                yield part, self._capped((logits + constant) * self._factor)
            else:
                yield part, logits * self._factor
        if sources is not None:
            logits = output if self._cap is None else scores
            yield REST, logits - (total @ weight.T.to(total.dtype) + constant) * self._factor
            yield Part(BIAS), (constant * self._factor).expand_as(logits)

    def _capped(self, logits: Tensor) -> Tensor:
        if self._cap is None:
            return logits
        return torch.tanh(logits / self._cap) * self._cap

    def _reading(self, scores: Tensor, positions: ScoredPositions, output: Tensor | None) -> Reading:
        """The reading of logits [n, V].

        output: the model's logits, with which their distribution is compared; None: not compared
        """
        scores = computable(scores)
        logs = F.log_softmax(scores, dim=-1)
        best = logs.topk(min(max(self._top, 1), logs.shape[-1]), dim=-1)
        answer = positions.answer.clamp_min(0)
        wrong = positions.wrong.clamp_min(0)
        read = {
            "top": best.indices[:, : self._top],
            "probabilities": best.values[:, : self._top].exp(),
            "answer_logit": scores.gather(1, answer[:, None])[:, 0],
            "wrong_logit": scores.gather(1, wrong[:, None])[:, 0],
            "right": best.indices[:, 0] == answer,
        }
        if output is not None:
            terms = F.kl_div(logs, F.log_softmax(output, dim=-1), reduction="none", log_target=True)
            read["kl"] = terms.sum(-1).clamp_min(0)
        return read


def _joined(blocks: Mapping[Part | None, Sequence[Reading]]) -> Readings:
    """The blocks of positions of each part one after the other, all read from the device together."""
    columns: dict[tuple[Part | None, str], Tensor] = {}
    for part, reads in blocks.items():
        for name in reads[0]:
            columns[part, name] = torch.cat([read[name] for read in reads])
    readings = Readings()
    for (part, name), values in zip(columns, read_together(columns.values()), strict=True):
        readings.setdefault(part, {})[name] = values
    return readings


def cap_of(model: nn.Module) -> float | None:
    """The soft cap on the logits, as in Gemma 2; None: there is none."""
    value = getattr(text_config(model), _CAP, None)
    return float(value) if isinstance(value, int | float) and value else None


# ---- a pass over a split -------------------------------------------------------------------------------------------


class Reader:
    """Reads batches of sequences of tokens.

    means: the means over the batches so far
    """

    def __init__(self, context: RunContext, lens: Lens, rule: Rule) -> None:
        model = context.model
        self.means = PartMeans()
        self.observer = Observer(model, lens.places, inside=lens.parts != "residual")
        self._context = context
        self._lens = lens
        self._rule = rule
        self._sources: Sequence[Source] | None = None
        self._calls = CallReader(model)
        self._decode = decoder_of(tokenizer_of(model, context.prepared.data.tokenizer).tokenizer)

    def read(self, batch: Batch) -> None:
        """Run the batch, write its lines, and add it to the means."""
        context = self._context
        observer = self.observer
        lens = self._lens
        call = self._calls.read(*as_call(batch.inputs, context.model))
        if call is None:
            raise HookrunError(
                "task=lens reads sequences of tokens, and the samples of the data have no input_ids"
            )
        chosen = choose_tokens(self._rule, call, batch)
        shape = (call.rows, call.columns)
        if not len(chosen):  # none of the samples has such a token
            context.forward(batch)
            return
        rows = chosen.on(context.prepared.device)
        if lens.parts != "residual" and self._sources is None:
            _, seen = observer.observe(partial(context.without_hooks, batch), rows, shape)
            self._sources = find_sources(context.model, observer.places, seen, observer.embeddings)
        output, seen = observer.observe(partial(context.forward, batch), rows, shape)
        # the targets are on the CPU too: nothing has to be read back
        answer = wrong = torch.full((len(chosen),), IGNORED, device="cpu")
        if batch.data.of_tokens:
            sequences, columns = chosen.on(answer.device)
            answer = batch.labels[sequences, columns]
            if batch.wrong is not None:  # it stands beside an answer only
                wrong = batch.wrong[sequences].masked_fill(answer == IGNORED, IGNORED)
        positions = ScoredPositions(rows, answer, wrong)
        on_model = ScoredPositions(rows, on_device(answer, rows[0].device), on_device(wrong, rows[0].device))
        with context.autocast():
            readings = lens.read(seen, main_tensor(output), on_model, self._sources)
        for part, read in readings.items():
            self.means.add(part, read, positions)
        lines = lines_of(batch.split, lens.parts, chosen.rows, positions, readings, self._text)
        for line in lines:
            context.run_dir.append(LENS, [line])

    def _text(self, token: int) -> str | None:
        return None if token < 0 or self._decode is None else self._decode(token)


def changes_logits(plan: ResolvedPlan, unembed: str) -> bool:
    """Whether a hook changes the output of a module around the unembedding."""
    for hook in plan.hooks:
        if hook.spec.hook_type is not FORWARD or hook.spec.action.observes:
            continue
        for match in hook.matches:
            if not match.path or unembed.startswith(f"{match.path}."):
                return True
    return False


# ---- means and lines ----------------------------------------------------------------------------------------------


_NUMBER = {
    "kl": "positions",
    "accuracy": "answers",
    "answer_logit": "answers",
    "logit_difference": "pairs",
}
"""A mean -> the number of its values: the positions, those with a right token, or those with a wrong token too."""


@dataclass
class PartMeans:
    """The means of every part over a pass, and of the model's own output (None). They can be saved and loaded.

    sums: part -> the sums over positions, and the numbers of positions
    """

    sums: dict[Part | None, dict[str, float]] = field(default_factory=dict)

    def add(self, part: Part | None, read: Reading, positions: ScoredPositions) -> None:
        """Add one batch of a part, which may be missing in other batches, such as a change by hooks.

        positions: on the CPU
        """
        has_answer = positions.answer != IGNORED
        has_pair = has_answer & (positions.wrong != IGNORED)
        difference = read["answer_logit"] - read["wrong_logit"]
        of_batch: dict[str, float] = {
            "positions": len(has_answer),
            "answers": int(has_answer.sum()),
            "pairs": int(has_pair.sum()),
            "kl": float(read["kl"].double().sum()) if "kl" in read else 0.0,
            "accuracy": int((read["right"] & has_answer).sum()),
            "answer_logit": float(read["answer_logit"][has_answer].double().sum()),
            "logit_difference": float(difference[has_pair].double().sum()),
        }
        sums = self.sums.setdefault(part, dict.fromkeys(of_batch, 0))
        for name, value in of_batch.items():
            sums[name] += value

    def means(self, part: Part | None, names: Iterable[str] = tuple(_NUMBER)) -> dict[str, float]:
        """These means of a part; those without positions are left out."""
        sums = self.sums[part]
        counts = self.sums[None]  # a part that is missing in a batch counts as 0 there
        return {name: sums[name] / counts[_NUMBER[name]] for name in names if counts[_NUMBER[name]]}

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        """A line of metrics.jsonl for each part."""
        # A contribution is not compared with the output.
        names = _NUMBER if kind == "residual" else ("answer_logit", "logit_difference")
        for part, sums in self.sums.items():
            if part is None:
                continue
            line: dict[str, Any] = {"module": part.name, "kind": kind, "layer": part.layer}
            if part.head is not None:
                line["head"] = part.head
            yield {**line, "positions": sums["positions"], **self.means(part, names)}

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, as plain values."""
        saved: list[list[Any]] = []
        for part, sums in self.sums.items():
            saved.append([None if part is None else [*part], dict(sums)])
        return {"sums": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by saved ones."""
        self.sums = {}
        for part, sums in state["sums"]:
            self.sums[None if part is None else Part(*part)] = dict(sums)


def lines_of(
    split: str,
    kind: str,
    rows: TokenRows,
    positions: ScoredPositions,
    readings: Readings,
    text: Callable[[int], str | None],
) -> Iterator[dict[str, Any]]:
    """The lines of a batch for lens.jsonl, ordered by sample, then part, then position.

    kind: residual, layers or heads
    text: token -> its text, or None without a tokenizer
    """
    samples = rows.samples.tolist()
    numbers = rows.numbers.tolist()
    places = rows.positions.tolist()
    tokens = rows.token_ids.tolist()
    answers = positions.answer.tolist()
    wrongs = positions.wrong.tolist()
    columns: dict[Part, dict[str, list[Any]]] = {}
    for part, read in readings.items():
        if part is not None:
            columns[part] = {name: values.tolist() for name, values in read.items()}
    for _, rows_of_sample in groupby(range(len(numbers)), samples.__getitem__):
        of_sample = list(rows_of_sample)
        for part, values in columns.items():
            for row in of_sample:
                line = {
                    "sample": numbers[row],
                    "split": split,
                    "part": part.name,
                    "kind": kind,
                    "layer": part.layer,
                }
                if part.head is not None:
                    line["head"] = part.head
                line |= {"position": places[row], "token": tokens[row], "text": text(tokens[row])}
                best = zip(values["top"][row], values["probabilities"][row], strict=True)
                line["top"] = [[token, text(token), probability] for token, probability in best]
                if answers[row] != IGNORED:
                    line["answer_logit"] = values["answer_logit"][row]
                if answers[row] != IGNORED and wrongs[row] != IGNORED:
                    line["wrong_logit"] = values["wrong_logit"][row]
                    line["logit_difference"] = line["answer_logit"] - line["wrong_logit"]
                if "kl" in values:
                    line["kl_to_output"] = values["kl"][row]
                yield line
