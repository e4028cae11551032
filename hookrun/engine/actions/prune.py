"""The action `prune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from hookrun.engine.actions.base import HookSite
from hookrun.engine.actions.fields import OneOrMore, OwnName, Seed
from hookrun.engine.actions.own_parameters import OnOwnParameters
from hookrun.engine.actions.values import Value
from hookrun.engine.values.tensors import holds_data

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.nn.utils.prune import BasePruningMethod


def _amount(raw: Any) -> Any:
    is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
    if not is_number or not (raw >= 0 if isinstance(raw, int) else 0 <= raw <= 1):
        raise ValueError(
            f"found {raw!r}, expected a fraction from 0.0 to 1.0, or a whole number of elements or channels"
        )
    return raw


class Prune(OnOwnParameters):
    """Set a part of the elements of parameters to 0, and keep them there, as torch.nn.utils.prune does.

    amount:     how much of each parameter, as a fraction from 0.0 to 1.0 or as a number of elements or channels; of a
                parameter that an earlier hook has pruned, of what that has left
    method:     `l1_unstructured`: the elements of smallest absolute value; `ln_structured`: the channels of smallest
                norm; `random_unstructured` and `random_structured`: drawn at random
    importance_scores: a tensor of the parameter's shape, whose values are compared instead of the parameter's own
    n:          the p of the norm in `ln_structured`
    dim:        the dimension of the channels
    seed:       seed of the random methods, by default derived from the experiment's seed: the numbers are those after
                torch.manual_seed(seed + crc32(name)), by the first name of the parameter in the model
    parameters: a name or a list of names; null for all of the module's own

    While the hooks are installed the elements stay 0 in training: so do their gradients, before anything clips them,
    and whatever writes into the parameter. Afterwards they are ordinary elements that are 0.
    """

    action_name = "prune"
    amount: Annotated[int | float, BeforeValidator(_amount)]
    method: Literal["l1_unstructured", "random_unstructured", "ln_structured", "random_structured"] = (
        "l1_unstructured"
    )
    importance_scores: Value | None = None
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
            "importance_scores": not self.method.startswith("random"),
        }
        for key in goes.keys() & self.model_fields_set:
            if not goes[key]:
                raise ValueError(f"`{key}` does not go with {self.method}")
        if isinstance(self.importance_scores, float):
            raise ValueError(
                "importance_scores: found a number, expected one for each element of the parameter"
            )
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
        from torch.nn.utils.prune import PruningContainer

        scores = None if self.importance_scores is None else site.constant("importance_scores")
        container, method = PruningContainer(), self._method()
        container._tensor_name = method._tensor_name = ""  # they compare these names
        container.add_pruning_method(method)

        def prune(name: str, parameter: Parameter) -> None:
            if not parameter.numel():
                return
            weight = parameter.detach().cpu().contiguous()  # the same elements on every device
            if scores is not None:
                weight = scores(weight.to(torch.promote_types(weight.dtype, torch.float64)))
                if weight.shape != parameter.shape:
                    shapes = f"{list(weight.shape)}, and the parameter {name!r} {list(parameter.shape)}"
                    raise ValueError(f"importance_scores has shape {shapes}")

            def choose(free: Tensor) -> Tensor:
                # of fake tensors the elements that are left cannot be found
                one = container if holds_data(free) and not free.all() else method
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(site.seed_of(name, self.seed))
                    try:
                        mask: Tensor = one.compute_mask(weight, default_mask=free.cpu().to(weight.dtype))
                    except RuntimeError as error:  # of complex numbers torch compares only absolute values
                        raise ValueError(f"{self.method} of {weight.dtype}: {error}") from error
                return mask != 0

            site.keep_zero(name, choose)

        return prune

    def _method(self) -> BasePruningMethod:
        from torch.nn.utils import prune

        methods: dict[str, Callable[..., BasePruningMethod]] = {
            "l1_unstructured": prune.L1Unstructured,
            "random_unstructured": prune.RandomUnstructured,
            "ln_structured": prune.LnStructured,
            "random_structured": prune.RandomStructured,
        }
        of_channels = {"ln_structured": (self.n, self.dim), "random_structured": (self.dim,)}
        return methods[self.method](self.amount, *of_channels.get(self.method, ()))
