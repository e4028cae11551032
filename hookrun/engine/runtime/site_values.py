"""The values of an action's parameters at a site, as functions of the tensor that they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hookrun.engine.actions.autoencoders import Autoencoder
from hookrun.engine.actions.base import was_added
from hookrun.engine.actions.user_code import on_tensor
from hookrun.engine.actions.values import InlineFunction, OutsideValue, PassValue, Ramp, at_step
from hookrun.engine.plan.outside import PendingRun, Rows
from hookrun.engine.runtime.checkpointing import require_no_checkpoint
from hookrun.engine.runtime.part import no_batch
from hookrun.engine.runtime.site_draws import SiteDraws
from hookrun.engine.values.tensors import (
    check_broadcast,
    computable,
    holds_data,
    in_form_of,
    ordinary_tensors,
    scalars,
)
from hookrun.errors import HookError


class SiteValues(SiteDraws):
    """The values of an action's parameters at one module or parameter; see actions/base.py."""

    def operand(self, field: str) -> Callable[[Tensor], Tensor | float]:
        action = self.spec.action
        if action.trains:
            return self._trained(field)
        value = getattr(action, field)
        if isinstance(value, Ramp):
            return self._following(value)
        if not isinstance(value, float):
            return self.constant(field)
        exact = scalars(value)
        return lambda x: exact.get(x.dtype, value)

    def number(self, field: str) -> Callable[[], float]:
        given = getattr(self.spec.action, field)
        clock = self.clock
        return lambda: float(at_step(given, clock.ramp_step))

    def constant(self, field: str) -> Callable[[Tensor], Tensor]:
        constant = self._constant(field)
        given = getattr(self.spec.action, field)
        hint = ""
        if self.part is not None and isinstance(given, OutsideValue) and given.at is None:
            hint = "; if it is of the whole tensor, add at: same to the value"

        def broadcast(x: Tensor) -> Tensor:
            value = constant(x)
            check_broadcast(value, x, hint)
            return value

        return broadcast

    def prepared(self, field: str, prepare: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        given = getattr(self.spec.action, field)
        source = self._values.get(field)
        if isinstance(source, PendingRun):
            return partial(self._unknown, source)
        varies = isinstance(given, OutsideValue) and (given.at is not None or isinstance(given.factor, Ramp))
        if varies or not (source is None or isinstance(source, Tensor)):
            constant = self._constant(field)
            return lambda like: prepare(constant(like))
        with unset_fake_temporarily(), ordinary_tensors(), torch.no_grad():
            try:
                ready = prepare(torch.tensor(given, dtype=torch.float64) if source is None else source)
            except ValueError as error:
                return partial(_refuse, str(error))  # a trial run reports it with those of other hooks
        return self._in_form(ready)

    def folder(self, field: str) -> tuple[Autoencoder, Callable[[Tensor], Mapping[str, Tensor]]]:
        source: Autoencoder = self._values[field]
        forms = {name: self._in_form(tensor) for name, tensor in source.tensors.items()}
        return source, lambda like: {name: form(like) for name, form in forms.items()}

    def _constant(self, field: str) -> Callable[[Tensor], Tensor]:
        """A function tensor -> the field's value in its dtype and on its device; with `at: same` the part of it."""
        given = getattr(self.spec.action, field)
        source = self._values.get(field)
        part = self.part
        constant = self._whole_constant(given, source)
        if not isinstance(given, OutsideValue):
            return constant
        if isinstance(given.factor, Ramp):
            constant = self._multiplied(constant, given.factor)
        if part is None or given.at is None:
            return constant

        def constant_part(like: Tensor) -> Tensor:
            whole = like if self.current.whole is None else self.current.whole
            dim = self.batch.of(self.current.path) if isinstance(source, Rows) else 0
            if dim is None:
                raise ValueError(no_batch(whole))
            batch_first = whole.movedim(dim, 0)
            value = constant(batch_first)
            if isinstance(source, Rows):
                value = self._with_token_dim(value, batch_first)
            check_broadcast(value, batch_first)
            return part.of(value.expand(batch_first.shape).movedim(0, dim))

        return constant_part

    def _whole_constant(self, given: Any, source: Any) -> Callable[[Tensor], Tensor]:
        """The function for the whole value."""
        match source:
            case InlineFunction():
                function = on_tensor(self.hook_name, source.code, source.target, computes=True)
                return partial(self._computed, function)
            case PendingRun():
                return partial(self._unknown, source)
            case PassValue():
                return partial(self._passed, source)
            case Tensor():
                return self._in_form(source)
            case None if isinstance(given, Ramp):
                return partial(_number_in_form, self._following(given))
            case None:
                return self._in_form(torch.tensor(given, dtype=torch.float64))
        return partial(self._rows, source, is_whole=given.at is not None)

    def _following(self, ramp: Ramp) -> Callable[[Tensor], Tensor | float]:
        """A function tensor -> the number at the present step; in a graph a tensor [], which each step fills."""
        clock = self.clock
        in_graphs = clock.followed_in_graphs(
            torch.zeros([], dtype=torch.float64), lambda: ramp.at(clock.ramp_step)
        )

        def following(x: Tensor) -> Tensor | float:
            if not torch.compiler.is_dynamo_compiling():
                return ramp.at(clock.ramp_step)
            return in_graphs.to(x.device) if x.dim() else in_graphs.to(x)

        return following

    def _multiplied(self, constant: Callable[[Tensor], Tensor], factor: Ramp) -> Callable[[Tensor], Tensor]:
        following = self._following(factor)
        return lambda like: in_form_of(constant(like) * following(like), like)

    def _with_token_dim(self, rows: Tensor, whole: Tensor) -> Tensor:
        """Add a token dimension to rows that were captured at one token each, so that they broadcast over tokens."""
        tokens = self.spec.keys.tokens
        if tokens is None or tokens.on_pattern:
            return rows
        dim = tokens.dim or 1
        of_one_token = (*whole.shape[:dim], *whole.shape[dim + 1 :])
        fits = dim < whole.dim() and rows.shape == of_one_token
        return rows.unsqueeze(dim) if fits else rows

    def _in_form(self, source: Tensor) -> Callable[[Tensor], Tensor]:
        """A function tensor -> the source in its dtype and on its device, converted once for each of them."""
        if source.is_inference():  # the spec was read or compiled under inference mode
            source = source.clone()
        made: dict[tuple[torch.dtype, torch.device], Tensor] = {}

        def constant(like: Tensor) -> Tensor:
            if torch.compiler.is_dynamo_compiling():  # a tensor made inside a graph must not be cached
                return in_form_of(source, like)
            key = (like.dtype, like.device)
            if (converted := made.get(key)) is None:
                with ordinary_tensors():
                    converted = in_form_of(source, like)
                if holds_data(converted) or not self.has_values:  # a traced tensor must not be cached either
                    made[key] = converted
            return converted

        return constant

    def _unknown(self, source: PendingRun, like: Tensor) -> Tensor:
        """An empty tensor of the argument's shape, for a trial run; HookError in a real one."""
        if self.has_values:
            raise HookError(f"{self.where}: the run {source.name!r} that its value comes from was not made")
        return like.new_empty(like.shape)

    def _rows(self, source: Rows, like: Tensor, *, is_whole: bool) -> Tensor:
        """The rows of the samples of the current batch. is_whole: `like` is not only the part that `tokens` selects."""
        if not self.has_values:  # a trial run has no real samples
            return like.new_empty((like.shape[0], *source.shape) if like.dim() else source.shape)
        samples = self.clock.samples
        chosen = self.current.chosen
        if samples is None:
            raise HookError(
                f"{self.where}: it takes a value for each sample, and does not know which samples these are: "
                "set hooks.samples before each batch"
            )
        rows = source.of(samples, self._draws.generator(torch.device("cpu")))
        if chosen is not None:  # each position, or each sequence, of a sample gets the sample's row
            of_rows = chosen.of.samples_of_rows(len(samples)) if is_whole else chosen.rows.samples
            rows = rows[of_rows]
        elif not like.dim() or like.shape[0] != len(samples):
            raise HookError(
                f"{self.where}: the batch has {len(samples)} samples, the tensor has shape {list(like.shape)}"
            )
        return in_form_of(rows, like)

    def _passed(self, value: PassValue, like: Tensor) -> Tensor:
        """What another hook has seen in this forward."""
        require_no_checkpoint()
        if (seen := self.clock.calls.forward.passed_on.get((value.hook, value.module))) is None:
            raise HookError(
                f"{self.where}: {value.hook} has not fired at {value.module or '(root)'} in this forward: it must fire "
                "before this hook, within the same outermost call of the model or of a part of it"
            )
        return in_form_of(seen, like)

    def _computed(self, function: Callable[[Tensor], Any], like: Tensor) -> Tensor:
        """The result of a user's function for the tensor, detached: no gradient flows through it."""
        with torch.no_grad():
            return in_form_of(torch.as_tensor(function(like.detach())).detach(), like)

    def _trained(self, field: str) -> Callable[[Tensor], Tensor]:
        """The added parameter as an operand, looked up in the module at each call: fully_shard replaces parameters.

        The first installation adds the parameter to the module.
        """
        name = str(self.spec.action.adds(self.hook_name))
        if not was_added(self.module, name):
            self._add(name, nn.Parameter(self._constant(field)(self.like).clone()))
        module = self.module

        def trained(x: Tensor) -> Tensor:
            parameter: Tensor = getattr(module, name).to(x)  # under autocast x may be of half precision
            check_broadcast(parameter, x)
            return parameter

        return trained


def _number_in_form(number: Callable[[Tensor], Tensor | float], like: Tensor) -> Tensor:
    """The present number as a tensor [] in dtype and on device of a tensor."""
    now = number(like)
    if isinstance(now, Tensor) or like.is_cpu:
        return in_form_of(torch.as_tensor(now, dtype=torch.float64), like)
    # made there: a number of the CPU would have to be copied at each firing; added, since filling refuses an overflow
    return (computable(like.new_zeros(())) + now).to(like.dtype)


def _refuse(problem: str, like: Tensor) -> Tensor:
    raise ValueError(problem)
