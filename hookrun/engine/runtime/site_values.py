"""What an action works with at one module or parameter: its values, its random numbers, parameters that it adds."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cached_property, partial
from itertools import chain
from typing import Any
from zlib import crc32

import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hookrun.engine.actions.base import add_parameter, remove_parameter, was_added
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.user_code import added_names, on_tensor
from hookrun.engine.actions.values import InlineFunction, OutsideValue, PassValue, Ramp, at_step
from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.plan.outside import PendingRun, Rows
from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.runtime.call_stack import Calls
from hookrun.engine.runtime.checkpointing import require_no_checkpoint
from hookrun.engine.runtime.clock import Clock, CurrentCall
from hookrun.engine.runtime.part import no_batch, part_of
from hookrun.engine.runtime.rng import Draws, Fill, derived_seed, drawn
from hookrun.engine.values.tensors import (
    check_broadcast,
    computable,
    holds_data,
    in_form_of,
    ordinary_tensors,
    scalars,
)
from hookrun.errors import HookError


class SiteValues:
    """The part of a `HookSite` that supplies its action; the methods are those of `HookSite` in actions/base.py.

    has_values: tensors hold real values, which may be read; False in a trial run
    current:    the state of the firing in each thread
    batch:      which dimension of the tensors is the batch
    captured:   the same of what it captures
    part:       the part of a tensor that the action acts on; None: all of it
    target_keys: where the target is in the value that the hook gets; None: the value itself
    """

    def __init__(
        self,
        hook: PlannedHook,
        path: str,
        module: nn.Module,
        clock: Clock,
        seed: int,
        calls: Calls | None,
        current: CurrentCall | None,
        *,
        has_values: bool,
    ) -> None:
        action = hook.spec.action
        self.spec = hook.spec
        self.hook_name = hook.spec.name
        self.hook_type = hook.spec.hook_type
        self.path = path
        self.module = module
        self.clock = clock
        self.calls = calls
        self.has_values = has_values
        self.current = CurrentCall(path, clock, calls) if current is None else current
        # output_grad is attached to the target itself
        target = None if self.hook_type is OUTPUT_GRAD else hook.spec.keys.target
        self.target_keys = None if target is None else target.keys
        self.batch, self.captured = hook.batch_of(path), hook.captured_of(path)
        self.part = part_of(hook, path, self.current, self.batch, once=action.observes)
        own_seed = action.value_of(Meaning.SEED)
        seed = seed if own_seed is None else own_seed
        self.seed = derived_seed(seed, self.hook_name, path)
        self._hook_seed = derived_seed(seed, self.hook_name)
        self._draws = Draws(self.seed, calls if self.hook_type.phase == "forward" else None)
        self._values = {field: values[path] for field, values in hook.values.items() if path in values}
        self._hook = hook

    @cached_property
    def where(self) -> str:
        """Hook and place for messages: ``hook 'clip_fc' (grad, clamp) on fc.weight``."""
        what = f"{self.hook_type}, {self.spec.action.action_name}"
        return f"hook {self.hook_name!r} ({what}) on {self.path or '(root)'}"

    def _require(self, member: str) -> None:
        """Raise HookError if the action uses a member of the site that it does not declare."""
        if member not in self.spec.action.uses:
            raise HookError(f"{self.where}: the action uses `{member}` of its site: name it in `uses`")

    # ---- values ------------------------------------------------------------------------------------------------

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
        given, clock = getattr(self.spec.action, field), self.clock
        return lambda: float(at_step(given, clock.ramp_step))

    def constant(self, field: str) -> Callable[[Tensor], Tensor]:
        constant = self._constant(field)

        def broadcast(x: Tensor) -> Tensor:
            value = constant(x)
            check_broadcast(value, x)
            return value

        return broadcast

    def prepared(self, field: str, prepare: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        given, source = getattr(self.spec.action, field), self._values.get(field)
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

    def _constant(self, field: str) -> Callable[[Tensor], Tensor]:
        """A function tensor -> the field's value in its dtype and on its device; with `at: same` the part of it."""
        given, source, part = getattr(self.spec.action, field), self._values.get(field), self.part
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
        made = dict[tuple[torch.dtype, torch.device], Tensor]()

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
        samples, chosen = self.clock.samples, self.current.chosen
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

    # ---- parameters that the hook adds to its module -------------------------------------------------------------

    @property
    def like(self) -> Tensor:
        """A parameter of the module or else the model, whose dtype and device the module's values most likely have."""
        parameters = chain(self.module.parameters(), self.clock.model.parameters())
        return next(
            (each for each in parameters if each.is_floating_point() and not each.is_meta), torch.empty(0)
        )

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

    def adopted(self, own: Callable[..., Any], *, given: bool) -> Callable[..., Any]:
        """The user's own module as a function; each call looks its tensors up in the hooked module, see `_trained`.

        Of modules that share a given object they are shared, too.
        """
        if not isinstance(own, nn.Module):
            return own
        module = self.module
        with unset_fake_temporarily():
            if given and not self.has_values:
                own = deepcopy(own)  # a trial run must leave no gradients in it
            elif self._hook.added and not given:
                own.to(self.like.device, self.like.dtype)
        every, added = added_names(own, self.hook_name), self._hook.added
        names = {tensor: name for tensor, name in every.items() if name in added}
        for tensor, name in names.items():
            if given and was_added(module, name):
                remove_parameter(module, name)  # the object has the present values
            self._add(name, tensor)
        links, buffers = list[tuple[dict[str, Any], str, str]](), list[tuple[dict[str, Any], str, str]]()
        for part in nn.Module.modules(own):
            for held in (part._parameters, part._buffers):
                links += [(held, leaf, names[tensor]) for leaf, tensor in held.items() if tensor in names]
            for leaf, buffer in part._buffers.items():
                if buffer in names:
                    buffers.append((part._buffers, leaf, names[buffer]))
                elif buffer is None and leaf not in part._non_persistent_buffers_set:
                    buffers.append((part._buffers, leaf, ""))

        def call(*args: Any, **kwargs: Any) -> Any:
            for held, leaf, name in links:
                held[leaf] = getattr(module, name)
            if own.training is not module.training and not (given and not links):
                own.train(module.training)
            result = own(*args, **kwargs)
            for held, leaf, name in buffers if links else ():
                if held[leaf] is not (getattr(module, name) if name else None):
                    self._replace(leaf, name, held[leaf], shared=given)
            return result

        return call

    def _replace(self, leaf: str, name: str, new: Any, *, shared: bool) -> None:
        """Give the hooked module, or all of them, what its own module has put in the place of a buffer."""
        old = getattr(self.module, name) if name else None
        if _form(new) != _form(old):
            raise ValueError(
                f"it replaces its buffer {leaf!r}, {_form(old)}, by {_form(new)}, which no saved state fits"
            )
        paths = [match.path for match in self._hook.matches] if shared else [self.path]
        for path in paths:
            self.clock.model.get_submodule(path)._buffers[name] = new

    def _add(self, name: str, tensor: Tensor) -> None:
        if (problem := add_parameter(self.module, name, tensor)) is not None:
            raise HookError(f"{self.where}: {problem}")

    # ---- random numbers ----------------------------------------------------------------------------------------

    def generator(self, like: Tensor) -> Generator:
        """A generator on the tensor's device, with a seed for this draw, so that a draw depends on its number only."""
        self._require("generator")  # activation checkpointing would recompute the call with other numbers
        if self.hook_type.of_rows and self.clock.rows is not None:
            raise HookError(
                f"{self.where}: it draws random numbers for the rows of a batch, which would differ by rank: use "
                "compute.strategy=none"
            )
        return self._draws.generator(like.device)

    def drawn(self, like: Tensor, fill: Fill) -> Tensor:
        """Random numbers in shape, dtype and device of `like`."""
        self._require("drawn")
        rows = self.clock.rows if self.hook_type.of_rows else None
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
        return self.spec.action.draws or self.spec.keys.when.probability < 1 or bool(self._values)

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


def _number_in_form(number: Callable[[Tensor], Tensor | float], like: Tensor) -> Tensor:
    """The present number as a tensor [] in dtype and on device of a tensor."""
    now = number(like)
    if isinstance(now, Tensor) or like.is_cpu:
        return in_form_of(torch.as_tensor(now, dtype=torch.float64), like)
    # made there: a number of the CPU would have to be copied at each firing; added, since filling refuses an overflow
    return (computable(like.new_zeros(())) + now).to(like.dtype)


def _form(value: Any) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _refuse(problem: str, like: Tensor) -> Tensor:
    raise ValueError(problem)
