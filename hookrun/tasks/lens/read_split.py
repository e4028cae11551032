"""One pass of the lens over a split, under the hooks of the experiment: its means and the lines of lens.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.site import TokenRows
from hookrun.data.samples import IGNORED
from hookrun.errors import CompileError, HookrunError
from hookrun.hook_types import FORWARD
from hookrun.plan.plan import PlannedHook
from hookrun.plan.texts import decoder_of, texts_of, tokenizer_of, unknown_spans
from hookrun.runtime.tokens.calls import CallReader
from hookrun.runtime.tokens.choice import Chosen, Rule, Texts
from hookrun.runtime.tokens.sequences import Sequences
from hookrun.spec.tokens import Tokens
from hookrun.store.format import LENS
from hookrun.store.run_dir import RunDir
from hookrun.tasks.lens.contributions import Observer, Structure, find_structure
from hookrun.tasks.lens.places import Places
from hookrun.tasks.lens.reading import Lens, PartRead, ScoredPositions
from hookrun.tasks.metrics.rows import main_tensor
from hookrun.tasks.run.batches import Batch, Batches
from hookrun.tasks.run.compile_check import buffers_kept
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.generators import generator_states, set_generators
from hookrun.tasks.run.prepare import Prepared, as_call

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


def read_split(context: RunContext, setup: LensSetup, split: Any, label: str) -> PartMeans:
    """Read every batch of the split, write its lines to lens.jsonl, and return the means.

    Raises HookrunError for an empty split, or if the model does not run as the lens expects.
    """
    batches = Batches(context.prepared, split)
    if not len(batches):
        raise HookrunError(f"the data has no samples in its {split} split")
    inside = setup.parts != "residual"
    with Observer(context.model, setup.places, inside=inside) as observer:
        reader = _Reader(context, setup, observer)
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

    def __init__(self, context: RunContext, setup: LensSetup, observer: Observer) -> None:
        model, places, plan = context.model, setup.places, context.prepared.plan
        edited = any(_changes_logits(hook, places.unembed) for hook in plan.hooks)
        self.means = PartMeans()
        self._context, self._setup, self._observer = context, setup, observer
        self._lens = Lens(model, places, setup.parts, setup.frozen, setup.top, edited)
        self._structure: Structure | None = None
        self._calls, self._sequences = CallReader(model), Sequences(model)
        self._rule = Rule(setup.tokens, once=False, texts=setup.texts)
        self._spans = any(True for each in setup.tokens.filters for _ in each.spans)
        self._decode = decoder_of(tokenizer_of(model, context.prepared.data.tokenizer).tokenizer)

    def read(self, batch: Batch) -> None:
        """Run the batch, write its lines, and add it to the means."""
        context, observer, lens = self._context, self._observer, self._lens
        chosen, shape = self._chosen(batch)
        if not len(chosen):  # none of the samples has such a token
            context.forward(batch)
            return
        sequences, columns = chosen.on(context.prepared.device)
        rows = sequences, columns
        if lens.parts != "residual" and self._structure is None:
            observer.begin(rows, shape)
            _forward_without_hooks(context, batch)
            places = self._setup.places
            self._structure = find_structure(context.model, places, observer.end(), observer.embeddings)
        observer.begin(rows, shape)
        output = main_tensor(context.forward(batch))
        seen = observer.end()
        wrong = batch.wrong if batch.data.of_tokens else None
        target = batch.target if batch.data.of_tokens else torch.empty(0)
        asked = ScoredPositions(rows, *answers_of(target, wrong, rows))
        with context.autocast():
            parts = list(lens.read(seen, output, asked, self._structure))
            self.means.add_output(lens.read_output(output, asked), asked)
        for part in parts:
            self.means.add(part, asked)
        write_lines(context.run_dir, batch.split, lens.parts, chosen.rows, asked, parts, self._text)

    def _chosen(self, batch: Batch) -> tuple[Chosen, tuple[int, int]]:
        """The positions to read, and (batch, length)."""
        call = self._calls.read(*as_call(batch.inputs, self._context.model))
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

    def _text(self, token: int) -> str | None:
        return None if token < 0 or self._decode is None else self._decode(token)


def _changes_logits(hook: PlannedHook, unembed: str) -> bool:
    """Whether the hook changes the output of a module around the unembedding."""
    if hook.spec.action.observes or hook.spec.hook_type is not FORWARD:
        return False
    return any(not match.path or unembed.startswith(f"{match.path}.") for match in hook.matches)


def _forward_without_hooks(context: RunContext, batch: Batch) -> None:
    """A forward without the experiment's hooks; buffers and random generators are restored."""
    args, kwargs = as_call(batch.inputs, context.model)
    states = generator_states()
    with context.hooks.paused(), buffers_kept(context.model), context.autocast():
        context.model(*args, **kwargs)
    set_generators(states)


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
    numbers, positions, tokens = (each.tolist() for each in (rows.numbers, rows.positions, rows.token_ids))
    answers, wrongs = asked.answer.tolist(), asked.wrong.tolist()
    columns = [
        (
            part.top.tolist(),
            part.probabilities.tolist(),
            part.answer_logit.tolist(),
            part.wrong_logit.tolist(),
        )
        for part in parts
    ]
    kls = [None if part.kl is None else part.kl.tolist() for part in parts]
    for start, end in _runs(rows.samples.tolist()):
        for part, (top, probabilities, answer, wrong), kl in zip(parts, columns, kls, strict=True):
            for row in range(start, end):
                line = {
                    "sample": numbers[row], "split": split, "part": part.name, "kind": kind, "layer": part.layer
                }  # fmt: skip
                if part.head is not None:
                    line["head"] = part.head
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
