"""The metric of each sample, read from the output of a pass over several copies of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.hook_types import FORWARD_PRE
from hookrun.runtime.tokens.calls import DECODER_IDS, parameters_of
from hookrun.tasks.effects.moved import parts_of
from hookrun.tasks.metrics.average import losses, sample_by_sample
from hookrun.tasks.metrics.measuring import Measuring
from hookrun.tasks.metrics.metrics import LOSS, PERPLEXITY
from hookrun.tasks.metrics.rows import BatchRows, main_tensor, own_token_scores
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.prepare import Prepared
from hookrun.values.containers import tensors


class Reading:
    """Computes the metric for the samples of a batch.

    head: the linear layer that computes the scores for tokens; it runs at the tokens only at which the metric is read.
          None: the model's whole output is computed
    """

    def __init__(self, prepared: Prepared, measuring: Measuring, head: nn.Module | None) -> None:
        self.metric = prepared.metrics[0]
        self._loss, self._measuring, self._head = prepared.loss, measuring, head
        self._source: BatchRows
        self._sizes: set[int]

    def begin(self, batch: Batch, others: Any) -> None:
        """Set the batch; `others` is the output without hooks, if the metric compares with it."""
        self._batch, self._others = batch, others
        if self._head is not None:
            shape = (*batch.target.shape, next(self._head.parameters()).shape[0])
            self._choose(torch.empty(1, 1, 1, device=batch.target.device).expand(shape))

    def see(self, output: Any) -> None:
        """Take note of the output of the unedited pass."""
        self._sizes = {tensor.shape[0] for tensor in tensors(output) if tensor.dim()}
        if self._head is None:
            self._choose(output)

    def _choose(self, output: Any) -> None:
        rows = self._measuring.rows(output, self._batch, self._others)
        at_targets = self.metric.needs_target(of_tokens=rows.samples is not None)
        self._source = rows.with_targets if at_targets else rows

    @contextmanager
    def of_rows_only(self, copies: int) -> Iterator[None]:
        """Within the block the head computes only the rows of which the metric is read."""
        if self._head is None:
            yield
            return
        chosen = self._source.chosen

        def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
            hidden: Tensor = args[0]
            rows = hidden.reshape(copies, -1, hidden.shape[-1])[:, chosen]
            return (rows.flatten(0, 1),)

        handle = self._head.register_forward_pre_hook(take)
        try:
            yield
        finally:
            handle.remove()

    def copies_of(self, output: Any, copies: int, *, whole: bool = False) -> list[Any]:
        """What the metric is computed from, for each copy: the scores [n, classes] of the chosen tokens, or the output.

        whole: the output has the scores of all tokens, not only of those in `of_rows_only`
        """
        source = self._source
        if source.samples is None:
            return parts_of(output, copies, self._sizes) if copies > 1 else [output]
        scores = own_token_scores(output)
        assert scores is not None  # else the rows could not have been chosen
        if self._head is not None and not whole:
            return list(scores.unflatten(0, (copies, -1)).unbind())
        return [part[source.chosen] for part in scores.flatten(0, 1).chunk(copies)]

    def values(self, copy: Any) -> Tensor:
        """[B]: the metric of each sample, the mean over its tokens; NaN for a sample without a token to read."""
        source = self._source
        if source.samples is None:
            scores = None if source.scores is None else main_tensor(copy)
            rows, places = replace(source, scores=scores, output=copy), source.chosen
        else:
            others = None if source.others is None else source.others[source.chosen]
            rows, places = replace(source, scores=copy, others=others, chosen=None), source.samples
        values = self._of_rows(rows)
        if places is not None:
            places = places.to(values.device)
            counts = values.new_zeros(len(self._batch.ids)).index_add(0, places, torch.ones_like(values))
            values = torch.zeros_like(counts).index_add(0, places, values) / counts
        return values.exp() if self.metric.name == PERPLEXITY else values

    def _of_rows(self, rows: BatchRows) -> Tensor:
        """[n]: the metric of each row."""
        metric = self.metric
        if not len(rows):
            return torch.zeros(0)
        if metric.name == LOSS:
            return losses(rows, self._loss)
        if metric.of_batch is not None:
            return sample_by_sample(rows, metric.of_batch)
        assert metric.of_rows is not None
        columns = [metric.of_rows(part) for part in rows.parts()]
        known = [column for column in columns if column is not None]
        if not known:
            there = f"the targets have shape {list(rows.targets.shape)}, {rows.targets.dtype}"
            raise HookrunError(f"task.metric: {metric.name!r} needs {metric.needs}; {there}")
        column = torch.cat(known)
        return column if column.is_floating_point() else column.float()


def usable_head(prepared: Prepared, head: str | None) -> str | None:
    """The head of a model of tokens, unless a hook sees its input, its output, or the output of a module around it."""
    if head is None or prepared.data.tokenizer is None or DECODER_IDS in parameters_of(prepared.model):
        return None
    around = {head.rsplit(".", up)[0] for up in range(head.count(".") + 1)} | {""}
    sees = any(
        (match.path in around and hook.spec.hook_type is not FORWARD_PRE) or match.path == head
        for hook in prepared.plan.hooks
        for match in hook.matches
    )
    return None if sees else head


def same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two outputs are equal but for rounding."""
    pairs = zip(tensors(left), tensors(right), strict=True)
    return all(_close(a, b) for a, b in pairs if a.is_floating_point())


def _close(a: Tensor, b: Tensor) -> bool:
    scale = float(b.abs().nan_to_num(0.0, 0.0).max()) if b.numel() else 0.0
    share = 2e-5 if b.dtype in (torch.float32, torch.float64) else 3e-2
    return a.shape == b.shape and torch.allclose(a, b, rtol=share, atol=share * scale, equal_nan=True)
