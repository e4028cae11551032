"""One backward pass for each batch without training: computes its score, and clears the gradients afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.values.containers import differentiable, rebuild
from hookrun.engine.values.tensors import computable
from hookrun.errors import SpecError, counted, spec_error
from hookrun.run.experiment.metrics.losses import ACTIVATION, TrainLoss, score_function
from hookrun.run.experiment.metrics.rows import BatchRows, main_tensor
from hookrun.run.experiment.task_keys import BackwardPass
from hookrun.run.passes.batches import Batch
from hookrun.run.passes.context import RunContext
from hookrun.run.passes.measuring import Measuring

Score = Callable[[Any, Tensor, Batch | None], Tensor]
"""(the model's output for a batch, its targets [B, ...], the batch; None: an example of the data) -> the sum of its
samples' scores, without dimensions."""


@dataclass(frozen=True)
class Scoring:
    """Computes the score from which a backward pass starts. Raises SpecError if the output does not fit it.

    where:     the key path of the score
    loss:      the loss of `train.loss`
    measuring: chooses the tokens; None for a trial run, in which the sum of the output stands for what needs a batch
    """

    keys: BackwardPass
    where: str
    loss: TrainLoss
    measuring: Measuring | None = None

    def __call__(self, output: Any, target: Tensor, batch: Batch | None = None) -> Tensor:
        """The sum of the samples' scores, a tensor without dimensions."""
        score = self.of_samples(output, target, batch).sum()
        if not score.requires_grad:
            raise spec_error(
                self.where,
                "the score requires no gradient: neither a parameter of the model nor an input requires one",
                "freeze less of the model",
            )
        return score

    def of_samples(self, output: Any, target: Tensor, batch: Batch | None) -> Tensor:
        """[B]: the score of each sample; [1] if `output` has no row for each sample."""
        score = self.keys.score
        output = rebuild(self.loss.reader.named(output), _precise)
        scores = main_tensor(output)
        samples = target.shape[0]
        has_rows = scores.dim() > 0 and scores.shape[0] == samples
        if score == "output":
            return scores.reshape(samples if has_rows else 1, -1).sum(1)
        shape = list(scores.shape)
        if not has_rows:
            batch_size = counted(samples, "sample")
            what = f"the model returned shape {shape} for {batch_size}, expected a row for each sample"
            raise self._error(what, "score: output takes any shape")
        if score == "loss" or self.keys.is_own:
            return self._one_by_one(output, target)
        of_tokens = scores.dim() == 3 if batch is None else batch.data.of_tokens
        if of_tokens and batch is not None and self.measuring is not None:
            return self._of_tokens(self.measuring.scored(output, batch), samples)
        if scores.dim() != 2 + of_tokens:
            what = f"{score!r} needs an output [batch, classes], and the model returned {shape}"
            raise self._error(what, "use output or loss")
        return self._per_row(scores.flatten(0, -2), None if of_tokens else target.reshape(-1))

    def _error(self, what: str, hint: str, key: str = "score") -> SpecError:
        return spec_error(f"{self.where}.{key}", what, hint)

    def _of_tokens(self, rows: BatchRows, samples: int) -> Tensor:
        """[samples]: the sum of the scores of each sample's tokens."""
        if self.keys.score == "label":
            rows = rows.with_targets
        if not len(rows):
            hint = "set task.tokens, such as -1; `label` needs tokens that have a target"
            raise self._error("no sample of the batch has a token to score", hint)
        assert rows.scores is not None and rows.samples is not None
        values = self._per_row(rows.scores[rows.chosen], rows.targets, rows.answers, rows.wrong)
        return values.new_zeros(samples).index_add(0, rows.samples, values)

    def _per_row(
        self,
        scores: Tensor,
        target: Tensor | None,
        answers: Tensor | None = None,
        wrong: Tensor | None = None,
    ) -> Tensor:
        """[N]: the score of each row of scores [N, classes].

        target: [N]; None: not known in a trial run
        answers, wrong: [N], the right and the wrong answer of each row
        """
        score = self.keys.score
        if score == "class":
            number = self.keys.class_
            classes = scores.shape[1]
            if number is None or number >= classes:
                what = f"found {number}, and the model has {classes} classes"
                raise self._error(what, f"use a number from 0 to {classes - 1}", "class")
            return scores[:, number]
        if score == "top" or target is None:
            return scores.max(1).values
        if score == "label":
            return _at(scores, target.long())
        if answers is None or wrong is None:
            raise self._error(
                "'logit_difference' needs sequences of tokens with a right and a wrong answer",
                "use data=names, or data=prompts with the fields `answer` and `wrong`",
            )
        return _at(scores, answers) - _at(scores, wrong)

    def _one_by_one(self, output: Any, target: Tensor) -> Tensor:
        """[B]: each sample's loss or own function, computed alone: a mean over the batch would depend on its size."""
        name = self.loss.name
        if self.keys.score == "loss" and name in ("output", ACTIVATION):
            what = f"'loss' needs a loss of each sample, and with train.loss={name} the model returns one for the batch"
            raise self._error(what, "use output, top or class, or another train.loss")
        function: Callable[[Any, Tensor], Tensor] = self.loss
        if self.keys.is_own:
            if self.measuring is None:  # the user's code may look at values, which an example lacks
                return main_tensor(output).reshape(target.shape[0], -1).sum(1)
            function = self._user_function
        return BatchRows(None, target, output=output).one_by_one(function)

    @cached_property
    def _user_function(self) -> Callable[[Any, Tensor], Tensor]:
        return score_function(self.keys.score, f"{self.where}.score")


def _at(scores: Tensor, classes: Tensor) -> Tensor:
    """[N]: from scores [N, classes], that of one class in each row."""
    return scores.gather(1, classes[:, None]).squeeze(1)


def _precise(leaf: Any) -> Any:
    """A tensor in half precision as float32: a sum in half precision would be inexact."""
    return computable(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


@torch.no_grad()
def _reduce(context: RunContext) -> None:
    """With several ranks: sum the gradients of hooked parameters over the ranks, and run their hooks."""
    if not context.ranks.several:
        return
    hooked = context.reduced.parameters
    if hooked and not context.sharded:  # gradients of shards are summed already
        has_gradient = context.ranks.largest([parameter.grad is not None for parameter in hooked])
        for parameter, is_summed in zip(hooked, has_gradient, strict=True):
            if not is_summed:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            context.ranks.sum_([parameter.grad])
    context.reduced.run()


def forward_and_backward(context: RunContext, score: Score, batch: Batch) -> Any:
    """The model's output, detached, after a backward pass from the score; parameters have no `grad` afterwards.

    Floating-point inputs require a gradient too, so that a `backward` hook on the first module sees it.

    Returns None if this rank has no row of the batch.
    """
    if not len(batch.ids):
        if context.sharded and batch.pattern is not None:
            with context.silently(edit=True):
                forward_and_backward(context, lambda *args: score(*args) * 0, batch.pattern)
        else:
            _reduce(context)
        return None
    inputs = rebuild(batch.inputs, partial(differentiable, leaf=context.settings.compute.compile))
    try:
        with torch.enable_grad():
            output = context.forward(replace(batch, inputs=inputs))
            total = score(output, batch.target, batch)
        total.backward()
        _reduce(context)
    finally:
        context.model.zero_grad(set_to_none=True)
    return rebuild(output, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
