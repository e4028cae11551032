"""The action `noise`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import NotNegative, Seed

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Noise(Action):
    """Add noise: x + std * n, with n Gaussian or uniform; multiplicative: x * (1 + std * n).

    std:  standard deviation of the noise, for every kind; for `multiplicative` that of the factor; for complex tensors
          that of both parts together, sqrt(E|n|²); it may follow the clock: `{from: 0, to: 0.1, steps: [0, 1000]}`
    kind: `gaussian` and `uniform` add to the tensor; `multiplicative` multiplies it by a Gaussian factor of mean 1
    seed: seed of the hook's own generator; by default derived from the experiment's seed

    The global random generators are not used. The gradient flows through x.
    """

    action_name = "noise"
    uses = ("drawn",)
    std: NotNegative = 0.1
    kind: Literal["gaussian", "uniform", "multiplicative"] = "gaussian"
    seed: Seed = None

    def build(self, site: HookSite) -> Edit:
        """A function x -> noisy x."""
        std, drawn = site.number("std"), site.drawn

        def normal(empty: Tensor, generator: Generator) -> Tensor:
            return empty.normal_(0.0, std(), generator=generator)

        def even(empty: Tensor, generator: Generator) -> Tensor:
            bound = math.sqrt(3.0) * std()  # on [-b, b] the standard deviation is b / sqrt(3)
            reach = bound / math.sqrt(2.0) if empty.is_complex() else bound  # of both parts
            return empty.uniform_(-reach, reach, generator=generator)

        fill = even if self.kind == "uniform" else normal

        def added(x: Tensor) -> Tensor:
            return drawn(x, fill).add_(x)

        def multiplicative(x: Tensor) -> Tensor:
            # Not x * (1 + noise): in half precision 1 + noise would round small noise away.
            return x.addcmul(x, drawn(x, fill))

        return multiplicative if self.kind == "multiplicative" else added
