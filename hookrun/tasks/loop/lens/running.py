"""One pass of the lens over a split, under the hooks of the experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookrun.errors import CompileError, HookrunError
from hookrun.plan.texts import decoder_of, texts_of, tokenizer_of, unknown_spans
from hookrun.runtime.tokens.calls import CallReader
from hookrun.runtime.tokens.choice import Chosen, Rule, Texts
from hookrun.runtime.tokens.sequences import Sequences
from hookrun.spec.tokens import Tokens
from hookrun.tasks.loop.batches import Batch, Batches
from hookrun.tasks.loop.built import as_call
from hookrun.tasks.loop.context import RunContext
from hookrun.tasks.loop.lens.observing import Observer
from hookrun.tasks.loop.lens.places import Places
from hookrun.tasks.loop.lens.reading import Lens, ScoredPositions
from hookrun.tasks.loop.lens.recording import PartMeans, answers_of, write_lines
from hookrun.tasks.loop.losses import main_tensor
from hookrun.tasks.loop.prepared import Prepared

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


def read_split(running: RunContext, setup: LensSetup, split: Any, label: str) -> PartMeans:
    """Read every batch of the split, write its lines to lens.jsonl, and return the means.

    Raises HookrunError for an empty split, or if the model does not run as the lens expects.
    """
    batches = Batches(running.prepared, split)
    if not len(batches):
        raise HookrunError(f"the data has no samples in its {split} split")
    means = PartMeans()
    model = running.model
    lens = Lens(model, setup.places, setup.parts, setup.frozen, setup.top)
    where = _Where(running, setup)
    text = _text(running.prepared)
    inside = setup.parts != "residual"
    with (
        Observer(model, setup.places, inside=inside) as observer,
        running.evaluating(batches, label, {"means": means}) as (passed, _),
    ):
        for batch in passed:
            with running.logged(running.hooks.clock.step):
                _read_batch(running, batch, where.chosen(batch), observer, lens, means, text)
            running.hooks.step()
    return means


def _read_batch(
    running: RunContext,
    batch: Batch,
    chosen: tuple[Chosen, tuple[int, int]],
    observer: Observer,
    lens: Lens,
    means: PartMeans,
    text: Callable[[int], str | None],
) -> None:
    picked, shape = chosen
    if not len(picked):  # none of the samples has such a token
        running.forward(batch)
        return
    rows = _pair(picked.on(running.prepared.device))
    observer.begin(rows, shape)
    output = main_tensor(running.forward(batch))
    seen = observer.end()
    wrong = batch.wrong if batch.data.of_tokens else None
    target = batch.target if batch.data.of_tokens else torch.empty(0)
    asked = ScoredPositions(rows, *answers_of(target, wrong, rows))
    with running.autocast():
        parts = list(lens.read(seen, output, asked))
        means.add_output(lens.read_output(output, asked), asked)
    for part in parts:
        means.add(part, asked)
    write_lines(running.run_dir, batch.split, lens.parts, picked.rows, asked, parts, text)


def _pair(indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    sequences, columns = indices
    return sequences, columns


class _Where:
    """Finds the positions of a batch that the lens reads."""

    def __init__(self, running: RunContext, setup: LensSetup) -> None:
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


def with_lines(prepared: Prepared, lines: Sequence[str]) -> Prepared:
    """The same with further lines for the printed plan."""
    return replace(prepared, lines=(*prepared.lines, *lines))
