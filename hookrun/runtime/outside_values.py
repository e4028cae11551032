"""The values of an action's parameters: numbers, tensors from files and other runs, rows that belong to samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.given import GivenFunction
from hookrun.actions.own_code import on_tensor
from hookrun.actions.tensors import check_broadcast, holds_data
from hookrun.actions.values import OutsideValue
from hookrun.errors import HookError
from hookrun.plan.plan import PlannedHook
from hookrun.run_values import NotYetRun, Rows, Source
from hookrun.runtime.clock import Clock
from hookrun.runtime.current_call import CurrentCall
from hookrun.runtime.part import TensorPart
from hookrun.runtime.rng import Draws


class OutsideValues:
    """Turns a value into a function tensor -> the value in the tensor's dtype and on its device.

    hook:     the hook with the values
    where:    the hook and its module, for messages
    part:     the part of a tensor that the action acts on; None: all of it
    draws:    the hook's random draws, for `sample: resample`
    has_data: tensors hold real values; False in a trial run
    """

    def __init__(
        self,
        hook: PlannedHook,
        where: str,
        part: TensorPart | None,
        current: CurrentCall,
        clock: Clock,
        draws: Draws,
        has_data: bool,
    ) -> None:
        tokens = hook.spec.keys.tokens
        self._token_dim = None if tokens is None or tokens.on_pattern else tokens.dim or 1
        self._hook, self._where = hook.spec.name, where
        self._part, self._current = part, current
        self._clock, self._draws, self._has_data = clock, draws, has_data

    def constant(self, given: Any, value: Source | None) -> Callable[[Tensor], Tensor]:
        """A function tensor -> the value for it; with `at: same` the value's part.

        given: the value in the configuration
        value: the data that was read from a file or another run; None: `given` is the value itself
        """
        constant, part = self._whole_constant(given, value), self._part
        if part is None or not isinstance(given, OutsideValue) or given.at is None:
            return constant

        by_sample = value is not None and not isinstance(value, Tensor | GivenFunction | NotYetRun)

        def constant_part(like: Tensor) -> Tensor:
            whole = like if self._current.whole is None else self._current.whole
            value = constant(whole)
            if by_sample:
                value = self._with_token_dim(value, whole)
            check_broadcast(value, whole)
            return part.of(value.expand(whole.shape))

        return constant_part

    def _with_token_dim(self, rows: Tensor, whole: Tensor) -> Tensor:
        """Add a token dimension to rows that were captured at one token each, so that they broadcast over tokens."""
        dim = self._token_dim
        if dim is None or rows.dim() != whole.dim() - 1 or dim >= whole.dim():
            return rows
        of_one_token = (*whole.shape[:dim], *whole.shape[dim + 1 :])
        return rows.unsqueeze(dim) if rows.shape == of_one_token else rows

    def _whole_constant(self, given: Any, value: Source | None) -> Callable[[Tensor], Tensor]:
        """The function for the whole value; a constant is converted once for each dtype and device."""
        if isinstance(value, GivenFunction):
            return self._computed(value)
        if isinstance(value, NotYetRun):
            return self._unknown(value)
        if value is not None and not isinstance(value, Tensor):
            return self._rows(value)
        source = value if value is not None else torch.tensor(given, dtype=torch.float64)
        made = dict[tuple[torch.dtype, torch.device], Tensor]()

        def constant(like: Tensor) -> Tensor:
            if torch.compiler.is_dynamo_compiling():  # a tensor made inside a graph must not be cached
                return source.to(device=like.device, dtype=like.dtype)
            key = (like.dtype, like.device)
            if (found := made.get(key)) is None:
                found = source.to(device=like.device, dtype=like.dtype)
                if holds_data(found) or not self._has_data:  # a traced tensor must not be cached either
                    made[key] = found
            return found

        return constant

    def _unknown(self, source: NotYetRun) -> Callable[[Tensor], Tensor]:
        """An empty tensor of the argument's shape, for a trial run; HookError in a real one."""

        def unknown(like: Tensor) -> Tensor:
            if self._has_data:
                raise HookError(
                    f"{self._where}: the run {source.name!r} that its value comes from was not made"
                )
            return like.new_empty(like.shape)

        return unknown

    def _rows(self, source: Rows) -> Callable[[Tensor], Tensor]:
        """The rows of the samples of the current batch."""

        def rows(like: Tensor) -> Tensor:
            chosen, whole = self._current.chosen, like is self._current.whole
            if chosen is None and not whole and not self._keeps_samples():
                raise HookError(
                    f"{self._where}: `index` picks rows of the batch, and the value has a row for each sample: "
                    "add at: same to the value"
                )
            if not self._has_data:  # a trial run has no real samples
                return like.new_empty((like.shape[0], *source.shape) if like.dim() else source.shape)
            samples = self._clock.samples
            if samples is None:
                raise HookError(
                    f"{self._where}: it takes a value for each sample, and does not know which samples these are: "
                    "set hooks.samples before each batch"
                )
            draw = self._draws.generator(torch.device("cpu"))
            if chosen is not None:  # each position, or each sequence, of a sample gets the sample's row
                places = chosen.of.samples_of_rows(len(samples)) if whole else chosen.rows.samples
                return source.of(samples, draw)[places].to(device=like.device, dtype=like.dtype)
            if not like.dim() or like.shape[0] != len(samples):
                shape = list(like.shape)
                raise HookError(
                    f"{self._where}: the batch has {len(samples)} samples, the tensor has shape {shape}"
                )
            return source.of(samples, draw).to(device=like.device, dtype=like.dtype)

        return rows

    def _keeps_samples(self) -> bool:
        """Whether the part that the action is given has a row for each sample, as the whole tensor has."""
        return (
            self._part is None
            or self._current.whole is None
            or self._part.keeps_samples(self._current.whole.dim())
        )

    def _computed(self, function: GivenFunction) -> Callable[[Tensor], Tensor]:
        """The result of a user's function for the tensor, detached: no gradient flows through it."""
        call = on_tensor(self._hook, function.code, function.target)

        def computed(like: Tensor) -> Tensor:
            with torch.no_grad():
                found = call(like.detach())
            if not isinstance(found, Tensor | int | float):
                raise HookError(
                    f"{self._where}: '{function}' returned an object of type {type(found).__name__}, "
                    "expected a tensor or a number"
                )
            return torch.as_tensor(found).detach().to(device=like.device, dtype=like.dtype)

        return computed
