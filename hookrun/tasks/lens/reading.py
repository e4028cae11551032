"""One pass of the lens over a split: logits of the parts of each batch, their means, and the lines of lens.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookrun.actions.base import TokenRows
from hookrun.data.info import Split
from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.hook_types import FORWARD
from hookrun.plan.plan import ResolvedPlan
from hookrun.plan.texts import decoder_of, tokenizer_of
from hookrun.runtime.tokens.calls import CallReader
from hookrun.runtime.tokens.choice import Rule
from hookrun.store.format import LENS
from hookrun.store.run_dir import RunDir
from hookrun.tasks.lens.contributions import (
    BIAS,
    FrozenNorm,
    ObservedForward,
    Observer,
    StreamPart,
    Structure,
    contributions,
    find_structure,
    frozen,
    residual,
    rounding,
)
from hookrun.tasks.lens.places import Places, text_config
from hookrun.tasks.metrics.measuring import choose_tokens
from hookrun.tasks.metrics.rows import main_tensor
from hookrun.tasks.run.batches import Batch, Batches
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.prepare import as_call
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


# ---- a pass over a split -------------------------------------------------------------------------------------------


def read_split(context: RunContext, lens: Lens, rule: Rule, split: Split, label: str) -> PartMeans:
    """Read every batch of the split, write its lines to lens.jsonl, and return the means.

    rule:  the positions to read
    label: the label of the progress bar

    Raises HookrunError for an empty split, or if the model does not run as the lens expects.
    """
    batches = Batches(context.prepared, split)
    if not len(batches):
        raise HookrunError(f"the data has no samples in its {split} split")
    observer = Observer(context.model, lens.places, inside=lens.parts != "residual")
    with observer.installation:
        reader = _Reader(context, lens, rule, observer)
        with context.evaluating(batches, label, {"means": reader.means}) as (passed, _):
            for batch in passed:
                with context.logged(context.hooks.clock.step):
                    reader.read(batch)
                context.hooks.step()
    return reader.means


class _Reader:
    """Reads batches of sequences of tokens.

    means: the means over the batches so far
    """

    def __init__(self, context: RunContext, lens: Lens, rule: Rule, observer: Observer) -> None:
        model = context.model
        self.means = PartMeans()
        self._context, self._lens, self._rule, self._observer = context, lens, rule, observer
        self._structure: Structure | None = None
        self._calls = CallReader(model)
        self._decode = decoder_of(tokenizer_of(model, context.prepared.data.tokenizer).tokenizer)

    def read(self, batch: Batch) -> None:
        """Run the batch, write its lines, and add it to the means."""
        context, observer, lens = self._context, self._observer, self._lens
        call = self._calls.read(*as_call(batch.inputs, context.model))
        if call is None:
            raise HookrunError(
                "task=lens reads sequences of tokens, and the samples of the data have no input_ids"
            )
        chosen, shape = choose_tokens(self._rule, call, batch), (call.rows, call.columns)
        if not len(chosen):  # none of the samples has such a token
            context.forward(batch)
            return
        sequences, columns = chosen.on(context.prepared.device)
        rows = sequences, columns
        if lens.parts != "residual" and self._structure is None:
            observer.begin(rows, shape)
            context.without_hooks(batch)
            seen = observer.end()
            self._structure = find_structure(context.model, observer.places, seen, observer.embeddings)
        observer.begin(rows, shape)
        output = main_tensor(context.forward(batch))
        seen = observer.end()
        answer = wrong = sequences.new_full(sequences.shape, IGNORED)
        if batch.data.of_tokens and batch.target.dim() == 2:
            answer = batch.target[sequences, columns]
            if batch.wrong is not None:  # it stands beside an answer only
                wrong = batch.wrong.to(sequences.device)[sequences].masked_fill(answer == IGNORED, IGNORED)
        asked = ScoredPositions(rows, answer, wrong)
        with context.autocast():
            parts = list(lens.read(seen, output, asked, self._structure))
            self.means.add(None, lens.read_output(output, asked), asked)
        for part in parts:
            self.means.add(part.key, part, asked)
        write_lines(context.run_dir, batch.split, lens.parts, chosen.rows, asked, parts, self._text)

    def _text(self, token: int) -> str | None:
        return None if token < 0 or self._decode is None else self._decode(token)


def changes_logits(plan: ResolvedPlan, unembed: str) -> bool:
    """Whether a hook changes the output of a module around the unembedding."""
    edits = [each for each in plan.hooks if each.spec.hook_type is FORWARD and not each.spec.action.observes]
    paths = [match.path for edit in edits for match in edit.matches]
    return any(not path or unembed.startswith(f"{path}.") for path in paths)


# ---- means and lines ----------------------------------------------------------------------------------------------


Sums = dict[str, float]
"""Sums over positions: `kl`, `right`, `answer_logit` and `logit_difference`; and the numbers of `positions`, of those
with a right token (`answers`), and of those with a right and a wrong token (`pairs`)."""

_MEANS = {
    "kl": ("kl", "positions"),
    "accuracy": ("right", "answers"),
    "answer_logit": ("answer_logit", "answers"),
    "logit_difference": ("logit_difference", "pairs"),
}
"""The name of a mean -> its sum and its number."""


class PartMeans:
    """The means of every part over a pass, and of the model's own output (None). They can be saved and loaded."""

    def __init__(self) -> None:
        self.sums = dict[PartKey | None, Sums]()

    def add(self, key: PartKey | None, part: PartRead, asked: ScoredPositions) -> None:
        """Add one batch of a part, which may be missing in other batches, such as a change by hooks."""
        has_answer = asked.answer.cpu() != IGNORED
        has_pair = has_answer & (asked.wrong.cpu() != IGNORED)
        difference = part.answer_logit - part.wrong_logit
        sums = self.sums.setdefault(key, {})
        for name, value in {
            "positions": len(has_answer),
            "answers": int(has_answer.sum()),
            "pairs": int(has_pair.sum()),
            "kl": float(part.kl.double().sum()) if part.kl is not None else 0.0,
            "right": int((part.right & has_answer).sum()),
            "answer_logit": float(part.answer_logit[has_answer].double().sum()),
            "logit_difference": float(difference[has_pair].double().sum()),
        }.items():
            sums[name] = sums.get(name, 0) + value

    def means(self, key: PartKey | None, *, compared: bool) -> dict[str, float]:
        """The means of a part by name; those without positions are left out.

        compared: include `kl` and `accuracy`, for a part that was compared with the output
        """
        sums, whole = self.sums[key], self.sums[None]  # a part that is missing in a batch counts as 0 there
        return {
            name: sums[total] / whole[number]
            for name, (total, number) in _MEANS.items()
            if whole[number] and (compared or name not in ("kl", "accuracy"))
        }

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        """A line of metrics.jsonl for each part."""
        for key, sums in self.sums.items():
            if key is not None:
                name, layer, head = key
                about = {"module": name, "kind": kind, "layer": layer} | (
                    {} if head is None else {"head": head}
                )
                means = self.means(key, compared=kind == "residual")
                yield {**about, "positions": sums["positions"], **means}

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, as plain values."""
        sums = [[*key, dict(sums)] for key, sums in self.sums.items() if key is not None]
        return {"sums": sums, "own": dict(self.sums.get(None, {}))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by saved ones."""
        self.sums = {None: dict(state["own"])} if state["own"] else {}
        self.sums |= {(name, layer, head): dict(sums) for name, layer, head, sums in state["sums"]}


