"""One action at one module or parameter: its function, its counters, what it needs from the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Generator, Tensor, nn

from hookrun import containers as tensors
from hookrun.actions.base import IN_FORWARD, Keeper, add_parameter, was_added
from hookrun.actions.check import verdict
from hookrun.errors import CheckFailed, HookError
from hookrun.plan.plan import PlannedHook
from hookrun.plan.rows import Rows
from hookrun.runtime.clock import Calls, Clock, chance, derived_seed
from hookrun.runtime.kept_samples import Choice

if TYPE_CHECKING:
    from hookrun.actions.keep import Keep


class Sink(Protocol):
    """Where what the actions see goes. The store has one, memory has one, the shape check has one.

    wants_calls: it reads which call of a module within one forward a value is of
    has_values:  tensors hold real values, which may be read
    stop:        why a check with policy `stop` asks for the end of the run, or None
    """

    wants_calls: bool
    has_values: bool
    stop: str | None

    def keeper(self, site: Site) -> Keeper:
        """A function that stores a value that the site captured."""

    def emit(self, record: dict[str, Any]) -> None:
        """Take a record; tensors in it are not read yet."""

    def fail(self, site: Site, what: str) -> None:
        """A site cannot do what its hook asks for: raise, or take note of it."""

    def settle(self) -> None:
        """Read what is pending."""


class Site:
    """Implements `hookrun.actions.base.Site`; made anew at each installation.

    fired:   how often the hook fired here (its schedule let it through)
    within:  path of the tensor that the hook is attached to, where a gradient hook is attached to each of several
    idle:    firings in which it found nothing to act on
    changed: elements that its edits changed, out of `total`, while the clock was counting
    """

    def __init__(
        self, hook: PlannedHook, path: str, module: nn.Module, clock: Clock, sink: Sink, seed: int
    ) -> None:
        self.spec = hook.spec
        self.hook_name = hook.spec.name
        self.hook_type = hook.spec.hook_type
        self.path = path
        self.module = module
        self.clock = clock
        self.sink = sink
        self.values = hook.values
        self.args: tuple[Any, ...] = ()
        self.within = ""
        self.at = ""
        self.calls: Calls | None = None
        self.of_call: int | None = None
        self.fired = 0
        self.idle = 0
        self.changed: Tensor | int = 0
        self.total = 0
        own_seed = getattr(hook.spec.action, "seed", None)
        seed = seed if own_seed is None else own_seed
        self.seed = derived_seed(seed, self.hook_name, path)
        self._hook_seed = derived_seed(seed, self.hook_name)
        self._draws = 0
        self._run = 0
        self._chances = 0
        self._generators = dict[torch.device, Generator]()

    @property
    def where(self) -> str:
        """For messages: ``hook 'clip_fc' (grad, clamp) on fc.weight``."""
        return f"hook {self.hook_name!r} ({self.hook_type}, {self.spec.action.action_name}) on {self.path or '(root)'}"

    @property
    def call(self) -> int:
        """The number of the module's call within the forward, from 0; a gradient belongs to the call that it is of."""
        if self.of_call is not None:
            return self.of_call
        return 0 if self.calls is None else self.calls.now.number

    def constant(self, field: str) -> Callable[[Tensor], Tensor]:
        """The value of `field` in the dtype and on the device of the argument, made once for each pair."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, Tensor):
            return self._rows(value)
        source = (
            value
            if value is not None
            else torch.tensor(getattr(self.spec.action, field), dtype=torch.float64)
        )
        made = dict[tuple[torch.dtype, torch.device], Tensor]()

        def constant(like: Tensor) -> Tensor:
            if torch.compiler.is_dynamo_compiling():  # what a graph makes is not for keeping
                return source.to(device=like.device, dtype=like.dtype)
            key = (like.dtype, like.device)
            if (found := made.get(key)) is None:
                found = made[key] = source.to(device=like.device, dtype=like.dtype)
            return found

        return constant

    def _rows(self, source: Rows) -> Callable[[Tensor], Tensor]:
        """A row for each sample of the batch under way."""

        def rows(like: Tensor) -> Tensor:
            if not self.sink.has_values:  # the samples of a shape check are not real
                return like.new_empty((like.shape[0], *source.shape) if like.dim() else source.shape)
            samples = self.clock.samples
            if samples is None:
                raise HookError(
                    f"{self.where}: it takes a value for each sample, and does not know which samples these are: "
                    "set hooks.samples before each batch"
                )
            if not like.dim() or like.shape[0] != len(samples):
                shape = list(like.shape)
                raise HookError(
                    f"{self.where}: the batch has {len(samples)} samples, the tensor has shape {shape}"
                )
            draw = Generator().manual_seed(derived_seed(self.seed, *self._draw()))
            return source.of(samples, draw).to(device=like.device, dtype=like.dtype)

        return rows

    def trainable(self, field: str) -> nn.Parameter:
        """The added parameter, as it is in the module; made on the first installation."""
        name = self.spec.action.adds(self.hook_name)
        if name is None:
            raise HookError(f"{self.where}: the action adds no parameter")
        if was_added(self.module, name):
            return self.module.get_parameter(name)
        nearby = chain(
            self.module.parameters(), self.clock.model.parameters()
        )  # an activation has none of its own
        like = next((p for p in nearby if p.is_floating_point()), torch.empty(0))
        parameter = nn.Parameter(self.constant(field)(like).clone())
        add_parameter(self.module, name, parameter)
        return parameter

    def generator(self, like: Tensor) -> Generator:
        """Seeded anew for each draw, so that a draw depends on which one it is alone."""
        device = like.device
        if (found := self._generators.get(device)) is None:
            found = self._generators[device] = Generator(device)
        found.manual_seed(derived_seed(self.seed, *self._draw()))
        return found

    def _draw(self) -> tuple[int, ...]:
        """Which draw it is: the n-th of a call of the module, or the n-th of all."""
        self._draws += 1
        if self.calls is None or self.hook_type not in IN_FORWARD:
            return (self._draws,)
        if self._run != self.calls.runs:
            self._run, self._draws = self.calls.runs, 0
        return self.calls.now.total, self._draws

    def chance(self) -> float:
        """A number from 0 to 1 that decides whether this firing takes place, the same where it is repeated."""
        if self.calls is not None and self.hook_type in IN_FORWARD:
            return chance(self.spec.keys.when.seed, self.seed, self.calls.now.total)
        self._chances += 1
        return chance(self.spec.keys.when.seed, self.seed, self._chances)

    def leaves(self, value: Any) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor and every None, with its path."""
        return tensors.leaves(value)

    def rebuild(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """The value with `change` applied to every member that is no container."""
        return tensors.rebuild(value, change)

    def emit(self, data: Mapping[str, Any], path: str | None = None) -> None:
        """Append a record."""
        clock = self.clock
        self.sink.emit(
            {
                "hook": self.hook_name,
                "module": self.path,
                "path": self.within + (self.at if path is None else path),
                "action": self.spec.action.action_name,
                "mode": clock.mode,
                "epoch": clock.epoch,
                "step": clock.step,
                "call": self.call,
                **data,
            }
        )

    def fail(self, what: str) -> None:
        """The hook cannot do what it asks for here: HookError, but for a shape check, which collects it."""
        self.sink.fail(self, what)

    def keep(self) -> Keeper:
        """Hand captured values to the sink."""
        return self.sink.keeper(self)

    def chosen(self, keep: Keep) -> Callable[[Sequence[int]], Tensor]:
        """The rows of the chosen samples; all of them where the samples are not real."""
        if not self.sink.has_values:
            return lambda shape: torch.arange(*shape[:1] or (1,), device="cpu")
        return Choice(keep, self.clock, self._hook_seed, self.where).rows

    def judge(self, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
        """`error` waits for the verdict and raises; the others leave it in a record that is read later."""
        record = {"ok": ok, "message": message, "policy": policy, "least": least, "largest": largest}
        if policy != "error" or not self.sink.has_values:
            self.emit(record)
        elif not ok:
            self.emit(record)
            at = f" at {self.at}" if self.at else ""
            when = f"epoch {self.clock.epoch}, step {self.clock.step}"
            raise CheckFailed(f"{self.where}{at}, {when}: {verdict(record)}")
