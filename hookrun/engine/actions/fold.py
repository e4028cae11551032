"""The action `fold`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator
from pydantic import Tag as Kind

from hookrun.engine.actions.base import Action, ActionFolds, Edit
from hookrun.engine.actions.fields import OneOf, OneOrMore
from hookrun.engine.actions.statistics import Share
from hookrun.engine.hook_types import FORWARD, FORWARD_PRE, OUTPUT_GRAD
from hookrun.engine.validation import Section
from hookrun.engine.values.tensors import require_real, require_whole, widened
from hookrun.errors import close

if TYPE_CHECKING:
    from torch import Tensor


class Accumulated(OneOf):
    """What is accumulated with an option.

    quantiles: the numbers below which these shares of the values lie
    top:       so many of the largest values
    """

    quantiles: Annotated[tuple[Share, ...], Field(min_length=1)] = ()
    top: Annotated[int, Field(strict=True, ge=1, le=1000)] = 0

    def __str__(self) -> str:
        return f"top: {self.top}" if self.top else f"quantiles: {list(self.quantiles)}"


def _kind_of(raw: Any) -> str:
    """Whether an item is a name or a mapping; what needs an option is one, though written as a name."""
    meant = close(raw, ["mean", "cov", *Accumulated.model_fields], 1) if isinstance(raw, str) else []
    needs_option = bool(meant) and meant[0] in Accumulated.model_fields
    return "a mapping" if needs_option or isinstance(raw, Mapping | Accumulated) else "a name"


Item = Annotated[
    Annotated[Literal["mean", "cov"], Kind("a name")] | Annotated[Accumulated, Kind("a mapping")],
    Discriminator(_kind_of),
]


class FoldKeys(Section):
    """What is accumulated, of which units: the keys of the action, and of the task that reads captures."""

    of: Annotated[
        OneOrMore[Item], BeforeValidator(lambda raw: [raw] if isinstance(raw, Mapping | Accumulated) else raw)
    ] = ("mean",)
    per: Literal["channel", "element"] = "channel"
    dim: Annotated[int, Field(strict=True)] | None = None
    by: Literal["label"] | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.per == "element" and "cov" in self.of:
            raise ValueError("`cov` goes with `per: channel`: elements have too many pairs")
        if self.per == "element" and self.dim is not None:
            raise ValueError("`dim` goes with `per: channel`")
        options = [item for item in self.of if isinstance(item, Accumulated)]
        kinds = [item for item in self.of if isinstance(item, str)] + [bool(item.top) for item in options]
        if len(set(kinds)) < len(kinds):
            raise ValueError("`of` names the same twice")
        return self

    def build(self, site: ActionFolds) -> Edit:
        """A function that adds the rows of each tensor."""
        from hookrun.engine.values.folding import Folding, Wanted

        top = 0
        at: tuple[float, ...] = ()
        for item in self.of:
            if isinstance(item, Accumulated):
                top = item.top or top
                at = item.quantiles or at
        folding = Folding(Wanted("cov" in self.of, top, at))
        site.register_fold(folding)

        def fold(x: Tensor) -> None:
            require_whole(x)
            require_real(x)
            rows = widened(x.detach())
            if self.per == "element":
                elements = rows.unsqueeze(1) if rows.dim() == 1 else rows
                site.accumulate(elements.flatten(1).unsqueeze(2), elements.shape[1:], (), "each element")
                return
            dim, text = site.channels(rows, self.dim)
            channels = rows.movedim(dim, 1).unsqueeze(-1)
            site.accumulate(channels.flatten(2), channels.shape[1:2], channels.shape[2:-1], text)

        return fold


class Fold(FoldKeys, Action):
    """Accumulate over the whole run, for each channel: mean, covariance, quantiles, largest values.

    of:  any of `mean`; `cov`, unbiased; `{quantiles: [0.01, 0.5]}`; `{top: 9}`, the largest values with their samples
         and positions, at most one of a sample, of equal ones that of the smaller sample
    per: `channel`: each index of `dim`, over samples and all other dimensions; or each `element` of a sample
    dim: the dimension of channels. By default the last one under `tokens` and of torch's own Linear, LayerNorm, RMSNorm
         and Embedding, and otherwise 1 (0 is the batch), which the plan tells; of a value with three dimensions it must
         be said
    by:  `label`: for each label of the samples by itself; in a loop of your own set `hooks.labels` before each batch

    Mean and covariance are exact in float64, and so are the largest values. Quantiles come from a sketch: they lie
    within log2(n / 1024) / 4096 of their rank for n values of a unit (0.25 % for a million), in whatever order the
    values come. Under `tokens` each token is a row, and padding does not count. A NaN makes mean, covariance and
    quantiles of its unit NaN, and is the largest value, as in torch.topk.
    """

    action_name = "fold"
    hook_types = frozenset({FORWARD, FORWARD_PRE, OUTPUT_GRAD})
    observes = True
    uses = ("fold",)

    @property
    def works_by_sample(self) -> bool:
        """The rows of the batch are what it accumulates."""
        return True

    @property
    def by_label(self) -> bool:
        """Whether each label has its own numbers."""
        return self.by == "label"
