"""The random numbers of a site, each draw with a seed of its own."""

from __future__ import annotations

from functools import cached_property
from zlib import crc32

from torch import Generator, Tensor

from hookrun.engine.actions.fields import Meaning
from hookrun.engine.runtime.rng import Draws, Fill, derived_seed, drawn
from hookrun.engine.runtime.site_place import SitePlace
from hookrun.errors import HookError


class SiteDraws(SitePlace):
    """What draws at one module or parameter; the methods are described in actions/base.py."""

    @cached_property
    def seed(self) -> int:
        """For the hook at this module; the same in every run of the experiment."""
        return derived_seed(self._base_seed, self.hook_name, self.path)

    @cached_property
    def _hook_seed(self) -> int:
        return derived_seed(self._base_seed, self.hook_name)

    @property
    def _base_seed(self) -> int:
        seed: int | None = self.spec.action.value_of(Meaning.SEED)
        return self._given_seed if seed is None else seed

    @cached_property
    def _draws(self) -> Draws:
        numbers = self.calls if self.hook_type.phase == "forward" else None
        return Draws(self.seed, numbers)

    def prepare_draws(self) -> None:
        """Number the draws from here on. For a hook that draws: later several threads may ask for it at once."""
        self._draws.state_dict()

    def generator(self, like: Tensor) -> Generator:
        """A generator on the tensor's device, with a seed for this draw, so that a draw depends on its number only."""
        self._require("generator")  # activation checkpointing would recompute the call with other numbers
        if self.hook_type.sees_batch and self.clock.rows is not None:
            raise HookError(
                f"{self.where}: it draws random numbers for the rows of a batch, which would differ by rank: use "
                "compute.strategy=none"
            )
        return self._draws.generator(like.device)

    def drawn(self, like: Tensor, fill: Fill) -> Tensor:
        """Random numbers in shape, dtype and device of `like`."""
        self._require("drawn")
        rows = self.clock.rows if self.hook_type.sees_batch else None
        dim = self.batch.of(self.current.path)
        return drawn(like, fill, self._draws.generator(like.device), rows, dim)

    def seed_of(self, parameter: str, seed: int | None) -> int:
        tensor = getattr(self.module, parameter, None)
        names = (name for name, of_model in self.clock.model.named_parameters() if of_model is tensor)
        name = next(names, f"{self.path}.{parameter}" if self.path else parameter)
        return (self._hook_seed if seed is None else seed) + crc32(name.encode())

    def chance(self) -> float:
        """A number from 0 to 1 that decides whether this firing takes place; the same when the call is recomputed."""
        return self._draws.chance(self.spec.keys.when.seed)

    @property
    def draws(self) -> bool:
        """Whether the hook's effect here may depend on the number of its random draw."""
        return self.spec.draws_numbers or bool(self._values)

    @property
    def draws_place(self) -> tuple[dict[str, int], int]:
        """The position of the next random draw; another installation set to it draws the same numbers."""
        return self._draws.state_dict(), self.calls.total if self.calls is not None else 0

    @draws_place.setter
    def draws_place(self, place: tuple[dict[str, int], int]) -> None:
        draws, total = place
        self._draws.load_state_dict(draws)
        if self.calls is not None:
            self.calls.go_on_from(total)
