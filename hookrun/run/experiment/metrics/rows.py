"""The rows of a batch from which metrics are computed: one for each sample, or for each chosen token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hookrun.data.samples import IGNORED
from hookrun.engine.values.containers import children, rebuild
from hookrun.engine.values.index import Target
from hookrun.engine.values.tensors import computable, on_device
from hookrun.errors import HookrunError

Kind = Literal["scores", "tokens", "values", "rows"]
"""What a tensor has to fit. `scores`: class scores of labels, or of class probabilities; `tokens`: scores of the next
token at each position; `values`: as many elements as the targets; `rows`: scores if the targets are labels, else
values."""

MOST_NUMBERS = 2**23
"""How many scores are converted to float32 at once, so that a large output is never copied as a whole."""


@dataclass(frozen=True)
class RowPart:
    """Some of the rows, in float32 or float64: what a metric takes.

    scores:  [n, ...], the model's output; [n, classes] for classes and tokens, not normalized
    targets: [n, ...]; IGNORED where nothing is to be predicted
    answers, wrong: [n] int64, the right and the wrong answer of each row's sample; None: not known
    others:  [n, classes], the scores to compare with; None: no comparison
    """

    scores: Tensor
    targets: Tensor
    answers: Tensor | None = None
    wrong: Tensor | None = None
    others: Tensor | None = None

    @property
    def fits_labels(self) -> bool:
        """Whether the targets are labels: one for each row, or for each pixel of it."""
        return not self.targets.is_floating_point() and are_labels(self.scores, self.targets)

    @property
    def of_labels(self) -> bool:
        """Whether there is one score for each class, and one label for each row."""
        return self.scores.dim() == 2 and self.targets.dim() == 1 and not self.targets.is_floating_point()

    @cached_property
    def log_probabilities(self) -> Tensor:
        """[n, classes]: the log-softmax of the scores."""
        return F.log_softmax(self.scores, dim=1)

    def at(self, values: Tensor, classes: Tensor) -> Tensor:
        """[n]: from values [n, classes], the value of one class in each row."""
        return values.gather(1, classes[:, None].long()).squeeze(1)


@dataclass(frozen=True)
class BatchRows:
    """N rows of a batch, on the model's device.

    scores:    [R, ...] in the model's dtype; None: the output has none that belong to rows
    targets:   [N, ...]; IGNORED where nothing is to be predicted
    chosen:    [N], the indices of the rows in `scores`; None: all of them
    samples:   [N], the index of each token's sample in the batch; None: the rows are the samples of the batch
    positions: [N], the position of each token, counted from its sample's first real token
    answers, wrong, others: see `RowPart`; `others` [R, classes] has all rows
    output:    for rows that are samples, the model's whole output
    counts:    [N] on the CPU, how many labels of each row are to be predicted; None: each row counts once
    of_paths:  path of a metric's own, `of` -> the rows that it is computed from
    given:     for rows that are samples, the targets as the data gives them; None: `targets`
    all_targets: it is known that each row has a target
    """

    scores: Tensor | None
    targets: Tensor
    chosen: Tensor | None = None
    samples: Tensor | None = None
    positions: Tensor | None = None
    answers: Tensor | None = None
    wrong: Tensor | None = None
    others: Tensor | None = None
    output: Any = None
    counts: Tensor | None = None
    of_paths: Mapping[Target | None, BatchRows] = field(default_factory=dict)
    given: Any = None
    all_targets: bool = False

    def __len__(self) -> int:
        return self.targets.shape[0]

    @cached_property
    def with_targets(self) -> BatchRows:
        """The rows that have a target."""
        if self.all_targets or self.targets.dim() != 1 or self.targets.is_floating_point():
            return self
        kept = self.targets != IGNORED
        if bool(kept.all()):
            return self
        columns: dict[str, Any] = {}
        for name in ("samples", "positions", "answers", "wrong"):
            column = getattr(self, name)
            if column is not None:
                columns[name] = column[kept]
        chosen = self.chosen
        if chosen is None:
            chosen = torch.arange(len(self), device=kept.device)
        # each row that is left has one target
        return replace(self, targets=self.targets[kept], chosen=chosen[kept], counts=None, **columns)

    def whole(self) -> tuple[Any, Any]:
        """The output and the targets of all rows; of tokens, their scores [N, classes] in the model's dtype."""
        if self.samples is None:
            return self.output, self.targets if self.given is None else self.given
        assert self.scores is not None
        if self.chosen is None:
            return self.scores, self.targets
        return self.scores[self.chosen], self.targets

    def of_sample(self, number: int) -> tuple[Any, Tensor]:
        """Output and target of one sample as a batch of one; half precision becomes float32."""

        def row(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != len(self):
                return leaf
            part = leaf[number : number + 1]
            return computable(part) if part.is_floating_point() else part

        return rebuild(self.output, row), self.targets[number : number + 1]

    def one_by_one(self, function: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """[N]: a function of a batch, of each sample as a batch of one, or of each token as a sequence of length 1."""
        if self.samples is None:
            values = [function(*self.of_sample(number)).reshape(()) for number in range(len(self))]
            return torch.stack(values)
        of_token = torch.func.vmap(function)
        columns: list[Tensor] = []
        for part in self.parts():
            scores = part.scores[:, None, None]
            columns.append(of_token(scores, part.targets[:, None, None]))
        return torch.cat(columns) if columns else torch.zeros(0)

    def parts(self) -> Iterator[RowPart]:
        """The rows in parts of at most `MOST_NUMBERS` scores; none if there are no scores."""
        if self.scores is None:
            return
        of_samples = self.samples is None and self.chosen is None and self.others is None
        if of_samples and 0 < self.scores.numel() <= MOST_NUMBERS:
            yield RowPart(computable(self.scores), self.targets)  # all at once
            return
        step = max(1, MOST_NUMBERS // max(1, math.prod(self.scores.shape[1:])))
        for start in range(0, len(self), step):
            part = slice(start, start + step)
            rows = part if self.chosen is None else self.chosen[part]
            columns: dict[str, Tensor] = {}
            if self.answers is not None and self.wrong is not None:
                columns["answers"] = self.answers[part]
                columns["wrong"] = self.wrong[part]
            if self.others is not None:
                columns["others"] = computable(self.others[rows])
            yield RowPart(computable(self.scores[rows]), self.targets[part], **columns)


def main_tensor(output: Any) -> Tensor:
    """The tensor of an output that is used for losses and predictions.

    It is the output itself, its member `logits`, `out` or `loss`, or its first tensor. HookrunError if there is none.
    """
    if isinstance(output, Tensor):
        return output
    members = dict(children(output))
    preferred = [members.get(name) for name in ("logits", "out", "loss")]
    for member in (*preferred, *members.values()):
        if isinstance(member, Tensor):
            return member
    raise HookrunError(
        f"the model returned an object of type {type(output).__name__} without tensors, so a loss cannot be computed"
    )


def are_labels(scores: Tensor, target: Tensor) -> bool:
    """Whether the shapes are those of class scores [B, classes, ...] and labels [B, ...], or [classes] and [].

    One class is not a choice.
    """
    if scores.dim() == 1 and not target.dim():
        return scores.shape[0] > 1
    return scores.dim() > 1 and scores.shape[1] > 1 and scores.shape[:1] + scores.shape[2:] == target.shape


def are_classes(scores: Tensor, target: Tensor) -> bool:
    """Whether both have the shape of one number for each class: [B, classes, ...]."""
    return scores.dim() > 1 and scores.shape[1] > 1 and scores.shape == target.shape


def are_values(scores: Tensor, target: Tensor) -> bool:
    """Whether the target can be reshaped to the scores without a change of order.

    They differ only in dimensions of size 1, or one of them has the elements of a sample in a row.
    """
    batched = scores.dim() > 0 and target.dim() > 0
    if scores.numel() != target.numel() or (batched and len(scores) != len(target)):
        return False
    ours = [size for size in scores.shape[1:] if size != 1]
    theirs = [size for size in target.shape[1:] if size != 1]
    return ours == theirs or len(ours) == 1 or len(theirs) == 1


def fits(scores: Tensor, target: Tensor, kind: Kind) -> bool:
    """Whether the scores have the shape that a loss of this kind needs for these targets; classes in dimension 1."""
    if kind == "tokens":
        return scores.dim() > 2 and scores.shape[:-1] == target.shape
    if kind == "values":
        return are_values(scores, target)
    if target.is_floating_point():
        return are_classes(scores, target)
    return are_labels(scores, target)


def label_counts(labels: Tensor) -> Tensor | None:
    """[B]: how many labels of each sample are to be predicted; None: one label of each.

    labels: [B, ...], or one label; IGNORED where nothing is to be predicted
    """
    is_predicted = labels != IGNORED
    if labels.is_floating_point() or (labels.dim() < 2 and bool(is_predicted.all())):
        return None
    if not labels.dim():
        return is_predicted.reshape(1).long()
    return is_predicted.reshape(len(labels), -1).sum(1)


def precise_dtype(value: Tensor) -> torch.dtype:
    """The dtype of its sums: float64; float32 on mps, which has no float64."""
    return torch.float32 if value.is_mps else torch.float64


def precise(value: Tensor) -> Tensor:
    """The value, detached, in float64; in float32 on mps."""
    return value.detach().to(precise_dtype(value))


def own_token_scores(output: Any) -> Tensor | None:
    """A model's scores for the next tokens: its output, the output's `logits`, or its first tensor.

    None if the output has named members without `logits`: another tensor may have the same shape by chance.
    """
    if isinstance(output, Tensor):
        return output
    members = dict(children(output))
    logits = members.get("logits")
    if isinstance(logits, Tensor):
        return logits
    if logits is None and all(isinstance(key, int) for key in members):
        for member in members.values():
            if isinstance(member, Tensor):
                return member
    return None


def first_tensor(output: Any, target: Tensor) -> Tensor | None:
    """The main tensor; None if the output has none."""
    if isinstance(output, Tensor) or any(isinstance(member, Tensor) for _, member in children(output)):
        return main_tensor(output)
    return None


def of_samples(
    output: Any,
    target: Tensor,
    given: Any = None,
    read: Callable[[Any, Tensor], Tensor | None] = first_tensor,
) -> BatchRows:
    """A row for each sample: its part of the tensor that is read, if that has one for each sample, and its target.

    Of graphs with a target for each node, a row is a node. Scores [classes] are those of the one sample of the batch.

    given: the targets as the data gives them; None: `target`
    """
    scores = read(output, given if isinstance(given, Tensor) else target)
    if scores is not None:
        scores = scores.detach()
        if scores.dim() == 1 and isinstance(given, Tensor) and not given.dim():
            scores = scores[None]
        if scores.dim() == 0 or scores.shape[0] != target.shape[0]:
            scores = None
    return BatchRows(scores, target, output=output, given=given)


def of_tokens(
    output: Any, target: Tensor, chosen: Tensor, positions: Tensor, *, all_targets: bool = False
) -> BatchRows | None:
    """A row for each chosen token, from scores [batch, length, classes]; None if the output has no such scores.

    target:    [batch, length], the next token of each; IGNORED where nothing is to be predicted
    chosen:    [batch, length] bool
    positions: [batch, length], counted from each sample's first real token
    all_targets: each chosen token has a target
    """
    scores = own_token_scores(output)
    if scores is None or scores.dim() != 3 or scores.shape[:2] != target.shape:
        return None
    samples, columns = chosen.nonzero(as_tuple=True)
    samples = on_device(samples, scores.device)
    columns = on_device(columns, scores.device)
    return BatchRows(
        scores.detach().flatten(0, 1),
        target[samples, columns],
        chosen=samples * target.shape[1] + columns,
        samples=samples,
        positions=positions.to(scores.device)[samples, columns],
        all_targets=all_targets,
    )
