"""The action `add_parameter`."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hookrun.engine.actions.base import Action, Edit, HookSite, add_parameter, added_otherwise, was_added
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.init import Initialiser
from hookrun.engine.actions.values import Value, fixed_shape
from hookrun.engine.hook_types import APPLY, HookType
from hookrun.engine.values.tensors import broadcast_error, broadcasts, ordinary_tensors

if TYPE_CHECKING:
    from torch.nn import Module


_MOST_ELEMENTS = 2**28
"""One GiB of float32."""
_MOST_DIMENSIONS = 64


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"found {name!r}, expected a name: letters, digits and _, no digit first")
    return name


def _sizes(raw: Any) -> Any:
    if not isinstance(raw, list | tuple):
        raise ValueError(f"found {raw!r}, expected a list of sizes, such as [10]; [] is a single number")
    if len(raw) > _MOST_DIMENSIONS:
        raise ValueError(f"found {len(raw)} sizes, expected at most {_MOST_DIMENSIONS}")
    return raw


def _not_too_large(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"the parameter would have more than {_MOST_ELEMENTS:,} elements")
    return shape


class AddParameter(Action):
    """Register a new parameter on the module; it is trained and saved with the model.

    name:  the attribute by which the module and other hooks (`linear`) find it
    shape: a list of sizes; [] is a single number
    value: the initial value: a number, or values that broadcast to the shape
    init:  draw the initial values instead: `{name: xavier_uniform_, args: {gain: 2.0}, seed: 0}`, as the action `init`

    The parameter has the dtype and device of the module's first floating-point parameter or buffer, or PyTorch's
    defaults if there is none. If an earlier installation added a parameter of that name, it is kept with its values.
    """

    action_name = "add_parameter"
    hook_types = frozenset({APPLY})
    scope = "module"
    name: Annotated[str, AfterValidator(_identifier), Meaning.ADDED_NAME]
    shape: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, le=_MOST_ELEMENTS)], ...],
        BeforeValidator(_sizes),
        AfterValidator(_not_too_large),
    ]
    value: Value = 0.0
    init: Initialiser | None = None

    @model_validator(mode="after")
    def _value_fits(self) -> AddParameter:
        if self.init is not None and "value" in self.model_fields_set:
            raise ValueError("give value or init, not both")
        shape = fixed_shape(self.value)
        if shape is not None and not broadcasts(shape, self.shape):
            raise ValueError(broadcast_error(shape, self.shape))
        return self

    def incompatibility(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """A parameter of that name from an earlier installation must have this shape, and `init` must take it."""
        if not was_added(module, self.name):
            return None if self.init is None else self.init.misfit(self.shape)
        return added_otherwise(module, self.name, self.shape)

    def build(self, site: HookSite) -> Edit:
        """A function that registers the parameter."""
        import torch
        from torch.nn.parameter import is_lazy

        def add(module: Module) -> None:
            tensors = (
                tensor for tensor in chain(module.parameters(), module.buffers()) if not is_lazy(tensor)
            )
            like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
            with ordinary_tensors():
                new = torch.empty(self.shape, dtype=like.dtype, device=like.device)
                if self.init is None:
                    new.copy_(site.constant("value")(new))
                else:
                    self.init.fill(new, site.seed_of(self.name, self.init.seed))
                problem = add_parameter(module, self.name, torch.nn.Parameter(new))
            if problem is not None:
                raise ValueError(problem)

        return add
