"""One pass of the lens over a split, under the hooks of the experiment: its means and the lines of lens.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

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
from hookrun.tasks.lens.contributions import Observer, Structure, find_structure
from hookrun.tasks.lens.reading import Lens, PartKey, PartRead, ScoredPositions
from hookrun.tasks.metrics.measuring import choose_tokens
from hookrun.tasks.metrics.rows import main_tensor
from hookrun.tasks.run.batches import Batch, Batches
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.prepare import as_call


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
