"""The action `init`, and the initialisers of torch.nn.init by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from hookrun.engine.actions.base import HookSite
from hookrun.engine.actions.fields import Seed
from hookrun.engine.actions.own_parameters import OnOwnParameters
from hookrun.engine.actions.values import as_data, copy_of
from hookrun.engine.validation import Section

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

Name = Literal[
    "constant_",
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "sparse_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]
_DIMENSIONS = {
    "dirac_": range(3, 6),
    "eye_": range(2, 3),
    "sparse_": range(2, 3),
    **dict.fromkeys(
        ("kaiming_normal_", "kaiming_uniform_", "orthogonal_", "xavier_normal_", "xavier_uniform_"),
        range(2, 65),
    ),
}
"""How many dimensions a tensor must have for the initialiser; the others take any tensor."""


class Initialiser(Section):
    """A function of torch.nn.init: its name, its arguments, and the seed of its random numbers."""

    name: Name
    args: Annotated[dict[str, Any], BeforeValidator(copy_of), PlainSerializer(as_data)] = {}
    seed: Seed = None

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the function takes a tensor with so many dimensions."""
        return self.name not in _DIMENSIONS or len(shape) in _DIMENSIONS[self.name]

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Why it cannot fill a tensor of that shape, or None."""
        import torch

        if "generator" in self.args:
            return f"{self.name} draws from the generator of `seed`: leave `generator` out of `args`"
        try:
            inspect.signature(getattr(torch.nn.init, self.name)).bind(None, **self.args)
        except TypeError as error:
            return f"args: {self.name}: {error}"
        if not self.fits(shape):
            return f"{self.name} does not take a tensor of shape {list(shape)}"
        small = [*shape[:1], *(min(size, 2) for size in shape[1:])]  # `dirac_` divides the first dimension
        try:
            self.fill(torch.empty(small), 0)
        except ValueError as error:
            return f"args: {error}"
        return None

    def fill(self, tensor: Tensor, seed: int) -> None:
        """Fill the tensor in place, with the same numbers on every device. ValueError for arguments that do not fit."""
        import torch

        if not tensor.numel():
            return
        function, args = getattr(torch.nn.init, self.name), dict(self.args)
        if "generator" in inspect.signature(function).parameters:
            args["generator"] = torch.Generator("cpu").manual_seed(seed)
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # `sparse_` draws from this one, too
            try:
                tensor.copy_(function(new, **args))
            except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
                raise ValueError(f"{self.name}: {error}") from error


class Init(Initialiser, OnOwnParameters):
    """Initialise parameters of the module, in place, by a function of torch.nn.init.

    name:       the function, such as `xavier_uniform_`, `kaiming_normal_`, `orthogonal_` or `constant_`
    args:       its other arguments by name
    seed:       seed of the random numbers; by default derived from the experiment's seed
    parameters: a name or a list of names; by default all of the module's own that the function takes: `xavier_uniform_`
                needs two dimensions and leaves out a bias

    Each parameter has a generator of its own, Generator().manual_seed(seed + crc32(name)): the order of the modules and
    the device do not matter. The name is the first one in the model, also for a parameter that modules share.
    """

    action_name = "init"

    def takes(self, parameter: Parameter) -> bool:
        """Whether the function takes it."""
        return self.fits(parameter.shape)

    def editor(self, site: HookSite) -> Callable[[str, Parameter], object]:
        """A function that initialises a parameter."""
        return lambda name, parameter: self.fill(parameter, site.seed_of(name, self.seed))
