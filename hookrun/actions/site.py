"""What an action and a user's own function see of the hook that fires."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hookrun.hook_types import HookType

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.nn import Module

    from hookrun.actions.fields import Keep
    from hookrun.actions.values import InlineFunction
    from hookrun.trust.load import Trusted


class Keeper(Protocol):
    """Stores a captured value.

    rows:   [k], the position in the batch of the sample of each row; None: the value is the whole batch
    tokens: the token of each row, if the hook has `tokens`; actions leave it out, the site adds it
    """

    def __call__(self, value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None: ...


class HookSite(Protocol):
    """One hook at one module or parameter, as its action sees it in `build` and in each firing.

    hook_name, hook_type: of the hook
    path:   path of the module or parameter
    module: the module, or the one that owns the parameter
    seed:   for the hook at this module; the same in every run of the experiment

    Of what follows, `args`, `generator`, `drawn` and `keep` are for actions that name them in `uses`; for others they
    raise HookError.
    """

    hook_name: str
    hook_type: HookType
    path: str
    module: Module
    seed: int

    def operand(self, field: str) -> Callable[[Tensor], Tensor | float]:
        """A function that gives the value of `field` as an operand for its argument; the fastest form of a number.

        ValueError if it does not broadcast to the argument's shape. With a `Trainable` field that is set it is the
        trained parameter.
        """

    def constant(self, field: str) -> Callable[[Tensor], Tensor]:
        """The same as a tensor in the dtype and on the device of the argument."""

    def function(self, field: str) -> Trusted | InlineFunction:
        """The user's own function that `field` names."""

    def context(self) -> HookContext:
        """The context of the current firing, for a user's own function."""

    def register_state(self, own: Any) -> None:
        """Register an object that the action keeps between firings: its `state_dict` goes into resumable states."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the current module call."""

    def generator(self, like: Tensor) -> Generator:
        """A generator of this site, seeded for this draw; the global generators are not used."""

    def drawn(self, like: Tensor, fill: Callable[[Tensor, Generator], Tensor]) -> Tensor:
        """A tensor like `like`, which `fill` fills in place with the generator of this draw.

        If several ranks share the batch, the numbers for a row are the same for any number of ranks.
        """

    def leaves(self, value: Any) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor, and every None, of a value with its path (empty for a bare tensor)."""

    def rebuild(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """The value with `change` applied to every member that is not a container.

        For actions that capture: a copy of the value with `change` applied to every tensor, also inside caches.
        """

    def emit(self, data: Mapping[str, Any], path: str | None = None, *, show: bool = False) -> None:
        """Append a record about the tensor at `path`, by default the one that the action was given.

        Tensors of zero or one dimension in `data` are read later, all together. With `show` they are read at once and
        the record is printed.
        """

    def check_result(self, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
        """Report the result of a check under the policy. ok, least, largest: [], the result and the extremes."""

    def keep(self) -> Keeper:
        """A function that stores a captured value."""

    def chosen(self, keep: Keep) -> Callable[[Sequence[int]], Tensor]:
        """A function from the shape of a batch to the positions [k] of the samples that are kept."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """The current firing of a hook, for a user's own function that takes a parameter `context`.

    hook:      the hook's name
    hook_type: when it fires: ``forward``, ``grad``, ...
    path:      path of the hooked module or parameter; empty for the model itself
    module:    the hooked module, or the module that owns the parameter
    mode:      ``train`` or ``eval``, the mode of the model
    epoch:     from 0
    step:      from 0: optimizer steps in training, batches otherwise
    call:      number of the module's call within one forward of the model, from 0, if calls are counted
    target:    the hook's `target`, the path of the tensor within the value; empty if it has none
    generator: tensor -> a generator on its device, seeded for this draw: the same numbers in every run, and when
               activation checkpointing repeats the call
    """

    hook: str
    hook_type: str
    path: str
    module: Module
    mode: str
    epoch: int
    step: int
    call: int
    target: str
    generator: Callable[[Tensor], Generator]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """N rows, on the CPU.

    samples:   [N] int64, the position of each row's sample in the batch
    numbers:   [N] int64, the id of that sample: as the loop gave it, else counted from 0 in the order of the calls
    positions: [N] int64, counted from the sample's first real token; on attention patterns the positions of the
               queries, or of the keys if the hook names keys only
    token_ids: [N] int64, the token at that position; -1 if it is not known
    keys:      [N] int64, the positions of the keys on attention patterns if the hook names both; else None
    """

    samples: Tensor
    numbers: Tensor
    positions: Tensor
    token_ids: Tensor
    keys: Tensor | None = None

    def at(self, rows: Tensor) -> TokenRows:
        """A part of the rows. rows: [k] int64, their indices."""
        keys = None if self.keys is None else self.keys[rows]
        return TokenRows(
            self.samples[rows], self.numbers[rows], self.positions[rows], self.token_ids[rows], keys
        )
