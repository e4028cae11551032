"""Runs of the model with batches of two sizes, which show what dimension of each tensor is the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.engine.actions.base import Absent
from hookrun.engine.hook_types import BACKWARD, BACKWARD_PRE, FORWARD, FORWARD_PRE, HookType
from hookrun.engine.plan.batch import Followers, Shapes, followers_of
from hookrun.engine.plan.plan import Match, PlannedHook, ResolvedPlan
from hookrun.engine.runtime.snapshot import Uncopyable, opened
from hookrun.engine.spec.selector.tree import ancestors
from hookrun.engine.values.containers import (
    TargetError,
    arguments,
    differentiable,
    get,
    leaves,
    path_of,
    rebuild,
    tensors,
    unwrapped,
)
from hookrun.engine.values.index import joined
from hookrun.errors import HookrunError, reason

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of one call of the model."""

CallsByPath = dict[tuple[str, int], tuple[Any, Any]]
"""Path of a module and number of its call -> arguments and output, in the order in which the calls end."""


@dataclass(frozen=True)
class TwoSizes:
    """Arguments for a larger batch, beside those of the example.

    larger: the arguments of a call with `sizes[1]` samples; the example has `sizes[0]`
    dim:    the dimension of the first tensor that is taken for the batch
    """

    larger: Arguments
    sizes: tuple[int, int]
    dim: int = 0


def larger_batches(
    model: nn.Module, example: Arguments, samples: int | None = None
) -> Iterator[TwoSizes | None]:
    """The example with one more sample, in each way to be tried until one fits the model; None if it has no batch.

    The batch is the first dimension, or the second in a model with modules that have the steps of a sequence first;
    masks of padding have it first there, too.

    samples: how many samples the example has; None: as many as the first tensor has rows
    """
    yield one_more_sample(example, samples)
    if any(map(has_steps_first, model.modules())):
        for dim_of_others in (1, 0):
            two = one_more_sample(example, samples, dim=1, dim_of_others=dim_of_others)
            if two is not None:
                yield two


def has_steps_first(module: nn.Module) -> bool:
    """Whether it is a module of torch that has the steps of a sequence first, and the batch behind them."""
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first


def may_have_steps_first(module: nn.Module, model: nn.Module, call: Arguments, samples: int | None) -> bool:
    """Whether a part of the model may get the steps of sequences first, and no run of it alone can show that.

    Another part has them there, and the first two dimensions of the first tensor could each be the batch.

    samples: how many there are; None: not known
    """
    if any(map(has_steps_first, module.modules())) or not any(map(has_steps_first, model.modules())):
        return False
    first = _first_with_rows(call)
    if first is None or first.dim() < 2 or (first.dim() == 2 and first.is_floating_point()):
        return False
    return samples is None or samples == first.shape[1]


def _first_with_rows(call: Arguments) -> Tensor | None:
    """The first tensor that is not a single number."""
    return next((tensor for tensor in tensors(call) if tensor.dim()), None)


def one_more_sample(
    example: Arguments, samples: int | None = None, *, dim: int = 0, dim_of_others: int = 0
) -> TwoSizes | None:
    """The example with its first sample once more at the end; None where that is not possible.

    dim:           the dimension of the first tensor that is the batch, and of every other tensor as long in it
    dim_of_others: with the second dimension: which one of another tensor is tried first, if both are as long
    samples:       how many samples the example has; None: as many as the first tensor has there
    """
    first = _first_with_rows(example)
    if samples is None and first is not None and first.dim() > dim:
        samples = first.shape[dim]
    if samples is None:
        return None
    rows = samples
    grown: list[Tensor] = []

    def longer(leaf: Any) -> Any:
        dims = (dim,) if leaf is first or dim == 0 else (dim_of_others, 1 - dim_of_others)
        for place in dims if isinstance(leaf, Tensor) else ():
            if leaf.dim() > place and leaf.shape[place] == rows:
                grown.append(leaf)
                return torch.cat([leaf.detach(), leaf.detach().narrow(place, 0, 1)], dim=place)
        return leaf

    positional, keywords = example
    try:
        larger = rebuild((tuple(positional), dict(keywords)), longer)
    except RuntimeError:  # quantized tensors, for example, cannot be joined
        return None
    return TwoSizes(larger, (rows, rows + 1), dim) if grown else None


