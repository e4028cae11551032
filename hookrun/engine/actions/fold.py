"""The action `fold`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import OneOrMore
from hookrun.engine.actions.statistics import QuantilesOf
from hookrun.engine.hook_types import FORWARD, FORWARD_PRE, OUTPUT_GRAD
from hookrun.engine.validation import Section
from hookrun.engine.values.tensors import require_real, require_whole, widened

if TYPE_CHECKING:
    from torch import Tensor


class TopOf(Section):
    """`{top: 9}`: the largest values, at most one of a sample, with their samples and positions."""

    top: Annotated[int, Field(strict=True, ge=1, le=1000)]


Folds = Literal["mean", "cov"] | QuantilesOf | TopOf


class Fold(Action):
    """Accumulate over the whole run, for each channel or element: mean, covariance, quantiles, largest values.

    of:  any of `mean`; `cov`, unbiased; `{quantiles: [0.01, 0.5]}`; `{top: 9}`, the largest values with their samples
         and positions, at most one of a sample, of equal ones that of the smaller sample
    per: `channel`: each index of `dim`, over samples and all other dimensions; or each `element` of a sample
    dim: the dimension of channels. By default the last one under `tokens`, and otherwise 1 (0 is the batch); of a value
         with three dimensions it must be said
    by:  `label`: for each label of the samples by itself; in a loop of your own set `hooks.labels` before each batch

    Mean and covariance are exact in float64, and so are the largest values. Quantiles come from a sketch: they lie
    within log2(n / 1024) / 4096 of their rank for n values of a unit (0.25 % for a million), in whatever order the
    values come. Under `tokens` each token is a row, and padding does not count.
    """

    action_name = "fold"
    hook_types = frozenset({FORWARD, FORWARD_PRE, OUTPUT_GRAD})
    observes = True
    uses = ("fold",)
    of: OneOrMore[Folds] = ("mean",)
    per: Literal["channel", "element"] = "channel"
    dim: Annotated[int, Field(strict=True)] | None = None
    by: Literal["label"] | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Fold:
        if self.per == "element" and "cov" in self.of:
            raise ValueError("`cov` goes with `per: channel`: elements have too many pairs")
        if self.per == "element" and self.dim is not None:
            raise ValueError("`dim` goes with `per: channel`")
        kinds = [item if isinstance(item, str) else type(item) for item in self.of]
        if len(set(kinds)) < len(kinds):
            raise ValueError("`of` names the same twice")
        return self

    @property
    def works_by_sample(self) -> bool:
        """The rows of the batch are what it accumulates."""
        return True

    @property
    def by_label(self) -> bool:
        """Whether each label has its own numbers."""
        return self.by == "label"

    def build(self, site: HookSite) -> Edit:
        """A function that adds the rows of each tensor."""
        from hookrun.engine.values.folding import Folding, Wanted

        top = [item.top for item in self.of if isinstance(item, TopOf)]
        at = [item.quantiles for item in self.of if isinstance(item, QuantilesOf)]
        folding = Folding(Wanted("cov" in self.of, sum(top), *at))
        site.register_fold(folding)

        def fold(x: Tensor) -> None:
            require_whole(x)
            require_real(x)
            rows = widened(x.detach())
            if self.per == "element":
                site.accumulate(rows.flatten(1).unsqueeze(2), rows.shape[1:], (), "each element")
                return
            dim, text = site.channels(rows, self.dim)
            rows = rows.movedim(dim, 1)
            site.accumulate(
                rows.flatten(2) if rows.dim() > 2 else rows.unsqueeze(2),
                rows.shape[1:2],
                rows.shape[2:],
                text,
            )

        return fold
