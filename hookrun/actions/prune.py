"""The action `prune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from hookrun.actions.base import HookSite
from hookrun.actions.fields import OneOrMore, OwnName, Seed
from hookrun.actions.own_parameters import OnOwnParameters

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.nn.utils.prune import BasePruningMethod


class Prune(OnOwnParameters):
    """Set a part of the elements of parameters to 0, in place, as torch.nn.utils.prune does.

    amount:     how much of each parameter, as a fraction from 0.0 to 1.0 or as a number of elements or channels
    method:     `l1_unstructured`: the elements of smallest absolute value; `ln_structured`: the channels of smallest
                norm; `random_unstructured` and `random_structured`: drawn at random
    n:          the p of the norm in `ln_structured`
    dim:        the dimension of the channels
    seed:       seed of the random methods, by default derived from the experiment's seed: the numbers are those after
                torch.manual_seed(seed + crc32(name)), by the first name of the parameter in the model
    parameters: a name or a list of names; null for all of the module's own

    It acts once: training moves the elements again, and a resumed run is not pruned again.
    """

    action_name = "prune"
    amount: Annotated[int, Field(strict=True, ge=0)] | Annotated[float, Field(strict=True, ge=0, le=1)]
    method: Literal["l1_unstructured", "random_unstructured", "ln_structured", "random_structured"] = (
        "l1_unstructured"
    )
    n: Annotated[float, Field(strict=True, gt=0)] = 2.0
    dim: Annotated[int, Field(strict=True)] = 0
    seed: Seed = None
    parameters: OneOrMore[OwnName] | None = ("weight",)

    @model_validator(mode="after")
    def _goes_together(self) -> Prune:
        goes = {
            "n": self.method == "ln_structured",
            "dim": self.method.endswith("_structured"),
            "seed": self.method.startswith("random"),
        }
        for key in goes.keys() & self.model_fields_set:
            if not goes[key]:
                raise ValueError(f"`{key}` does not go with {self.method}")
        return self

    def misfit(self, shape: Sequence[int]) -> str | None:
        """There must be so many elements or channels, and structured methods need two dimensions."""
        if not self.method.endswith("_structured"):
            size = math.prod(shape)
        elif len(shape) < 2 or not -len(shape) <= self.dim < len(shape):
            return f"{self.method} needs two dimensions and `dim` among them, and the shape is {list(shape)}"
        else:
            size = shape[self.dim]
        if isinstance(self.amount, int) and self.amount > size:
            return f"amount: there are {size} to prune, not {self.amount}; a fraction is written with a point: 1.0"
        return None

    def editor(self, site: HookSite) -> Callable[[str, Parameter], object]:
        """A function that prunes a parameter."""
        import torch

        method = self._method()

        def prune(name: str, parameter: Parameter) -> None:
            if not parameter.numel():
                return
            weight = parameter.detach().cpu()  # the same elements on every device
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(site.seed_of(name, self.seed))
                try:
                    mask = method.compute_mask(weight, default_mask=torch.ones_like(weight))
                except RuntimeError as error:  # of complex numbers torch compares only absolute values
                    raise ValueError(f"{self.method} of {weight.dtype}: {error}") from error
            parameter.masked_fill_(mask.to(parameter.device) == 0, 0)

        return prune

    def _method(self) -> BasePruningMethod:
        from torch.nn.utils import prune

        if self.method == "l1_unstructured":
            return prune.L1Unstructured(self.amount)
        if self.method == "random_unstructured":
            return prune.RandomUnstructured(self.amount)
        if self.method == "ln_structured":
            return prune.LnStructured(self.amount, self.n, self.dim)
        return prune.RandomStructured(self.amount, self.dim)
