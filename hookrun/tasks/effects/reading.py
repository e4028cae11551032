"""The metric of each sample, read from the output of a pass over several copies of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.hook_types import FORWARD_PRE
from hookrun.run_values import computable
from hookrun.runtime.tokens.calls import DECODER_IDS, parameters_of
from hookrun.tasks.effects.moved import parts_of
from hookrun.tasks.metrics.measuring import Measuring
from hookrun.tasks.metrics.metrics import LOSS, PERPLEXITY
from hookrun.tasks.metrics.rows import BatchRows, RowPart, main_tensor, own_token_scores
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.prepare import Prepared
from hookrun.values.containers import rebuild, tensors


class Reading:
    """Computes the metric for the samples of a batch.

    head: the linear layer that computes the scores for tokens; it runs at the tokens only at which the metric is read.
          None: the model's whole output is computed
    """

    def __init__(self, prepared: Prepared, measuring: Measuring, head: nn.Module | None) -> None:
        self.metric = prepared.metrics[0]
        self._loss, self._measuring, self._head = prepared.loss, measuring, head
        self._source: BatchRows | None = None
        self._sizes = set[int]()

    def begin(self, batch: Batch, others: Any) -> None:
        """Set the batch; `others` is the output without hooks, if the metric compares with it."""
        self._batch, self._others, self._source = batch, others, None
        if self._head is not None:
            shape = (*batch.target.shape, next(self._head.parameters()).shape[0])
            self._choose(torch.empty(1, 1, 1, device=batch.target.device).expand(shape))

    def see(self, output: Any) -> None:
        """Take note of the output of the unedited pass."""
        self._sizes = {tensor.shape[0] for tensor in tensors(output) if tensor.dim()}
        if self._source is None:
            self._choose(output)

    def _choose(self, output: Any) -> None:
        rows = self._measuring.rows(output, self._batch, self._others)
        of_targets = ("labels",) if rows.samples is None else ("labels", "tokens")
        self._source = rows.with_targets if self.metric.rows in of_targets else rows

    @contextmanager
    def of_rows_only(self, copies: int) -> Iterator[None]:
        """Within the block the head computes only the rows of which the metric is read."""
        if self._head is None:
            yield
            return
        assert self._source is not None and self._source.chosen is not None
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
        assert source is not None
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
        assert source is not None
        if source.samples is None:
            return self._shown(self._of_samples(copy, source))
        column = self._of_tokens(copy, source)
        places = source.samples.to(column.device)
        sums = column.new_zeros(len(self._batch.ids)).index_add(0, places, column)
        counts = column.new_zeros(len(self._batch.ids)).index_add(0, places, torch.ones_like(column))
        return self._shown(sums / counts)

    def _shown(self, values: Tensor) -> Tensor:
        return values.exp() if self.metric.name == PERPLEXITY else values

    def _of_tokens(self, scores: Tensor, source: BatchRows) -> Tensor:
        assert source.samples is not None
        others = None if source.others is None else computable(source.others[source.chosen])
        if self.metric.of_rows is not None:
            part = RowPart(computable(scores), source.targets, source.answers, source.wrong, others)
            return self._fitting(self.metric.of_rows(part), source)
        if self.metric.name == LOSS:
            of_each = torch.func.vmap(self._loss)
            of_tokens: Tensor = of_each(computable(scores)[:, None, None], source.targets[:, None, None])
            return of_tokens
        assert self.metric.of_batch is not None
        numbers, places = source.samples.unique(return_inverse=True)
        of_each_sample = [
            self.metric.of_batch(scores[places == number], source.targets[places == number])
            for number in range(len(numbers))
        ]
        column = torch.stack(of_each_sample)
        return column[places.to(column.device)]

    def _of_samples(self, output: Any, source: BatchRows) -> Tensor:
        if self.metric.of_rows is not None:
            others = None if source.others is None else computable(source.others)
            fits = source.scores is not None
            part = RowPart(computable(main_tensor(output)), source.targets, others=others) if fits else None
            return self._fitting(None if part is None else self.metric.of_rows(part), source)
        function = self._loss if self.metric.name == LOSS else self.metric.of_batch
        assert function is not None
        alone = (
            (rebuild(output, partial(_row, len(source), number)), source.targets[number : number + 1])
            for number in range(len(source))
        )
        return torch.stack([function(*sample).reshape(()) for sample in alone])

    def _fitting(self, column: Tensor | None, source: BatchRows) -> Tensor:
        if column is None:
            there = f"the targets have shape {list(source.targets.shape)}, {source.targets.dtype}"
            raise HookrunError(f"task.metric: {self.metric.name!r} needs {self.metric.needs}; {there}")
        return column if column.is_floating_point() else column.float()


def _row(rows: int, number: int, leaf: Any) -> Any:
    """One sample as a batch of one; half precision becomes float32."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != rows:
        return leaf
    own = leaf[number : number + 1]
    return computable(own) if own.is_floating_point() else own


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
    if a.shape != b.shape:
        return False
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    share = 2e-5 if b.dtype in (torch.float32, torch.float64) else 3e-2
    return torch.allclose(a, b, rtol=share, atol=share * scale, equal_nan=True)
