"""Chooses the rows of a model's output of which a task's metrics are computed, and adds batches to the means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookrun.data.info import SPLITS, Split
from hookrun.data.samples import IGNORED
from hookrun.engine.plan.texts import FoundTokenizer, texts_of
from hookrun.engine.runtime.tokens.calls import DECODER_IDS, IDS, MASK, CallTokens, Pass, parameters_of
from hookrun.engine.runtime.tokens.choice import Chosen, Rule
from hookrun.engine.values.index import Target
from hookrun.engine.values.tensors import read_together
from hookrun.errors import HookrunError, listed
from hookrun.run.experiment.metrics.losses import NEXT_TOKEN_LOSSES
from hookrun.run.experiment.metrics.metrics import KL, LOGIT_DIFFERENCE, WHERE
from hookrun.run.experiment.metrics.rows import (
    BatchRows,
    are_labels,
    label_counts,
    main_tensor,
    of_samples,
    of_tokens,
    own_token_scores,
    precise,
)
from hookrun.run.experiment.prepared import Prepared
from hookrun.run.experiment.run_values import CaptureRows, RunReferences
from hookrun.run.experiment.task import max_rows_of, metric_tokens_of, metrics_of
from hookrun.run.passes.average import Average
from hookrun.run.passes.batches import Batch
from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import Run

_PATHS = ("logits", "[0]", "out")
"""The paths of the scores in an output with several tensors, in order of preference."""


def predicted_rows(run: Run, split: Split) -> CaptureRows:
    """The predictions of a run of task=predict for a split. HookrunError if there are none."""
    scores = run.predictions
    if scores is None:
        raise HookrunError(f"the run {run.path} has no predictions: name a run of task=predict")
    if not isinstance(scores, StoredCapture):
        path = (
            next((each for each in _PATHS if each in scores), None) if isinstance(scores, Mapping) else None
        )
        if path is None:
            inside = listed(list(scores), 6)
            raise HookrunError(f"the predictions of the run {run.path} hold no scores, but {inside}")
        scores = scores[path]
    chosen = ((scores.split_numbers == SPLITS.index(split)) | (scores.split_numbers < 0)).nonzero().squeeze(1)
    if not len(chosen):
        raise HookrunError(f"the run {run.path} predicted no sample of the split {split!r}")
    return CaptureRows(scores, f"predictions of the run {run.path}", chosen, resample=False)


_UNUSED = torch.Generator()
"""An argument of `CaptureRows.of` that is not used, since no samples are drawn."""

LABELS = "labels"


def choose_tokens(rule: Rule, call: CallTokens, batch: Batch, *, decodes: bool = False) -> Chosen:
    """The tokens of a batch that a rule chooses, as if the batch were one call of the model. HookrunError.

    decodes: they are the tokens of the decoder of an encoder-decoder
    """
    real = torch.ones(call.rows, call.columns, dtype=torch.bool) if call.mask is None else call.mask
    of = Pass(
        call,
        real=real,
        ids=call.ids,
        prompt=call.columns,
        new_from=0,
        number=0,
        session=None,
        spans=batch.spans if any(True for each in rule.tokens.filters for _ in each.spans) else {},
        by_hand=True,
        decodes=decodes,
    )
    try:
        return rule.choose(of, (call.columns,), batch.ids)
    except ValueError as error:
        raise HookrunError(f"task.{error}") from error


class Measuring:
    """Computes the metrics of a task.

    without_hooks: a metric compares with the same model without its hooks, so both outputs are needed
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._reader = prepared.loss.reader
        self._names = {metric.name for metric in prepared.metrics}
        scored = prepared.task.scored()
        self._needs_answers = LOGIT_DIFFERENCE in self._names | {scored and scored[1].score}
        tokenizer, self._rule = prepared.data.tokenizer, None
        self._has_decoder = tokenizer is not None and DECODER_IDS in parameters_of(prepared.model)
        if (tokens := metric_tokens_of(prepared.task)) is not None:
            texts, _ = texts_of(tokens, "task", FoundTokenizer(tokenizer))
            self._rule = Rule(tokens, False, texts)
        kl = next((metric for metric in prepared.metrics if metric.name == KL), None)
        self.without_hooks = kl is not None and kl.against is None
        against = None if kl is None else kl.against
        self._predicted = None if against is None else RunReferences.of(prepared.experiment).open(against)
        self._predicted_rows = dict[Split, CaptureRows]()

    def average(self, share: int = 1) -> Average:
        """A new Average of the task's metrics, without samples; it may keep 1/share of `task.max_rows`."""
        most = max_rows_of(self._prepared.task) // share
        return Average(self._prepared.metrics, self._prepared.loss, most)

    def require_all(self, values: Mapping[str, float]) -> None:
        """Raise HookrunError if a metric of `task.metrics` has no value, since no sample or token had a target."""
        if metrics_of(self._prepared.task) is None and self._rule is None:
            return
        means = [metric.name for metric in self._prepared.metrics if metric.over is None]
        for name in [name for name in means if name not in values]:
            at = " at the tokens of task.tokens" if self._rule is not None else ""
            raise HookrunError(
                f"{WHERE}: {name!r} has no value, because nothing is to be predicted{at}; logit_difference and kl are "
                "computed at any token"
            )

    def add(
        self, average: Average, loss: Tensor | None, output: Any, batch: Batch, others: Any = None
    ) -> None:
        """Add a batch to `average`.

        loss:   the mean loss of the batch; None: not computed
        others: the output of the model without its hooks, if a metric compares with it
        """
        weight = None
        if not batch.data.of_tokens:
            rows = self.rows(output, batch, others)
            weight = int(batch.weight_without(self._prepared.loss.ignored))
        elif metrics_of(self._prepared.task) is None and self._rule is None:
            target = batch.target
            named = self._reader.named(output)
            chosen = batch.labels[: len(batch.ids)] != IGNORED
            by_token = of_tokens(named, target, chosen, torch.zeros_like(target), all_targets=True)
            rows = BatchRows(None, target) if by_token is None else by_token
        else:
            rows = self.rows(output, batch, others)
            weight = int(batch.weight)
            if loss is not None and self._rule is not None and self._prepared.loss.name in NEXT_TOKEN_LOSSES:
                weight = len(rows.with_targets)
                loss = self._loss(rows)
        average.add(loss, rows, weight=weight, ids=batch.ids, split=batch.split)

    def rows(self, output: Any, batch: Batch, others: Any = None) -> BatchRows:
        """The rows of a batch from which metrics are computed: its samples, or the tokens of `task.tokens`.

        others: the output of the model without its hooks, if a metric compares with it
        """
        paths = dict.fromkeys(metric.of for metric in self._prepared.metrics)
        found = {path: self._rows(output, batch, others, path) for path in (None, *paths)}
        return replace(found.pop(None), of_paths={path: rows for path, rows in found.items() if path})

    def _rows(self, output: Any, batch: Batch, others: Any, path: Target | None) -> BatchRows:
        """The rows as they are read at a metric's own path, or at `train.output`."""
        named = self._reader.named(output, path)
        if batch.data.of_tokens:
            found = self._tokens(named, batch)
        else:
            found = of_samples(named, self._known(batch.targets), batch.target, self._reader.scores)
            if found.scores is not None and are_labels(found.scores, batch.targets):
                found = replace(found, counts=label_counts(self._known(batch.labels)))
        return self._compared(found, batch, self._reader.named(others, path)) if KL in self._names else found

    def _known(self, target: Tensor) -> Tensor:
        """The targets, with IGNORED where the loss ignores them."""
        ignored = self._prepared.loss.ignored
        return target if ignored in (None, IGNORED) else target.masked_fill(target == ignored, IGNORED)

    def _loss(self, rows: BatchRows) -> Tensor:
        """The mean loss of the chosen tokens, in float32 or float64; 0 if there are none."""
        chosen = rows.with_targets
        total = torch.zeros((), device=chosen.targets.device)
        with torch.no_grad():
            for part in chosen.parts():
                mean = self._prepared.loss(part.scores[None], part.targets[None])
                total = total + precise(mean) * len(part.targets)
        return total / max(len(chosen), 1)

    def scored(self, output: Any, batch: Batch) -> BatchRows:
        """The rows of the chosen tokens, whose scores keep their gradient. HookrunError as `add` raises it."""
        named = self._reader.named(output)
        rows = self._tokens(named, batch)
        return replace(rows, scores=main_tensor(named).flatten(0, 1))

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def _tokens(self, output: Any, batch: Batch) -> BatchRows:
        """The rows of the chosen tokens; of an encoder-decoder, of its decoder's tokens.

        Raises HookrunError if the output has no scores for tokens, or a sample no answers that a metric needs.
        """
        inputs: Any = batch.inputs
        labels = inputs.get(LABELS)
        decodes = self._has_decoder and labels is not None
        target = labels if decodes else batch.target
        real = labels != IGNORED if decodes else inputs[MASK] != 0
        positions = real.cumsum(1) - 1
        if self._rule is None:
            chosen = (target if decodes else batch.labels[: len(batch.ids)]) != IGNORED
        else:
            real, *ids = read_together([real] if decodes else [real, inputs[IDS].to(torch.int64)])
            call = CallTokens(real.shape[0], real.shape[1], ids[0] if ids else None, real)
            chosen = torch.zeros(target.shape, dtype=torch.bool, device="cpu")
            chosen[choose_tokens(self._rule, call, batch, decodes=decodes).on(chosen.device)] = True
        rows = of_tokens(output, target, chosen, positions, all_targets=self._rule is None)
        if rows is None:
            raise HookrunError(f"{WHERE}: the model's output has no score for each token at each position")
        if not self._needs_answers:
            return rows
        if decodes and self._rule is None:
            raise HookrunError(
                f"{WHERE}: {LOGIT_DIFFERENCE!r} needs one token of the answer, and the decoder's answer has more: set "
                "task.tokens=0"
            )
        # The right answer of a sample is its first token to be predicted.
        first = (target != IGNORED).to(torch.uint8).argmax(1, keepdim=True)
        answers = target.gather(1, first).squeeze(1)
        if batch.wrong is None or bool((answers == IGNORED).any()):
            raise HookrunError(f"{WHERE}: {LOGIT_DIFFERENCE!r}: a sample has no right or no wrong answer")
        answers, wrong = (each.to(rows.targets.device)[rows.samples] for each in (answers, batch.wrong))
        return replace(rows, answers=answers, wrong=wrong)

    # ---- comparison with other predictions -------------------------------------------------------------------------

    def _compared(self, rows: BatchRows, batch: Batch, others: Any) -> BatchRows:
        """The rows with the scores to compare them with. HookrunError if these have another shape."""
        if rows.scores is None or rows.scores.dim() != 2:
            return rows
        if self._predicted is not None:
            if batch.split not in self._predicted_rows:
                self._predicted_rows[batch.split] = predicted_rows(self._predicted, batch.split)
            scores: Tensor | None = self._predicted_rows[batch.split].of(batch.ids, _UNUSED)
        else:
            scores = (
                own_token_scores(others)
                if batch.data.of_tokens
                else of_samples(others, batch.targets, batch.target, self._reader.scores).scores
            )
        if scores is None or scores.dim() < 2:
            raise HookrunError(f"{WHERE}: 'kl': the model without its hooks returns no scores")
        there, shape = scores.flatten(0, -2), list(rows.scores.shape)
        if list(there.shape) != shape:
            raise HookrunError(
                f"{WHERE}: 'kl': the scores have shape {shape}, and those to compare with {list(there.shape)} (rows, "
                "classes)"
            )
        return replace(rows, others=there.to(rows.scores.device))
