"""One pass of the lens over a split, under the hooks of the experiment: its means and the lines of lens.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.rows import TokenRows
from hookrun.data.samples import IGNORED
from hookrun.errors import CompileError, HookrunError
from hookrun.hook_types import FORWARD
from hookrun.plan.plan import PlannedHook
from hookrun.plan.texts import decoder_of, texts_of, tokenizer_of, unknown_spans
from hookrun.runtime.tokens.calls import CallReader
from hookrun.runtime.tokens.choice import Chosen, Rule, Texts
from hookrun.runtime.tokens.sequences import Sequences
from hookrun.spec.tokens import Tokens
from hookrun.store.run_dir import RunDir
from hookrun.tasks.loop.batches import Batch, Batches
from hookrun.tasks.loop.built import as_call
from hookrun.tasks.loop.compiled import buffers_kept
from hookrun.tasks.loop.generators import generator_states, set_generators
from hookrun.tasks.loop.lens.contributions import Observer, Structure, find_structure
from hookrun.tasks.loop.lens.places import Places
from hookrun.tasks.loop.lens.reading import Lens, PartRead, ScoredPositions
from hookrun.tasks.loop.losses import main_tensor
from hookrun.tasks.loop.prepared import Prepared
from hookrun.tasks.loop.running import Running

WHERE = "task"


@dataclass(frozen=True)
class LensSetup:
    """What the lens reads.

    places: the module paths
    parts:  residual, layers or heads
    frozen: the final norm keeps its scale
    top:    how many tokens are recorded for each part
    tokens: the positions to read
    texts:  text in `tokens` -> its token ids
    """

    places: Places
    parts: str
    frozen: bool
    top: int
    tokens: Tokens
    texts: Texts


def checked_texts(prepared: Prepared, tokens: Tokens) -> Mapping[str, tuple[int, ...]]:
    """Text in the clause `tokens` -> its token ids. Raises CompileError for texts and spans that the data lacks."""
    found = tokenizer_of(prepared.model, prepared.data.tokenizer)
    texts, problems = texts_of(tokens, WHERE, found)
    problems += unknown_spans(tokens, WHERE, prepared.data)
    if problems:
        raise CompileError(problems)
    return texts


def read_split(running: Running, setup: LensSetup, split: Any, label: str) -> PartMeans:
    """Read every batch of the split, write its lines to lens.jsonl, and return the means.

    Raises HookrunError for an empty split, or if the model does not run as the lens expects.
    """
    batches = Batches(running.prepared, split)
    if not len(batches):
        raise HookrunError(f"the data has no samples in its {split} split")
    means = PartMeans()
    model, places = running.model, setup.places
    edited = any(_changes_logits(hook, places.unembed) for hook in running.prepared.plan.hooks)
    lens = Lens(model, places, setup.parts, setup.frozen, setup.top, edited)
    where = _Where(running, setup)
    text = _text(running.prepared)
    structure: Structure | None = None
    with (
        Observer(model, places, inside=setup.parts != "residual") as observer,
        running.evaluating(batches, label, {"means": means}) as (passed, _),
    ):
        for batch in passed:
            with running.logged(running.hooks.clock.step):
                picked, shape = where.chosen(batch)
                if not len(picked):  # none of the samples has such a token
                    running.forward(batch)
                    running.hooks.step()
                    continue
                rows = _pair(picked.on(running.prepared.device))
                if setup.parts != "residual" and structure is None:
                    observer.begin(rows, shape)
                    _forward_without_hooks(running, batch)
                    structure = find_structure(model, places, observer.end(), observer.embeddings)
                observer.begin(rows, shape)
                output = main_tensor(running.forward(batch))
                seen = observer.end()
                wrong = batch.wrong if batch.data.of_tokens else None
                target = batch.target if batch.data.of_tokens else torch.empty(0)
                asked = ScoredPositions(rows, *answers_of(target, wrong, rows))
                with running.autocast():
                    parts = list(lens.read(seen, output, asked, structure))
                    means.add_output(lens.read_output(output, asked), asked)
                for part in parts:
                    means.add(part, asked)
                write_lines(running.run_dir, batch.split, lens.parts, picked.rows, asked, parts, text)
            running.hooks.step()
    return means


def _changes_logits(hook: PlannedHook, unembed: str) -> bool:
    """Whether the hook changes the output of a module around the unembedding."""
    if hook.spec.action.observes or hook.spec.hook_type is not FORWARD:
        return False
    return any(not match.path or unembed.startswith(f"{match.path}.") for match in hook.matches)


def _forward_without_hooks(running: Running, batch: Batch) -> None:
    """A forward without the experiment's hooks; buffers and random generators are restored."""
    args, kwargs = as_call(batch.inputs, running.model)
    states = generator_states()
    with running.hooks.paused(), buffers_kept(running.model), running.autocast():
        running.model(*args, **kwargs)
    set_generators(states)


def _pair(indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    sequences, columns = indices
    return sequences, columns


class _Where:
    """Finds the positions of a batch that the lens reads."""

    def __init__(self, running: Running, setup: LensSetup) -> None:
        self._model = running.model
        self._reader = CallReader(running.model)
        self._sequences = Sequences(running.model)
        self._rule = Rule(setup.tokens, once=False, texts=setup.texts)
        self._spans = any(True for each in setup.tokens.filters for _ in each.spans)

    def chosen(self, batch: Batch) -> tuple[Chosen, tuple[int, int]]:
        """The positions, and (batch, length). Raises HookrunError for samples that are not sequences of tokens."""
        call = self._reader.read(*as_call(batch.inputs, self._model))
        if call is None:
            raise HookrunError(
                "task=lens reads sequences of tokens, and the samples of the data have no input_ids"
            )
        if self._spans:
            self._sequences.spans = batch.spans
        self._sequences.set_by_hand(call)
        of = self._sequences.current
        assert of is not None
        try:
            return self._rule.choose(of, (call.columns,), batch.ids), (call.rows, call.columns)
        except ValueError as error:
            raise HookrunError(f"task.{error}") from error


def _text(prepared: Prepared) -> Callable[[int], str | None]:
    decode = decoder_of(tokenizer_of(prepared.model, prepared.data.tokenizer).tokenizer)
    if decode is None:
        return lambda token: None
    return lambda token: None if token < 0 else decode(token)


def lines_of(means: PartMeans, kind: str) -> Iterator[dict[str, Any]]:
    """A line of metrics.jsonl for each part."""
    for (name, layer, head), sums in means.sums.items():
        about = {"module": name, "kind": kind, "layer": layer} | ({} if head is None else {"head": head})
        yield {**about, "positions": sums.positions, **sums.means(means.whole, compared=kind == "residual")}


# ---- means and lines ----------------------------------------------------------------------------------------------


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
