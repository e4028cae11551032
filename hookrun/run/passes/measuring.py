"""Chooses the rows of a model's output of which a task's metrics are computed, and adds batches to the means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookrun.data.info import Split
from hookrun.data.samples import IGNORED
from hookrun.engine.plan.texts import FoundTokenizer, texts_of
from hookrun.engine.runtime.tokens.calls import DECODER_IDS, IDS, MASK, CallTokens, Pass, parameters_of
from hookrun.engine.runtime.tokens.choice import Chosen, Rule
from hookrun.engine.values.index import Target
from hookrun.engine.values.tensors import read_together
from hookrun.errors import HookrunError
from hookrun.run.experiment.metrics.losses import NEXT_TOKEN_LOSSES
from hookrun.run.experiment.metrics.metrics import KL, LOGIT_DIFFERENCE, WHERE
from hookrun.run.experiment.metrics.predictions import predicted_rows
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
from hookrun.store.reader import Run

_UNUSED = torch.Generator()
"""An argument of `CaptureRows.of` that is not used, since no samples are drawn."""

LABELS = "labels"


def choose_tokens(rule: Rule, call: CallTokens, batch: Batch, *, decodes: bool = False) -> Chosen:
    """The tokens of a batch that a rule chooses, as if the batch were one call of the model. HookrunError.

    decodes: they are the tokens of the decoder of an encoder-decoder
    """
    real = call.mask
    if real is None:
        real = torch.ones(call.rows, call.columns, dtype=torch.bool)
    names_spans = any(rule_filter.spans for rule_filter in rule.tokens.filters)
    of = Pass(
        call,
        real=real,
        ids=call.ids,
        prompt=call.columns,
        new_from=0,
        number=0,
        session=None,
        spans=batch.spans if names_spans else {},
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
        task = prepared.task
        self._prepared = prepared
        self._loss = prepared.loss
        self._reader = prepared.loss.reader
        self._paths = {metric.of for metric in prepared.metrics if metric.of is not None}
        names = {metric.name for metric in prepared.metrics}
        scored = task.scored()
        self._needs_answers = LOGIT_DIFFERENCE in names or (
            scored is not None and scored[1].score == LOGIT_DIFFERENCE
        )
        tokenizer = prepared.data.tokenizer
        self._has_decoder = tokenizer is not None and DECODER_IDS in parameters_of(prepared.model)
        self._rule: Rule | None = None
        tokens = metric_tokens_of(task)
        if tokens is not None:
            texts, _ = texts_of(tokens, "task", FoundTokenizer(tokenizer))
            self._rule = Rule(tokens, False, texts)
        # by default loss and accuracy of everything that is to be predicted
        self._is_default = metrics_of(task) is None and self._rule is None
        self._compares = KL in names
        self._predicted: Run | None = None
        self.without_hooks = False
        for metric in prepared.metrics:
            if metric.name == KL and metric.against is None:
                self.without_hooks = True
            elif metric.name == KL and metric.against is not None:
                self._predicted = RunReferences.of(prepared.experiment).open(metric.against)
        self._predicted_rows = dict[Split, CaptureRows]()

    def average(self, share: int = 1) -> Average:
        """A new Average of the task's metrics, without samples; it may keep 1/share of `task.max_rows`."""
        most = max_rows_of(self._prepared.task) // share
        return Average(self._prepared.metrics, self._loss, most)

    def require_all(self, values: Mapping[str, float]) -> None:
        """Raise HookrunError if a metric of `task.metrics` has no value, since no sample or token had a target."""
        if self._is_default:
            return
        at = " at the tokens of task.tokens" if self._rule is not None else ""
        for metric in self._prepared.metrics:
            if metric.over is None and metric.name not in values:
                raise HookrunError(
                    f"{WHERE}: {metric.name!r} has no value, because nothing is to be predicted{at}; logit_difference "
                    "and kl are computed at any token"
                )

    def add(
        self, average: Average, loss: Tensor | None, output: Any, batch: Batch, others: Any = None
    ) -> None:
        """Add a batch to `average`.

        loss:   the mean loss of the batch; None: not computed
        others: the output of the model without its hooks, if a metric compares with it
        """
        if batch.data.of_tokens and self._is_default:
            target = batch.target
            chosen = batch.labels[: len(batch.ids)] != IGNORED
            positions = torch.zeros_like(target)
            rows = of_tokens(self._reader.named(output), target, chosen, positions, all_targets=True)
            if rows is None:
                rows = BatchRows(None, target)
            average.add(loss, rows, ids=batch.ids, split=batch.split)
            return
        rows = self.rows(output, batch, others)
        weight = int(batch.weight_without(self._loss.ignored))
        if loss is not None and self._rule is not None and self._loss.name in NEXT_TOKEN_LOSSES:
            weight = len(rows.with_targets)
            loss = self._token_loss(rows)
        average.add(loss, rows, weight=weight, ids=batch.ids, split=batch.split)

    def rows(self, output: Any, batch: Batch, others: Any = None) -> BatchRows:
        """The rows of a batch from which metrics are computed: its samples, or the tokens of `task.tokens`.

        others: the output of the model without its hooks, if a metric compares with it
        """
        rows = self._rows(output, batch, others, None)
        if not self._paths:
            return rows
        return replace(rows, of_paths={path: self._rows(output, batch, others, path) for path in self._paths})

    def _rows(self, output: Any, batch: Batch, others: Any, path: Target | None) -> BatchRows:
        """The rows as they are read at a metric's own path, or at `train.output`."""
        named = self._reader.named(output, path)
        if batch.data.of_tokens:
            rows = self._tokens(named, batch)
        else:
            targets = self._with_ignored(batch.targets)
            rows = of_samples(named, targets, batch.target, self._reader.scores)
            if rows.scores is not None and are_labels(rows.scores, batch.targets):
                rows = replace(rows, counts=label_counts(self._with_ignored(batch.labels)))
        if self._compares:
            return self._compared(rows, batch, self._reader.named(others, path))
        return rows

    def _with_ignored(self, target: Tensor) -> Tensor:
        """The targets, with IGNORED where the loss ignores them."""
        ignored = self._loss.ignored
        if ignored is None or ignored == IGNORED:
            return target
        return target.masked_fill(target == ignored, IGNORED)

    def _token_loss(self, rows: BatchRows) -> Tensor:
        """The mean loss of the chosen tokens, in float32 or float64; 0 if there are none."""
        chosen = rows.with_targets
        total = torch.zeros((), device=chosen.targets.device)
        with torch.no_grad():
            for part in chosen.parts():
                mean = self._loss(part.scores[None], part.targets[None])
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
            known = labels if decodes else batch.labels[: len(batch.ids)]
            chosen = known != IGNORED
        else:
            read = [real] if decodes else [real, inputs[IDS].to(torch.int64)]
            real, *ids = read_together(read)
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
        return self._with_answers(rows, target, batch.wrong)

    def _with_answers(self, rows: BatchRows, target: Tensor, wrong: Tensor | None) -> BatchRows:
        """The rows with the answers of their samples. The right one is the sample's first token to be predicted."""
        first = (target != IGNORED).to(torch.uint8).argmax(1, keepdim=True)
        answers = target.gather(1, first).squeeze(1)
        if wrong is None or bool((answers == IGNORED).any()):
            raise HookrunError(f"{WHERE}: {LOGIT_DIFFERENCE!r}: a sample has no right or no wrong answer")
        device = rows.targets.device
        samples = rows.samples
        return replace(rows, answers=answers.to(device)[samples], wrong=wrong.to(device)[samples])

    # ---- comparison with other predictions -------------------------------------------------------------------------

    def _compared(self, rows: BatchRows, batch: Batch, others: Any) -> BatchRows:
        """The rows with the scores to compare them with. HookrunError if these have another shape."""
        if rows.scores is None or rows.scores.dim() != 2:
            return rows
        scores: Tensor | None
        if self._predicted is not None:
            if batch.split not in self._predicted_rows:
                self._predicted_rows[batch.split] = predicted_rows(self._predicted, batch.split)
            scores = self._predicted_rows[batch.split].of(batch.ids, _UNUSED)
        elif batch.data.of_tokens:
            scores = own_token_scores(others)
        else:
            scores = of_samples(others, batch.targets, batch.target, self._reader.scores).scores
        if scores is None or scores.dim() < 2:
            raise HookrunError(f"{WHERE}: 'kl': the model without its hooks returns no scores")
        scores = scores.flatten(0, -2)
        if scores.shape != rows.scores.shape:
            raise HookrunError(
                f"{WHERE}: 'kl': the scores have shape {list(rows.scores.shape)}, and those to compare with "
                f"{list(scores.shape)} (rows, classes)"
            )
        return replace(rows, others=scores.to(rows.scores.device))
