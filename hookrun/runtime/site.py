"""One hook at one module or parameter: its counts, and the services that its action may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Generator, Tensor, distributed, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hookrun.actions.base import (
    RECORD_KEYS,
    HookContext,
    Keeper,
    TokenRows,
    add_parameter,
    added_otherwise,
    name_taken,
    remove_parameter,
    was_added,
)
from hookrun.actions.check import finding, verdict
from hookrun.actions.fields import Meaning
from hookrun.actions.user_code import Recorded, added_names, on_tensor
from hookrun.actions.values import InlineFunction, OutsideValue, PassValue, Ramp, at_step
from hookrun.errors import CheckFailed, HookError, reason
from hookrun.models.attention_points import lacks_points
from hookrun.plan.plan import PlannedHook
from hookrun.run_values import FaultList, PendingRun, Rows, Source
from hookrun.runtime.checkpointing import repeating, require_no_checkpoint
from hookrun.runtime.clock import Calls, Clock, CurrentCall
from hookrun.runtime.faults import Draw, Faulty
from hookrun.runtime.part import TensorPart, part_of
from hookrun.runtime.rng import Draws, Fill, derived_seed, drawn, kept_samples
from hookrun.runtime.snapshot import copied
from hookrun.trust.load import Trusted
from hookrun.values import containers
from hookrun.values.containers import plain, readable
from hookrun.values.tensors import check_broadcast, holds_data, in_form_of, ordinary_tensors, scalars

if TYPE_CHECKING:
    from hookrun.actions.fields import Keep


class LastPassed:
    """The tensors that passed each check in the current pass through the model, from the records of checks.

    A new pass begins with a new step, or when the same tensor is checked again.
    """

    def __init__(self) -> None:
        self._passed = dict[str, dict[tuple[Any, ...], None]]()

    def passed(self, record: Mapping[str, Any]) -> None:
        """Note that the tensor passed the check."""
        since, checked = self._since(record)
        since[checked] = None

    def before(self, record: Mapping[str, Any]) -> str | None:
        """Path and class of the module where the check passed last before this tensor; None: nowhere in this pass."""
        since, _ = self._since(record)
        return next(reversed(since))[0] if since else None

    def _since(self, record: Mapping[str, Any]) -> tuple[dict[tuple[Any, ...], None], tuple[Any, ...]]:
        when = record["mode"], record["epoch"], record["step"]
        module = f"{record['module'] or '(root)'} ({record.get('class', '')})"
        checked = (module, record["path"], record["call"], when)
        since = self._passed.setdefault(record["hook"], {})
        if since and (checked in since or next(iter(since))[-1] != when):
            since.clear()
        return since, checked


class Sink:
    """Where records and captured values go; this one drops them.

    There is one for the run directory, one for memory and one for trial runs.

    wants_calls: it needs the number of each module call within the forward pass
    has_values:  tensors hold real values, which may be read; False in a trial run
    stop:        why a check with policy `stop` asks for the end of the run, or None
    last_good:   where each check passed last; only if it `has_values`
    split:       the split of the current batch; None: not known
    counted:     [B], row numbers for a batch whose sample ids are not known; None: they are not numbered
    """

    wants_calls = False
    has_values = True
    stop: str | None = None
    last_good: LastPassed
    split: str | None = None
    counted: Tensor | None = None

    def keeper(self, site: HookSite) -> Keeper:
        """A function that stores the values that the site captures."""
        return lambda value, rows=None, tokens=None: None

    def emit(self, start: tuple[Any, ...], data: Mapping[str, Any], *, show: bool = False) -> None:
        """Take a record, whose tensors may be read later. `show`: print it at once.

        start: the values of RECORD_KEYS, with which the record begins
        """

    def settle(self) -> None:
        """Read the tensors of pending records."""

    def fail(self, site: HookSite, what: str) -> None:
        """A site cannot do what its hook asks for: raises HookError that names both; a trial run notes it."""
        raise HookError(f"{site.where}: {what}")

    def guard(self, site: HookSite, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op of a site, whose exceptions end the run; in a trial run a version that notes them."""
        return op

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""


