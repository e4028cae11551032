"""Chooses the rows of a model's output of which a task's metrics are computed, and adds batches to the means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookrun.data.info import SPLITS, Split
from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError, listed
from hookrun.plan.texts import FoundTokenizer, texts_of
from hookrun.run_values import RunReferences
from hookrun.run_values.sources import CaptureRows
from hookrun.runtime.tokens.calls import DECODER_IDS, IDS, MASK, CallTokens, on_cpu, parameters_of
from hookrun.runtime.tokens.choice import Rule
from hookrun.runtime.tokens.passes import Pass
from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import Run
from hookrun.tasks.base import metric_tokens_of
from hookrun.tasks.metrics import rows as rows_of
from hookrun.tasks.metrics.average import Average
from hookrun.tasks.metrics.losses import NEXT_TOKEN_LOSSES
from hookrun.tasks.metrics.metrics import DEFAULT, KL, LOGIT_DIFFERENCE, WHERE, precise
from hookrun.tasks.metrics.rows import BatchRows
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.prepare import Prepared

_PATHS = ("logits", "[0]", "out")
"""The paths of the scores in an output with several tensors, in order of preference."""


class Predicted:
    """The predictions of a run of task=predict.

    capture: [rows, ...], a row for each sample
    named:   the path of the run, for messages
    """

    def __init__(self, capture: StoredCapture, named: str) -> None:
        self._capture, self._named = capture, named
        self._rows = dict[Split, CaptureRows]()

    @classmethod
    def of(cls, runs: RunReferences, name: str) -> Predicted | None:
        """The predictions of the run; None if it has not been run yet. HookrunError if it has no predictions."""
        run = runs.open(name)
        return None if run is None else cls(_scores(run), str(run.path))

    def rows(self, split: Split) -> CaptureRows:
        """The rows of a split. HookrunError if there are none."""
        if split not in self._rows:
            splits = self._capture.splits
            part = ((splits == SPLITS.index(split)) | (splits < 0)).nonzero().squeeze(1)
            if not len(part):
                raise HookrunError(f"the run {self._named} predicted no sample of the split {split!r}")
            self._rows[split] = CaptureRows(
                self._capture, f"predictions of the run {self._named}", part, resample=False
            )
        return self._rows[split]

    def scores(self, ids: Tensor, split: Split) -> Tensor:
        """[B, ...] on the CPU: the predictions for these samples. HookrunError if a sample has none."""
        return self.rows(split).of(ids, _UNUSED)


_UNUSED = torch.Generator()
"""An argument of `CaptureRows.of` that is not used, since no samples are drawn."""


def _scores(run: Run) -> StoredCapture:
    found = run.predictions
    if found is None:
        raise HookrunError(f"the run {run.path} has no predictions: name a run of task=predict")
    if isinstance(found, StoredCapture):
        return found
    if isinstance(found, Mapping) and (path := next((each for each in _PATHS if each in found), None)):
        return found[path]
    raise HookrunError(f"the predictions of the run {run.path} hold no scores, but {listed(list(found), 6)}")


LABELS = "labels"


class ScoredTokens(NamedTuple):
    """The tokens at which a model has scores.

    target:  [B, T]; IGNORED where nothing is to be predicted
    real:    [B, T] bool on the CPU: True for tokens, False for padding
    ids:     [B, T] int64 on the CPU; None: not known
    decodes: they are the tokens of the decoder of an encoder-decoder
    """

    target: Tensor
    real: Tensor
    ids: Tensor | None
    decodes: bool


class Measuring:
    """Computes the metrics of a task.

    without_hooks: a metric compares with the same model without its hooks, so both outputs are needed
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._metrics = prepared.metrics
        self._names = {metric.name for metric in prepared.metrics}
        self._has_decoder = DECODER_IDS in parameters_of(prepared.model)
        tokens = metric_tokens_of(prepared.task)
        texts, _ = texts_of(tokens, "task", FoundTokenizer(prepared.data.tokenizer))
        self._rule = None if tokens is None else Rule(tokens, False, texts)
        kl = next((metric for metric in prepared.metrics if metric.name == KL), None)
        self.without_hooks = kl is not None and kl.against is None
        self._predicted: Predicted | None = None
        if kl is not None and kl.against is not None:
            self._predicted = Predicted.of(RunReferences.of(prepared.experiment), kl.against)

    def average(self) -> Average:
        """A new Average of the task's metrics, without samples."""
        return Average(self._metrics, self._prepared.loss)

    def require_all(self, values: Mapping[str, float]) -> None:
        """Raise HookrunError if a metric of `task.metrics` has no value, since no sample or token had a target."""
        if self._metrics is DEFAULT and self._rule is None:
            return
        for name in [each.name for each in self._metrics if each.name not in values]:
            at = " at the tokens of task.tokens" if self._rule is not None else ""
            text = f"{WHERE}: {name!r} has no value, because nothing is to be predicted{at}"
            raise HookrunError(f"{text}; logit_difference and kl are computed at any token")

    def add(
        self, average: Average, loss: Tensor | None, output: Any, batch: Batch, others: Any = None
    ) -> None:
        """Add a batch to `average`.

        loss:   the mean loss of the batch; None: not computed
        others: the output of the model without its hooks, if a metric compares with it
        """
        weight = None
        if not batch.data.of_tokens:
            rows = self._compared(rows_of.of_samples(output, batch.target), batch, others)
        elif self._metrics is DEFAULT and self._rule is None:
            target = batch.target
            found = rows_of.of_tokens(output, target, target != IGNORED, torch.zeros_like(target))
            rows = BatchRows(None, target) if found is None else found
        else:
            rows = self._tokens(output, self._sequences(batch), batch, others)
            weight = int((batch.target != IGNORED).sum())
            if loss is not None and self._rule is not None and self._prepared.loss.name in NEXT_TOKEN_LOSSES:
                weight = len(rows.with_targets)
                loss = self._loss(rows)
        average.add(loss, rows, weight=weight, ids=batch.ids, split=batch.split)

    def _loss(self, rows: BatchRows) -> Tensor:
        """The mean loss of the chosen tokens, in float32 or float64; 0 if there are none."""
        chosen = rows.with_targets
        total = torch.zeros((), device=chosen.targets.device)
        with torch.no_grad():
            for part in chosen.parts():
                mean = self._prepared.loss(part.scores[None], part.targets[None])
                total = total + precise(mean) * len(part.targets)
        return total / max(len(chosen), 1)

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def _sequences(self, batch: Batch) -> ScoredTokens:
        inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {}
        if self._has_decoder and isinstance(labels := inputs.get(LABELS), Tensor):
            return ScoredTokens(labels, (labels != IGNORED).cpu(), None, decodes=True)
        ids, mask = inputs.get(IDS), inputs.get(MASK)
        real = torch.ones(batch.target.shape, dtype=torch.bool) if mask is None else mask.cpu() != 0
        return ScoredTokens(batch.target, real, None if ids is None else on_cpu(ids), decodes=False)

    def _tokens(self, output: Any, sequences: ScoredTokens, batch: Batch, others: Any) -> BatchRows:
        """The rows of the chosen tokens. HookrunError if the output has no scores for tokens."""
        target = sequences.target
        chosen = target != IGNORED if self._rule is None else self._chosen(sequences, batch)
        found = rows_of.of_tokens(output, target, chosen, sequences.real.cumsum(1) - 1)
        if found is None:
            raise HookrunError(f"{WHERE}: the model's output has no score for each token at each position")
        if LOGIT_DIFFERENCE in self._names:
            found = self._with_answers(found, sequences, batch)
        return self._compared(found, batch, others)

    def _chosen(self, sequences: ScoredTokens, batch: Batch) -> Tensor:
        """[B, T] bool: the tokens that `task.tokens` selects."""
        assert self._rule is not None
        real = sequences.real
        call = CallTokens(real.shape[0], real.shape[1], sequences.ids, real)
        of = Pass(
            call,
            real=real,
            ids=sequences.ids,
            prompt=real.shape[1],
            new_from=0,
            number=0,
            session=None,
            spans=batch.spans if any(True for each in self._rule.tokens.filters for _ in each.spans) else {},
            by_hand=True,
            decodes=sequences.decodes,
        )
        try:
            places = self._rule.choose(of, (real.shape[1],), batch.ids).on(torch.device("cpu"))
        except ValueError as error:
            raise HookrunError(f"task.{error}") from error
        chosen = torch.zeros_like(real)
        chosen[places] = True
        return chosen.to(sequences.target.device)

    def _with_answers(self, found: BatchRows, sequences: ScoredTokens, batch: Batch) -> BatchRows:
        """The rows with right and wrong answers; the right answer of a sample is its first token to be predicted."""
        if sequences.decodes and self._rule is None:
            text = f"{WHERE}: {LOGIT_DIFFERENCE!r} needs one token of the answer, and the decoder's answer has more"
            raise HookrunError(f"{text}: set task.tokens=0")
        target, wrong = sequences.target, batch.wrong
        first = (target != IGNORED).to(torch.uint8).argmax(1, keepdim=True)
        answers = target.gather(1, first).squeeze(1)
        if wrong is None or bool((answers == IGNORED).any()):
            raise HookrunError(f"{WHERE}: {LOGIT_DIFFERENCE!r}: a sample has no right or no wrong answer")
        return found.with_answers(answers, wrong.to(target.device))

    # ---- comparison with other predictions -------------------------------------------------------------------------

    def _compared(self, found: BatchRows, batch: Batch, others: Any) -> BatchRows:
        if KL not in self._names or found.scores is None or found.scores.dim() != 2:
            return found
        if self._predicted is not None:
            return found.compared_with(self._predicted.scores(batch.ids, batch.split))
        scores = rows_of.token_scores(others) if batch.data.of_tokens else rows_of.class_scores(others)
        if scores is None:
            raise HookrunError(f"{WHERE}: 'kl': the model without its hooks returns no scores")
        return found.compared_with(scores)
