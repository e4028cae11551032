"""A fake site without the runtime: it supplies what an action asks for, and records what the action gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from hookrun.engine.actions import Action
from hookrun.engine.actions.base import HookContext, Measured
from hookrun.engine.actions.rules import Rules
from hookrun.engine.actions.user_code import Recorded
from hookrun.engine.actions.values import InlineFunction, at_step
from hookrun.engine.hook_types import FORWARD
from hookrun.engine.runtime.faults import Faulty
from hookrun.engine.runtime.snapshot import copied
from hookrun.engine.values.tensors import check_broadcast, scalars


def _softened(value: Tensor, temperature: float = 1.0) -> Tensor:
    return value / temperature


class FakeSite:
    """emitted: (path, record) of every record; kept: captured values; verdicts: (ok, message, policy) of checks."""

    def __init__(
        self,
        action: Action,
        module: nn.Module | None = None,
        args: tuple[Any, ...] = (),
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.action = action
        self.hook_name, self.hook_type, self.path = "h", FORWARD, "fc"
        self.seed = 5
        self.reads_arguments = self.reads_before = self.stores_rows = False
        self.before: Tensor | None = torch.zeros(())
        self.module = module if module is not None else nn.Identity()
        self.args = args
        self.values = values or {}
        self.bias = nn.Parameter(torch.zeros(()))
        self.emitted = list[tuple[str | None, dict[str, Any]]]()
        self.kept = list[Any]()
        self.verdicts = list[tuple[Tensor, str, str]]()

    def constant(self, field: str) -> Callable[[Tensor], Tensor]:
        value = self.values.get(field)
        source = torch.tensor(getattr(self.action, field), dtype=torch.float64) if value is None else value

        def constant(like: Tensor) -> Tensor:
            found = source.to(device=like.device, dtype=like.dtype)
            check_broadcast(found, like)
            return found

        return constant

    def prepared(self, field: str, prepare: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        value = self.values.get(field)
        with unset_fake_temporarily():
            ready = prepare(
                torch.tensor(getattr(self.action, field), dtype=torch.float64) if value is None else value
            )
        return lambda like: ready.to(device=like.device, dtype=like.dtype)

    def operand(self, field: str) -> Callable[[Tensor], Tensor | float]:
        if self.action.trains:
            self.bias = nn.Parameter(torch.tensor(getattr(self.action, field)))

            def trained(like: Tensor) -> Tensor:
                check_broadcast(self.bias, like)
                return self.bias.to(like)

            return trained
        value = at_step(getattr(self.action, field), 0)
        if not isinstance(value, float):
            return self.constant(field)
        exact = scalars(value)
        return lambda like: exact.get(like.dtype, value)

    def folder(self, field: str) -> Any:
        raise NotImplementedError  # read for a real site only

    def point(self, name: str) -> nn.Module:
        return nn.Identity()

    def number(self, field: str) -> Callable[[], float]:
        given = getattr(self.action, field)
        return lambda: float(given)

    def function(self, field: str) -> Any:
        """The function that the action was given, or a stand-in for any name."""
        given = getattr(self.action, field)
        return given if isinstance(given, InlineFunction) else InlineFunction(_softened)

    @contextmanager
    def context(self) -> Iterator[HookContext]:
        recorded = Recorded()
        args = ("h", "forward", "fc", self.module, "train", 0, 0, 0, "")
        more = (recorded.add, self.args)
        yield HookContext(*args, self.generator, *more)
        self.emitted += [(None, recorded.numbers)] if recorded.numbers else []

    def adopted(self, own: Callable[..., Any], *, given: bool) -> Callable[..., Any]:
        return own

    def seed_of(self, parameter: str, seed: int | None) -> int:
        return (self.seed if seed is None else seed) + crc32(f"{self.path}.{parameter}".encode())

    def keep_zero(self, parameter: str, choose: Callable[[Tensor], Tensor]) -> None:
        tensor = self.module.get_parameter(parameter)
        tensor.masked_fill_(~choose(torch.ones(tensor.shape, dtype=torch.bool)), 0)

    def register_state(self, own: Any) -> None:
        """Does nothing: no state is saved."""

    def register_fold(self, folding: Any) -> None:
        """Does nothing: what is accumulated goes into `kept`."""

    def channels(self, rows: Tensor, dim: int | None) -> tuple[int, str]:
        return 1, ""

    def accumulate(self, values: Tensor, units: Sequence[int], places: Sequence[int], text: str) -> None:
        self.kept.append(values)

    def drawn(self, like: Tensor, fill: Callable[[Tensor, Generator], Tensor]) -> Tensor:
        return fill(torch.empty_like(like), self.generator(like))

    def generator(self, like: Tensor) -> Generator:
        return Generator(like.device).manual_seed(5)

    def flipped(
        self, x: Tensor, bits: Sequence[int], draw: Callable[[int, Any], Any], *, by_sample: bool
    ) -> Tensor:
        if isinstance(x, FakeTensor):
            return x.clone()
        there = Faulty(x, None, None, {})
        return there.flipped(there.drawn(None, bits, draw, 5, by_sample))[0]

    def rebuild(self, value: Any, change: Callable[[Tensor], Any]) -> Any:
        return copied(value, change)

    def emit(
        self, data: Mapping[str, Any] | Measured, path: str | None = None, *, show: bool = False
    ) -> None:
        self.emitted.append((path, data.now(data.x, False) if isinstance(data, Measured) else dict(data)))

    def keep(self) -> Callable[..., None]:
        return lambda value, rows=None: self.kept.append(value)

    def chosen(self, keep: Any) -> Callable[[Any], Tensor]:
        return lambda shape: torch.arange(0, shape[0], keep.every)

    def judging(self, rules: Rules) -> Callable[[Tensor], None]:
        return lambda numbers: self.emitted.append((None, {"numbers": numbers}))

    def check_result(self, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
        self.verdicts.append((ok, message, policy))

    def about_check(self) -> dict[str, Any]:
        return {}


def build(action: Action, **site: Any) -> Callable[[Any], Any]:
    """The function that an action builds for a fake site."""
    return action.build(FakeSite(action, **site))