class HookSite:
    """One hook at one module or parameter, see `hookrun.actions.base`; each installation creates new ones.

    fired:     how often the hook fired here (its schedule let it through)
    idle:      firings in which the hook found nothing to act on
    fired_in_graphs: the same inside compiled graphs, a 0-dimensional tensor that they add to
    target_was_none: the target was None in a firing
    let_through: an action on the call itself did not take place in some call
    changed:   how many of the `total` elements its edits changed, counted while `clock.counting`
    current:   the state of the firing in each thread
    part:      the part of a tensor that the action acts on; None: all of it
    passes_on: other hooks take what it sees, as it sees it
    passed_part: the part of it that they take, also of positions that a generation computes again; None: all of it
    tokenizer: for the text of tokens; None: not known
    zeros_of:  name of a parameter of the module -> its KeptZero, while an `apply` hook runs
    """

    zeros_of: Callable[[str], Any]

    def __init__(
        self,
        hook: PlannedHook,
        path: str,
        module: nn.Module,
        clock: Clock,
        sink: Sink,
        seed: int,
        calls: Calls | None = None,
        current: CurrentCall | None = None,
    ) -> None:
        action = hook.spec.action
        self.spec = hook.spec
        self.hook_name = hook.spec.name
        self.hook_type = hook.spec.hook_type
        self.path = path
        self.module = module
        self.clock = clock
        self.sink = sink
        self.calls = calls
        self.fired = 0
        self.fired_in_graphs: Tensor | None = None
        self.idle = 0
        self._idle_at = 0
        self.target_was_none = False
        self.passes_on = False
        self.passed_part: TensorPart | None = None
        self.let_through = False
        self.changed: Tensor | int = 0
        self.total = 0
        self.tokenizer = hook.tokenizer
        self.current = CurrentCall(path, clock, calls) if current is None else current
        self.part = part_of(hook, path, self.current, once=action.observes)
        own_seed = action.value_of(Meaning.SEED)
        seed = seed if own_seed is None else own_seed
        self.seed = derived_seed(seed, self.hook_name, path)
        self.reads_arguments = "args" in action.uses
        self._hook_seed = derived_seed(seed, self.hook_name)
        self._draws = Draws(self.seed, calls if self.hook_type.phase == "forward" else None)
        self._values = {field: values[path] for field, values in hook.values.items() if path in values}
        self.needs_whole = any(
            isinstance(value, OutsideValue) and (value.at is not None or value.per_sample)
            for value in action.outside_values().values()
        )
        self._hook = hook
        self._held = list[Any]()

    @cached_property
    def where(self) -> str:
        """Hook and place for messages: ``hook 'clip_fc' (grad, clamp) on fc.weight``."""
        what = f"{self.hook_type}, {self.spec.action.action_name}"
        return f"hook {self.hook_name!r} ({what}) on {self.path or '(root)'}"

    @property
    def call(self) -> int:
        """The number of the module's call within the forward pass, from 0; a gradient has the number of its call."""
        of_call = self.current.of_call
        if of_call is not None:
            return of_call
        return 0 if self.calls is None else self.calls.now.number

    @property
    def firings(self) -> int:
        """How often the hook fired here, also inside compiled graphs."""
        return self.fired if self.fired_in_graphs is None else self.fired + int(self.fired_in_graphs)

    @property
    def why_idle(self) -> str | None:
        """Why the hook did nothing here; None if it never fired, or a firing found something."""
        if not self.fired or self.idle < self.fired:
            return None
        if not self.target_was_none:
            samples = self.spec.keys.when.of_samples
            none = f"sample with {samples}" if samples else "tensor for its action"
            return f"fired and found no {none}"
        hint = " (model.args.attention=points gives patterns)" if lacks_points(self.module) else ""
        return f"fired and its target {self.spec.keys.target} is None{hint}"

    @property
    def why_left(self) -> str | None:
        """Which part of a list of faults was repeated; None if all of it was, or the hook never fired."""
        given = self._values.get("faults")
        if isinstance(given, FaultList) and 0 < self.firings < given.fired:
            return f"fired {self.firings:,} times, and its list has the faults of {given.fired:,}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """The counts, the positions of the random draws, and the `state_dict()` of the user's own objects."""
        return {
            "fired": self.fired,
            "idle": self.idle,
            "changed": int(self.changed),
            "total": self.total,
            "draws": self._draws.state_dict(),
            "calls": None if self.calls is None else self.calls.state_dict(),
            "held": [self._of_object(own, "state_dict") for own in self._held],
            "in_graphs": self.firings - self.fired,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.fired, self.idle = state["fired"], state["idle"]
        self.changed, self.total = state["changed"], state["total"]
        self._draws.load_state_dict(state["draws"])
        if self.calls is not None and state["calls"] is not None:
            self.calls.load_state_dict(state["calls"])
        if self.fired_in_graphs is None:  # it cannot be in a graph now
            self.fired += state["in_graphs"]
        else:
            self.fired_in_graphs.fill_(state["in_graphs"])
        # for another plan there may be more or fewer states than objects
        for own, held in zip(self._held, state["held"], strict=False):
            self._of_object(own, "load_state_dict", held)

    def _of_object(self, own: Any, method: str, *args: Any) -> Any:
        try:
            return getattr(own, method)(*args)
        except Exception as error:
            raise HookError(f"{self.where}: {type(own).__name__}.{method} failed: {reason(error)}") from error

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
            return self._unknown(source)
        varies = isinstance(given, OutsideValue) and (given.at is not None or isinstance(given.factor, Ramp))
        if varies or not (source is None or isinstance(source, Tensor)):
            constant = self._constant(field)
            return lambda like: prepare(constant(like))
        with unset_fake_temporarily(), ordinary_tensors(), torch.no_grad():
            try:
                ready = prepare(torch.tensor(given, dtype=torch.float64) if source is None else source)
            except ValueError as error:
                problem = str(error)

                def refused(like: Tensor) -> Tensor:
                    raise ValueError(
                        problem
                    )  # at the firing: a trial run reports it with those of other hooks

                return refused
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
        by_sample = source is not None and not isinstance(source, Tensor | InlineFunction | PendingRun)

        def constant_part(like: Tensor) -> Tensor:
            whole = like if self.current.whole is None else self.current.whole
            value = constant(whole)
            if by_sample:
                value = self._with_token_dim(value, whole)
            check_broadcast(value, whole)
            return part.of(value.expand(whole.shape))

        return constant_part

    def _multiplied(self, constant: Callable[[Tensor], Tensor], factor: Ramp) -> Callable[[Tensor], Tensor]:
        following = self._following(factor)
        return lambda like: in_form_of(constant(like) * following(like), like)

    def _with_token_dim(self, rows: Tensor, whole: Tensor) -> Tensor:
        """Add a token dimension to rows that were captured at one token each, so that they broadcast over tokens."""
        tokens = self.spec.keys.tokens
        if tokens is None or tokens.on_pattern:
            return rows
        dim = tokens.dim or 1
        if rows.dim() != whole.dim() - 1 or dim >= whole.dim():
            return rows
        of_one_token = (*whole.shape[:dim], *whole.shape[dim + 1 :])
        return rows.unsqueeze(dim) if rows.shape == of_one_token else rows

    def _whole_constant(self, given: Any, value: Source | None) -> Callable[[Tensor], Tensor]:
        """The function for the whole value."""
        if isinstance(value, InlineFunction):
            return self._computed(value)
        if isinstance(value, PendingRun):
            return self._unknown(value)
        if isinstance(value, PassValue):
            return self._passed(value)
        if isinstance(given, Ramp):
            number = self._following(given)
            return lambda like: in_form_of(torch.as_tensor(number(like), dtype=torch.float64), like)
        if isinstance(value, Rows):
            return self._rows(value)
        return self._in_form(value if isinstance(value, Tensor) else torch.tensor(given, dtype=torch.float64))

    def _in_form(self, source: Tensor) -> Callable[[Tensor], Tensor]:
        """A function tensor -> the source in its dtype and on its device, converted once for each of them."""
        if source.is_inference():  # the spec was read or compiled under inference mode
            source = source.clone()
        made = dict[tuple[torch.dtype, torch.device], Tensor]()

        def constant(like: Tensor) -> Tensor:
            if torch.compiler.is_dynamo_compiling():  # a tensor made inside a graph must not be cached
                return in_form_of(source, like)
            key = (like.dtype, like.device)
            if (found := made.get(key)) is None:
                with ordinary_tensors():
                    found = in_form_of(source, like)
                if holds_data(found) or not self.sink.has_values:  # a traced tensor must not be cached either
                    made[key] = found
            return found

        return constant

    def _unknown(self, source: PendingRun) -> Callable[[Tensor], Tensor]:
        """An empty tensor of the argument's shape, for a trial run; HookError in a real one."""

        def unknown(like: Tensor) -> Tensor:
            if self.sink.has_values:
                raise HookError(
                    f"{self.where}: the run {source.name!r} that its value comes from was not made"
                )
            return like.new_empty(like.shape)

        return unknown

    def _rows(self, source: Rows) -> Callable[[Tensor], Tensor]:
        """The rows of the samples of the current batch."""

        def rows(like: Tensor) -> Tensor:
            chosen, part, whole = self.current.chosen, self.part, self.current.whole
            is_part = chosen is None and like is not whole
            if is_part and part is not None and whole is not None and not part.keeps_samples(whole.dim()):
                raise HookError(
                    f"{self.where}: `index` picks rows of the batch, and the value has a row for each sample: "
                    "add at: same to the value"
                )
            if not self.sink.has_values:  # a trial run has no real samples
                return like.new_empty((like.shape[0], *source.shape) if like.dim() else source.shape)
            samples = self.clock.samples
            if samples is None:
                raise HookError(
                    f"{self.where}: it takes a value for each sample, and does not know which samples these are: "
                    "set hooks.samples before each batch"
                )
            draw = self._draws.generator(torch.device("cpu"))
            if chosen is not None:  # each position, or each sequence, of a sample gets the sample's row
                of_rows = chosen.of.samples_of_rows(len(samples)) if like is whole else chosen.rows.samples
                return in_form_of(source.of(samples, draw)[of_rows], like)
            if not like.dim() or like.shape[0] != len(samples):
                raise HookError(
                    f"{self.where}: the batch has {len(samples)} samples, the tensor has shape {list(like.shape)}"
                )
            return in_form_of(source.of(samples, draw), like)

        return rows

    def _passed(self, value: PassValue) -> Callable[[Tensor], Tensor]:
        """What another hook has seen in this forward."""

        def passed(like: Tensor) -> Tensor:
            require_no_checkpoint()
            if (seen := self.clock.forward.passed_on.get((value.hook, value.module))) is None:
                raise HookError(
                    f"{self.where}: {value.hook} has not fired at {value.module or '(root)'} in this forward of the "
                    "model: it must fire before this hook"
                )
            return in_form_of(seen, like)

        return passed

    def _computed(self, function: InlineFunction) -> Callable[[Tensor], Tensor]:
        """The result of a user's function for the tensor, detached: no gradient flows through it."""
        call = on_tensor(self.hook_name, function.code, function.target)

        def computed(like: Tensor) -> Tensor:
            with torch.no_grad():
                result = call(like.detach())
            if not isinstance(result, Tensor | int | float):
                raise HookError(
                    f"{self.where}: '{function}' returned an object of type {type(result).__name__}, "
                    "expected a tensor or a number"
                )
            return in_form_of(torch.as_tensor(result).detach(), like)

        return computed

    def function(self, field: str) -> Trusted | InlineFunction:
        """The user's own function that the field names."""
        return self._hook.functions[field]

    @contextmanager
    def context(self) -> Iterator[HookContext]:
        """What a user's own function may know about the current firing."""
        clock, keys, recorded = self.clock, self.spec.keys, Recorded()
        yield HookContext(
            self.hook_name,
            self.hook_type.name,
            self.path,
            self.module,
            clock.mode,
            clock.epoch,
            clock.step,
            self.call,
            self.current.within or str(keys.target or ""),
            self.generator,
            recorded.add,
            self.current.args,
        )
        numbers, recorded.numbers = recorded.numbers, None
        if numbers and repeating() is None and not (clock.stands_in and self.hook_type.of_rows):
            self.emit(numbers)

    def register_state(self, own: Any) -> None:
        """Include the state of this object, which the action keeps between firings, in `state_dict`."""
        self._held.append(own)

    def adopted(self, own: Callable[..., Any], *, given: bool) -> Callable[..., Any]:
        """The user's own module as a function; each call looks its parameters up in the hooked module, see `_trained`.

        Of modules that share a given object the parameters are shared, too.
        """
        if not isinstance(own, nn.Module):
            return own
        module = self.module
        with unset_fake_temporarily():
            if given and not self.sink.has_values:
                own = deepcopy(own)  # a trial run must leave no gradients in it
            elif self._hook.own and not given:
                own.to(self.like.device, self.like.dtype)
        names = {
            parameter: name
            for parameter, name in added_names(own, self.hook_name).items()
            if name in self._hook.own
        }
        for parameter, name in names.items():
            if given and was_added(module, name):
                remove_parameter(module, name)  # the object has the present values
            self._add(name, parameter)
        links = [
            (part._parameters, name, names[parameter])
            for part in nn.Module.modules(own)
            for name, parameter in part._parameters.items()
            if parameter in names
        ]

        def call(*args: Any, **kwargs: Any) -> Any:
            for parameters, leaf, name in links:
                parameters[leaf] = getattr(module, name)
            if own.training is not module.training and not (given and not links):
                own.train(module.training)
            return own(*args, **kwargs)

        return call

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        """Add a parameter to the module; one of an earlier installation is kept."""
        problem = name_taken(self.module, name) or added_otherwise(self.module, name, parameter.shape)
        if problem is not None:
            raise HookError(f"{self.where}: {problem}")
        if not was_added(self.module, name):
            add_parameter(self.module, name, parameter)

    @property
    def like(self) -> Tensor:
        """A parameter of the module or else the model, whose dtype and device the module's values most likely have."""
        parameters = chain(self.module.parameters(), self.clock.model.parameters())
        return next((each for each in parameters if each.is_floating_point()), torch.empty(0))

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

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the current module call: the positional ones, then the others."""
        self._require("args")
        inputs = self.current.args
        return tuple(inputs.values()) if isinstance(inputs, dict) else inputs or ()

    def leaves(self, value: Any) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor and every None in the value, with its path."""
        return containers.leaves(value)

    def rebuild(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """The value with `change` applied to every member that is not a container; for captures also inside caches."""
        rebuild = copied if self.spec.action.captures else containers.rebuild
        return rebuild(value, change)

    def traced(self, value: Any) -> bool:
        """Whether a tensor of the value is a placeholder, because the model is being exported or traced."""
        tensors = (tensor for tensor in containers.tensors(value) if not tensor.is_meta)
        return self.sink.has_values and any(readable(tensor) is None for tensor in tensors)

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
        return drawn(like, fill, self._draws.generator(like.device), rows)

    def flipped(self, x: Tensor, bits: Sequence[int], draw: Draw, *, by_sample: bool) -> Tensor:
        self._require("flipped")
        given, clock, sink, index = self._values.get("faults"), self.clock, self.sink, None
        if self.part is not None and given is None:
            if self.part.nothing_of(x):
                self.found_nothing()
                return x.clone()
            index = self.part.of(torch.arange(x.numel(), device="cpu").view(x.shape)).reshape(-1)
        # a rank without rows of the batch: NaN in its pass would reach the gradients of the others
        of_ranks = distributed.is_available() and distributed.is_initialized()
        without_rows = clock.stands_in and clock.rows is None and self.hook_type.of_rows and of_ranks
        if not sink.has_values or without_rows:
            return x.clone()
        if isinstance(given, PendingRun):
            return self._unknown(given)(x)
        samples = clock.samples if clock.samples is not None else sink.counted
        there = Faulty(
            x,
            clock.rows if self.hook_type.of_rows else None,
            samples if self.hook_type.batch else None,
            {**dict(zip(RECORD_KEYS, self._start(), strict=True)), "split": sink.split},
        )
        number = self._draws.next()
        if isinstance(given, FaultList):
            faults = there.listed(given.at(number, self.fired if repeating() is None else 0))
        else:
            faults = there.drawn(index, bits, draw, derived_seed(self.seed, *number), by_sample)
        new, records = there.flipped(faults)
        for record in records:
            self.emit({"split": sink.split, **record, "draw": list(number)})
        return new

    def seed_of(self, parameter: str, seed: int | None) -> int:
        tensor = getattr(self.module, parameter, None)
        names = (name for name, of_model in self.clock.model.named_parameters() if of_model is tensor)
        name = next(names, f"{self.path}.{parameter}" if self.path else parameter)
        return (self._hook_seed if seed is None else seed) + crc32(name.encode())

    def keep_zero(self, parameter: str, choose: Callable[[Tensor], Tensor]) -> None:
        zeros = self.zeros_of(parameter)
        if self.hook_name not in zeros.chosen_by:  # another module may have the same parameter
            zeros.chosen_by.add(self.hook_name)
            zeros.free = choose(zeros.free)
            zeros.fill()
            self.register_state(zeros)

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

    # ---- records and captures ----------------------------------------------------------------------------------

    def emit(self, data: Mapping[str, Any], path: str | None = None, *, show: bool = False) -> None:
        # an edit acts again in a recomputed call, and in passes that the task makes for itself
        if self.spec.action.observes or (repeating() is None and not self.clock.stands_in):
            self.sink.emit(self._start(path), data, show=show)

    def _start(self, path: str | None = None) -> tuple[Any, ...]:
        """The values of RECORD_KEYS for a record about the tensor at `path`, by default the one that is acted on."""
        clock, current = self.clock, self.current
        at = current.within + (current.at if path is None else path)
        action = self.spec.action.action_name
        return self.hook_name, self.path, at, action, clock.mode, clock.epoch, clock.step, self.call

    def fail(self, what: str) -> None:
        """The hook cannot do its work here: raises HookError; a trial run collects the message instead."""
        self.sink.fail(self, what)

    def keep(self) -> Keeper:
        """A function that gives captured values to the sink; under `tokens` with the sample and token of each row."""
        self._require("keep")
        keep, keys, current = self.sink.keeper(self), self.spec.keys, self.current
        if keys.tokens is None and not keys.when.of_samples:
            return keep

        def keep_rows(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            chosen, holding = current.chosen, current.holding
            if holding is not None:
                rows = holding if rows is None else holding[rows]
            if keys.tokens is None:
                keep(value, rows)
                return
            if chosen is None:
                raise HookError(f"{self.where}: the value holds no tensor: name one with `target`")
            tokens = chosen.rows if rows is None else chosen.rows.at(rows)
            keep(value, tokens.samples, tokens)

        return keep_rows

    def chosen(self, keep: Keep) -> Callable[[Sequence[int]], Tensor]:
        """A function shape -> the row numbers of the samples that `keep` chooses; in a trial run of all rows."""
        if not self.sink.has_values:
            return lambda shape: torch.arange(*shape[:1] or (1,), device="cpu")
        is_kept = kept_samples(keep, self.clock, self._hook_seed, self.where)

        def rows(shape: Sequence[int]) -> Tensor:
            kept, holding = is_kept(), self.current.holding
            if self.spec.keys.tokens is not None:
                chosen = self.current.chosen
                of_rows = torch.arange(*shape[:1], device="cpu") if chosen is None else chosen.rows.samples
                return kept[of_rows if holding is None else of_rows[holding]].nonzero().squeeze(1)
            if holding is not None:
                return kept[holding].nonzero().squeeze(1)
            if not shape or shape[0] != len(kept):
                raise HookError(
                    f"{self.where}: it keeps only some samples and sees a tensor of shape {list(shape)} in a batch of "
                    f"{len(kept)}"
                )
            return kept.nonzero().squeeze(1)

        return rows

    def check_result(self, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
        """Judge a check: policy `error` reads the result and raises CheckFailed, others emit a record."""
        result, has_values = readable(ok), self.sink.has_values
        if result is None and has_values and not ok.is_meta:  # the model is being traced
            return
        # under `torch.vmap` there is one result for each mapped element
        if result is not None and result is not ok:
            with torch._C._DisableFuncTorch():
                ok, least, largest = result.all(), plain(least).min(), plain(largest).max()
        clock, samples = self.clock, None
        if (
            self.hook_type.of_rows and clock.rows is not None and clock.samples is not None
        ):  # this rank's samples
            samples = clock.samples.tolist()
        record = finding(ok, message, policy, least, largest, samples)
        record["class"] = type(self.module).__name__
        if policy == "error" and has_values:
            checked = {**dict(zip(RECORD_KEYS, self._start(), strict=True)), **record}
            if ok:
                self.sink.last_good.passed(checked)
                return
            record["last_good"] = self.sink.last_good.before(checked)
        self.emit(record)
        if policy == "error" and has_values:
            at = f" at {self.current.at}" if self.current.at else ""
            raise CheckFailed(
                f"{self.where} ({record['class']}){at}, epoch {clock.epoch}, step {clock.step}: {verdict(record)}"
            )

    def found_nothing(self) -> None:
        """Count the current firing as idle: it found nothing for its action."""
        if self._idle_at != self.fired:
            self._idle_at = self.fired
            self.idle += 1

    def untouched(self, x: Tensor) -> Tensor | None:
        """Nothing in x is for the action; None, or x with gradients of 0 for the parameters that the hook trains.

        Other ranks may have something for it, and sharded gradients are reduced only if each rank has them.
        """
        self.found_nothing()
        trained, action = list(self._hook.own), self.spec.action
        if action.trains:
            trained.append(str(action.adds(self.hook_name)))
        if not trained or not torch.is_grad_enabled():
            return None
        nothing = torch.cat([getattr(self.module, name).flatten()[:0] for name in trained])
        return x + nothing.sum().to(x)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Firings inside the block are not counted."""
        counts, in_graphs = (self.fired, self.idle, self.changed, self.total), self.fired_in_graphs
        before = None if in_graphs is None else in_graphs.clone()
        try:
            yield
        finally:
            self.fired, self.idle, self.changed, self.total = counts
            if in_graphs is not None and before is not None:
                in_graphs.copy_(before)

    def _require(self, member: str) -> None:
        """Raise HookError if the action uses a member of the site that it does not declare."""
        if member not in self.spec.action.uses:
            raise HookError(f"{self.where}: the action uses `{member}` of its site: name it in `uses`")
