"""The output of the lens: a line of lens.jsonl for each sample, part and position, and the means of each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookrun.actions.rows import TokenRows
from hookrun.data.samples import IGNORED
from hookrun.store.run_dir import RunDir
from hookrun.tasks.loop.lens.reading import PartRead, ScoredPositions

Key = tuple[str, int | None, int | None]
"""(name, layer, head) of a part."""


@dataclass
class LensSums:
    """Sums over positions.

    positions: the number of positions
    answers:   how many of them have a right token
    pairs:     how many of them have a right and a wrong token
    """

    positions: int = 0
    answers: int = 0
    pairs: int = 0
    kl: float = 0.0
    right: int = 0
    answer_logit: float = 0.0
    logit_difference: float = 0.0

    def means(self, of: LensSums, *, compared: bool) -> dict[str, float]:
        """The means by name; those without positions are left out.

        of:       the counts of the whole pass; a part that is missing in a batch counts as 0 there
        compared: include `kl` and `accuracy`, for a part that was compared with the output
        """
        found = dict[str, float]()
        if compared:
            found["kl"] = self.kl / max(of.positions, 1)
        if of.answers and compared:
            found["accuracy"] = self.right / of.answers
        if of.answers:
            found["answer_logit"] = self.answer_logit / of.answers
        if of.pairs:
            found["logit_difference"] = self.logit_difference / of.pairs
        return found


class PartMeans:
    """The means of every part over a pass, and of the model's own output. They can be saved and loaded."""

    def __init__(self) -> None:
        self.sums = dict[Key, LensSums]()
        self.own = LensSums()

    @property
    def whole(self) -> LensSums:
        """The sums of the part with the most positions, whose counts are those of the whole pass."""
        return max(self.sums.values(), key=lambda each: each.positions, default=LensSums())

    def add(self, part: PartRead, asked: ScoredPositions) -> None:
        """Add one batch of a part. A part may be missing in some batches, such as a change by hooks."""
        self._add(self.sums.setdefault((part.name, part.layer, part.head), LensSums()), part, asked)

    def add_output(self, output: PartRead, asked: ScoredPositions) -> None:
        """Add one batch of the model's own output."""
        self._add(self.own, output, asked)

    def _add(self, sums: LensSums, part: PartRead, asked: ScoredPositions) -> None:
        has_answer = asked.answer.cpu() != IGNORED
        has_pair = has_answer & (asked.wrong.cpu() != IGNORED)
        sums.positions += len(has_answer)
        sums.answers += int(has_answer.sum())
        sums.pairs += int(has_pair.sum())
        sums.kl += float(part.kl.double().sum()) if part.kl is not None else 0.0
        sums.right += int((part.right & has_answer).sum())
        sums.answer_logit += float(part.answer_logit[has_answer].double().sum())
        difference = part.answer_logit - part.wrong_logit
        sums.logit_difference += float(difference[has_pair].double().sum())

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, as plain values."""
        sums = [[*key, vars(each)] for key, each in self.sums.items()]
        return {"sums": sums, "own": vars(self.own)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by saved ones."""
        self.sums = {(name, layer, head): LensSums(**sums) for name, layer, head, sums in state["sums"]}
        self.own = LensSums(**state["own"])


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
    columns = [_PartColumns.of(part) for part in parts]
    numbers, positions, tokens = (each.tolist() for each in (rows.numbers, rows.positions, rows.token_ids))
    answers, wrongs = asked.answer.tolist(), asked.wrong.tolist()
    for start, end in _runs(rows.samples.tolist()):
        for part, column in zip(parts, columns, strict=True):
            for row in range(start, end):
                line = {
                    "sample": numbers[row],
                    "split": split,
                    "part": part.name,
                    "kind": kind,
                    "layer": part.layer,
                }
                if part.head is not None:
                    line["head"] = part.head
                line |= {"position": positions[row], "token": tokens[row], "text": text(tokens[row])}
                best = zip(column.top[row], column.probabilities[row], strict=True)
                line["top"] = [[token, text(token), probability] for token, probability in best]
                if answers[row] != IGNORED:
                    line["answer_logit"] = column.answer_logit[row]
                    if wrongs[row] != IGNORED:
                        line["wrong_logit"] = column.wrong_logit[row]
                        line["logit_difference"] = column.answer_logit[row] - column.wrong_logit[row]
                if column.kl is not None:
                    line["kl_to_output"] = column.kl[row]
                run_dir.log_lens(line)


@dataclass(frozen=True)
class _PartColumns:
    """The tensors of a `PartRead` as lists of numbers."""

    top: list[list[int]]
    probabilities: list[list[float]]
    answer_logit: list[float]
    wrong_logit: list[float]
    kl: list[float] | None

    @classmethod
    def of(cls, part: PartRead) -> _PartColumns:
        kl = None if part.kl is None else part.kl.tolist()
        logits = part.answer_logit.tolist(), part.wrong_logit.tolist()
        return cls(part.top.tolist(), part.probabilities.tolist(), *logits, kl)


def _runs(samples: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of each run of equal numbers."""
    starts = [n for n in range(len(samples)) if n == 0 or samples[n] != samples[n - 1]]
    return list(zip(starts, [*starts[1:], len(samples)], strict=True))


def answers_of(target: Tensor, wrong: Tensor | None, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The right and the wrong token at each position, both [N]; IGNORED where there is none.

    target: [batch, length], the next tokens of sequences; a target of another shape has no right tokens
    wrong:  [batch], the wrong token of each sample; None: not known
    rows:   (sequence, column), each [N], of the positions
    """
    sequences, columns = rows
    answer = target[sequences, columns] if target.dim() == 2 else sequences.new_full(sequences.shape, IGNORED)
    if wrong is None:
        return answer, answer.new_full(answer.shape, IGNORED)
    found = wrong.to(sequences.device)[sequences]
    return answer, found.masked_fill(answer == IGNORED, IGNORED)