@contextmanager
def noting_calls(modules: Mapping[str, nn.Module]) -> Iterator[CallsByPath]:
    """Within the block, note arguments and output of each call of these modules, which are given by their paths."""
    calls = CallsByPath()
    numbers = Counter[str]()

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[path, numbers[path]] = arguments(args, kwargs), output
        numbers[path] += 1

    with ExitStack() as stack:
        for path, module in modules.items():
            handle = nn.Module.register_forward_hook(module, partial(note, path), with_kwargs=True)
            stack.callback(handle.remove)
        yield calls


@dataclass
class BatchRuns:
    """The runs of a copy of the model without its hooks, before the one with them.

    plan: names the modules that are watched
    two:  the larger batch; None: there is none, and no dimension is known to follow the batch
    entry: the path of the module that is run, in the model that the plan was made for
    why_unknown: why no dimension is known; None: they are known
    again: a copy of the larger arguments, for a run with the hooks; None: the copy of the model does not run with them
    modules: those of the copy that are watched, by their paths
    """

    plan: ResolvedPlan
    two: TwoSizes | None
    entry: str = ""
    why_unknown: str | None = None
    again: Arguments | None = None
    modules: dict[str, nn.Module] = field(default_factory=dict)
    _steps_first: set[str] = field(default_factory=set)
    _small: CallsByPath = field(default_factory=CallsByPath)
    _large: CallsByPath = field(default_factory=CallsByPath)

    def run(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], larger: Arguments | None
    ) -> None:
        """Run the copy with both batches. Raises what the model raises for the smaller one.

        larger: a copy of the arguments in `two`
        """
        self._large = CallsByPath()
        self.why_unknown = None
        self.again = None
        watched = self.modules = self._watched(model)
        if larger is not None and self.two is not None:
            again = rebuild(larger, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
            try:
                with noting_calls(watched) as self._large:
                    model(*larger[0], **larger[1])
                self.again = again
            except Exception as error:
                self._large = CallsByPath()
                what = str(error) if isinstance(error, HookrunError) else reason(error)
                few, more = self.two.sizes
                self.why_unknown = f"the model runs with {few} samples and not with {more}: {what}"
        with noting_calls(watched) as self._small:
            model(*args, **kwargs)

    def read(self) -> ResolvedPlan:
        """The plan with what its actions take from the values of the first calls, see `Action.taken`."""
        hooks: list[PlannedHook] = []
        for hook in self.plan.hooks:
            matches = tuple(self._readings(hook))
            if hook.spec.action.finds:
                matches = innermost(matches)
            hooks.append(replace(hook, matches=matches))
        return replace(self.plan, hooks=tuple(hooks))

    def _readings(self, hook: PlannedHook) -> Iterator[Match]:
        """The matches of a hook; of an action that looks for its modules those that have what it finds."""
        action = hook.spec.action
        for match in hook.matches:
            call = self._small.get((match.path, 0))
            note = ""
            if call is not None:
                value = call[hook.spec.hook_type is FORWARD]
                target = hook.spec.keys.target
                with suppress(Absent, TargetError):  # of an edit, the run with the hooks reports it
                    seen = value if target is None else get(value, target.keys)
                    taken = action.taken(seen, self.modules[match.path]) or {}
                    places = [f"{name} at {path_of(seen, tensor)}" for name, tensor in taken.items()]
                    note = f"takes {', '.join(places)}" if places else ""
            if note or not action.finds:
                yield replace(match, note=note)

    def located(self) -> ResolvedPlan:
        """The plan with the batch dimensions of what its hooks see."""
        hooks: list[PlannedHook] = []
        of_points: dict[str, Followers] = {}
        for hook in self.read().hooks:
            matches: list[Match] = []
            for match in hook.matches:
                followers = of_points.get(match.path, self._followers(hook, match.path))
                matches.append(replace(match, batch=followers))
            hooks.append(replace(hook, matches=tuple(matches)))
            of_points |= hooks[-1].batch_of_points()
        against = tuple(self._against_layout())
        unknown = self.why_unknown
        called = {path for path, _ in self._large}
        if self.two is not None and self.two.dim and called.isdisjoint(self._steps_first):
            unknown = "no module of torch that ran has the steps of a sequence first"
        return replace(self.plan, hooks=tuple(hooks), batch_unknown=unknown, batch_as_sequence=against)

    def run_hooked(self, model: nn.Module, backward: Callable[[Any], None] | None) -> None:
        """Run the hooked copy with the larger batch; a failure leaves unknown what it would show.

        backward: runs a backward pass from the output
        """
        assert self.again is not None
        args, kwargs = rebuild(self.again, differentiable) if backward else self.again
        with suppress(Exception):
            output = model(*args, **kwargs)
            if backward is not None:
                backward(output)

    def _watched(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules that hooks on values see, and those that have the steps of sequences first, by their paths."""
        modules = {
            joined(self.entry, name): module for name, module in model.named_modules(remove_duplicate=False)
        }
        for path, module in modules.items():
            if has_steps_first(module):
                self._steps_first.add(path)
        watched = set(self._steps_first)
        for hook in self.plan.hooks:
            if hook.spec.hook_type.batch:
                watched.update(match.path for match in hook.matches)
        return {path: modules[path] for path in watched & modules.keys()}

    def _against_layout(self) -> list[str]:
        """Modules with the steps of sequences first, whose input has the batch there; each is asked for its layout."""
        against: list[str] = []
        for path in self._steps_first:
            if self.two is None or (path, 0) not in self._small.keys() & self._large.keys():
                continue
            few = _shapes_of_tensors(self._small[path, 0][0])
            more = _shapes_of_tensors(self._large[path, 0][0])
            of_arguments = list(followers_of([(few, more)], self.two.sizes).values())
            if of_arguments and of_arguments[0] == (0,):
                against.append(path)
        return sorted(against)

    def _followers(self, hook: PlannedHook, path: str) -> Followers | None:
        """What dimensions of the tensors that the hook sees at the module follow the batch; None: not known."""
        if not hook.spec.hook_type.batch or self.two is None or (path, 0) not in self._large:
            return None
        calls: list[tuple[Shapes, Shapes]] = []
        while (call := (path, len(calls))) in self._small and call in self._large:
            calls.append((_shapes(hook, *self._small[call]), _shapes(hook, *self._large[call])))
        return followers_of(calls, self.two.sizes)


def innermost(matches: Sequence[Match]) -> tuple[Match, ...]:
    """The modules that are not around another one: they may only pass on what that returns."""
    paths = {path for match in matches for name in match.names for path in ancestors(name)}
    return tuple(match for match in matches if match.path not in paths)


def _shapes(hook: PlannedHook, given: Any, output: Any) -> Shapes:
    """The shapes of the tensors that the hook sees in a call of its module, by each path that they may have there."""
    shapes: dict[str, Sequence[int]] = {}
    target = hook.spec.keys.target
    for value in _forms(hook.spec.hook_type, given, output):
        if target is None:
            shapes.update(_shapes_of_tensors(value))
            continue
        with suppress(TargetError):
            member = get(value, target.keys)
            for path, shape in _shapes_of_tensors(member).items():
                shapes[joined(str(target), path)] = shape
    return shapes


def _forms(hook_type: HookType, given: Any, output: Any) -> Iterator[Any]:
    """The values that hooks of this type see in a call: edits those with all their containers, observers bare ones."""
    if hook_type is FORWARD_PRE:
        yield given
        yield unwrapped(given)
    elif hook_type is BACKWARD_PRE:
        yield (output,)
        yield output
    elif hook_type is BACKWARD:
        yield given
        yield {"grad_input": given, "grad_output": (output,)}
        yield {"grad_input": unwrapped(given), "grad_output": output}
    else:
        yield output


def _shapes_of_tensors(value: Any) -> dict[str, Sequence[int]]:
    """The shape of each ordinary tensor of a value, by its path."""
    with suppress(Uncopyable):  # what is in known containers has paths all the same
        value = value if isinstance(value, Tensor) else opened(value)
    shapes: dict[str, Sequence[int]] = {}
    for path, leaf in leaves(value):
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            shapes[path] = tuple(leaf.shape)
    return shapes