def write_lines(
    run_dir: RunDir,
    split: str,
    kind: str,
    rows: TokenRows,
    asked: ScoredPositions,
    parts: Sequence[PartRead],
    text: Callable[[int], str | None],
) -> None:
    """Write the lines of a batch to lens.jsonl, ordered by sample, then part, then position.

    kind: residual, layers or heads
    text: token -> its text, or None without a tokenizer
    """
    numbers, positions, tokens = (each.tolist() for each in (rows.numbers, rows.positions, rows.token_ids))
    answers, wrongs = asked.answer.tolist(), asked.wrong.tolist()
    columns = [
        (
            part.top.tolist(),
            part.probabilities.tolist(),
            part.answer_logit.tolist(),
            part.wrong_logit.tolist(),
            None if part.kl is None else part.kl.tolist(),
        )
        for part in parts
    ]
    for _, of_sample in groupby(range(len(numbers)), rows.samples.tolist().__getitem__):
        sample_rows = list(of_sample)
        for part, (top, probabilities, answer, wrong, kl) in zip(parts, columns, strict=True):
            for row in sample_rows:
                name, layer, head = part.key
                line = {"sample": numbers[row], "split": split, "part": name, "kind": kind, "layer": layer}
                if head is not None:
                    line["head"] = head
                line |= {"position": positions[row], "token": tokens[row], "text": text(tokens[row])}
                best = zip(top[row], probabilities[row], strict=True)
                line["top"] = [[token, text(token), probability] for token, probability in best]
                if answers[row] != IGNORED:
                    line["answer_logit"] = answer[row]
                    if wrongs[row] != IGNORED:
                        line["wrong_logit"] = wrong[row]
                        line["logit_difference"] = answer[row] - wrong[row]
                if kl is not None:
                    line["kl_to_output"] = kl[row]
                run_dir.append(LENS, [line])
