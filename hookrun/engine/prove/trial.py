"""Checks that a plan fits the model: runs a copy of it once with the hooks.

torch's fake tensors have shapes but no data, and work for any model on any device; but they import torch's compiler,
which takes as long as importing torch. A small model of known modules on the CPU is therefore run with data.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy

from hookrun.engine.actions.base import Absent, Keeper, Measured, Packed, TokenRows
from hookrun.engine.actions.user_code import UserCodeError, only_without_data
from hookrun.engine.actions.values import InlineFunction
from hookrun.engine.collector import collector_paused
from hookrun.engine.hook_types import BACKWARD, FORWARD_PRE, SAVED_TENSORS, HookType
from hookrun.engine.html import Shown, View
from hookrun.engine.plan.batch import Shapes, followers_of
from hookrun.engine.plan.outside import NoValues, Values
from hookrun.engine.plan.plan import SHOWN, Match, PlannedHook, ResolvedPlan, lies_in
from hookrun.engine.plan.resolve import resolve, unexpected_finds
from hookrun.engine.plan.table import text, view_of
from hookrun.engine.prove.batch import BatchRuns, TwoSizes, larger_batches, may_have_steps_first
from hookrun.engine.prove.fake import FakeMode
from hookrun.engine.prove.unread import UNREAD, ScoreReads
from hookrun.engine.runtime.hooks.base import RegisteredHook
from hookrun.engine.runtime.install import Installation
from hookrun.engine.runtime.optimizers import without_compiler
from hookrun.engine.runtime.rng import generators_kept
from hookrun.engine.runtime.sinks import Sink
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.snapshot import opened
from hookrun.engine.runtime.wiring import ReplaceOp
from hookrun.engine.spec import Spec
from hookrun.engine.values.containers import (
    arguments,
    describe,
    differentiable,
    form_changed,
    leaves,
    members,
    rebuild,
    tensors,
    unwrapped,
)
from hookrun.engine.values.index import joined
from hookrun.errors import (
    CompileError,
    HookError,
    HookrunError,
    Mistakes,
    Problem,
    SpecError,
    at_module,
    compile_error,
    listed,
    reason,
)

if TYPE_CHECKING:
    from torch.amp import GradScaler

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of one call of the model."""

Score = Callable[[Any], Tensor]
"""The model's output -> the score of a backward pass without training; SpecError if there is no such score."""


T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Plan(Shown, ResolvedPlan):
    """A plan that can be installed: made by `hookrun.compile`. `str()` is the table that the command line shows."""

    def __str__(self) -> str:
        return text(self)

    def _view(self) -> View:
        return view_of(self)

    def install(
        self,
        model: nn.Module,
        *,
        effects: bool = False,
        scaler: GradScaler | None = None,
        strict: bool = False,
    ) -> Installation:
        """A context manager that installs the hooks on `model`.

        model:   the model that the plan was compiled for, or one with the same modules
        effects: count what edits change, at the cost of one reduction for each
        scaler:  the gradient scaler of the training loop: gradient hooks then see unscaled values
        strict:  leaving the block raises HookrunError if a hook did nothing; otherwise it warns (HookrunWarning)

        Raises CompileError if the plan does not fit `model`.
        """
        return Installation(
            self, model, effects=effects, scaler=scaler, standalone=True, strict=strict, locate=locate_batch
        )


@collector_paused()
def compile_plan(
    spec: Spec,
    model: nn.Module,
    *,
    values: Values | None = None,
    example: Example | None = None,
    two: TwoSizes | Literal["grown"] | None = "grown",
    training: bool | None = None,
    backward: bool | Score = True,
    see: Callable[[Any], None] | None = None,
) -> Plan:
    """Match the hooks against the model, then check them with the example, if there is one.

    values:   reads the values that come from files and other runs; None: there are none
    two:      the arguments of a call with more samples, which show what dimension of each tensor is the batch; `grown`:
              the example with one more row in its tensors' first dimension; None: each call has one sample
    backward: run a backward pass after the forward; with a score, from that score and without an optimizer step
    see:      called with the output of the model under its hooks

    Raises CompileError that lists the problems of both steps: hooks that do not match do not prevent checks of others;
    SpecError if the output has no such score.
    """
    values = values or NoValues()
    plan, problems = resolve(spec, model, values)
    mistakes = Mistakes(problems=problems)
    if example is not None:
        proving = partial(prove, plan, model, example, training=training, backward=backward, see=see)
        trials: list[ResolvedPlan] = []
        for larger in larger_batches(model, example) if two == "grown" else (two,):
            trials.append(mistakes.tried(proving, larger) or plan)
            if trials[-1].batch_fits:
                break
        plan = trials[-1] if trials[-1].batch_fits else trials[0]
        mistakes.add(unexpected_finds(plan), of_hooks=True)
    if mistakes.problems:
        mistakes.problems = values.with_origins(mistakes.problems, spec)
        mistakes.refuse()
    return Plan(**{part.name: getattr(plan, part.name) for part in fields(ResolvedPlan)})


def prove(
    plan: ResolvedPlan,
    model: nn.Module,
    example: Example,
    two: TwoSizes | None = None,
    *,
    training: bool | None = None,
    backward: bool | Score = True,
    replace_op: ReplaceOp | None = None,
    see: Callable[[Any], None] | None = None,
) -> ResolvedPlan:
    """The plan with shapes, or with the reason why they were not checked. `model` is not changed.

    example:  positional and keyword arguments of one call; tensors in them are read for shape, dtype and device only
    two:      the arguments of a call with more samples; None: what the plan says of batch dimensions stays
    training: check in this mode; None: in the model's own
    backward: run a backward pass and an optimizer step if hooks need them; with a score, only a backward pass from
              it, with inputs that require a gradient
    replace_op: what runs in place of what each hook does, see `Installation`
    see:      called with the output of the model under its hooks

    Raises CompileError that lists every hook that fails, SpecError if the output has no such score.
    """
    batches = BatchRuns(plan, two)

    def run(copied: nn.Module, args: Any, kwargs: Any) -> ResolvedPlan:
        located = batches.read() if two is None else batches.located()
        return _run_hooked(located, copied, args, kwargs, backward, replace_op, batches, see)

    proven = on_a_copy(
        model,
        example,
        run,
        before=batches.run,
        larger=None if two is None else two.larger,
        training=training,
        with_data=not any(map(_may_show_data, plan.hooks)),
        is_whole=lambda proven: proven.unchecked is None,
    )
    if not isinstance(proven, str):
        return proven
    if two is not None:
        runs = BatchRuns(plan, two)
        if _run_with_data(runs, model, example, two, training=training):
            plan = runs.located()
    return replace(plan, unchecked=proven)


def _may_show_data(hook: PlannedHook) -> bool:
    """Whether the hook runs a user's own code, or may store saved tensors, which then get no real data."""
    if hook.spec.action.own_functions() or hook.spec.hook_type is SAVED_TENSORS:
        return True
    given = hook.spec.action.outside_values().values()
    return any(isinstance(value, InlineFunction) for value in given)


_LARGEST_COPY = 2**26
"""The most elements of a model that is copied with its data where it does not run without."""


def _run_with_data(
    runs: BatchRuns, model: nn.Module, example: Example, two: TwoSizes, *, training: bool | None = None
) -> bool:
    """Run a copy of the model that has its data, without hooks. False if it is too large, or does not run.

    What a model does may depend on its numbers, so that it does not run with fake tensors.
    """
    held = _tensors_of(model)
    if any(is_lazy(tensor) or tensor.is_meta for tensor in held):
        return False
    if sum(tensor.numel() for tensor in held) > _LARGEST_COPY:
        return False
    positional, keywords = example
    call = tuple(positional), dict(keywords)
    training = model.training if training is None else training
    own_saving = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with generators_kept(), torch.inference_mode(mode=False), torch.no_grad(), own_saving:
        try:
            _run_copy(model, call, two.larger, runs.run, training)
        except Exception:  # the call itself reports what is wrong
            return False
    return True


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a model, which may redefine `parameters` and `buffers`."""
    return [*nn.Module.parameters(model), *nn.Module.buffers(model)]


def locate_batch(hooks: Installation, module: nn.Module, entry: str, call: Example) -> int | None:
    """Find out, at a call in a user's own loop, what dimension of each tensor is the batch.

    Returns which dimension of the arguments is the batch: the first, or the second if modules of torch that have the
    steps of a sequence first (`batch_first=False`) see it there; None: not known.

    The copy of the model that runs has none of its hooks. What a trial run with this call does not show stays unknown.

    module: the one that is called
    entry:  its path in the model on which the hooks are installed
    call:   the arguments; the batch has as many samples as `hooks.samples`, or as the first tensor has rows
    """
    samples = None if hooks.clock.samples is None else len(hooks.clock.samples)
    unknown = [site for site in hooks.sites if site.hook_type.batch and not site.batch.is_known]
    if may_have_steps_first(module, hooks.clock.model, call, samples):
        return None
    for two in larger_batches(module, call, samples) if unknown else ():
        if two is None:
            continue
        runs = BatchRuns(hooks.plan, two, entry)
        with suppress(Exception):  # the call itself reports what is wrong
            ran = on_a_copy(module, call, lambda *run: True, before=runs.run, larger=two.larger)
            if ran is not True and not _run_with_data(runs, module, call, two):
                return None
            located = runs.located()
            if not located.batch_fits:
                continue
            _set_dims(unknown, located)
            if not entry and any(map(_captures_part, hooks.plan.hooks)):
                _set_dims(unknown, prove(hooks.plan, module, call, two, backward=False))
            return two.dim
    return None


def _set_dims(sites: Sequence[HookSite], shown: ResolvedPlan) -> None:
    """Tell sites what a run has shown of the dimensions of what they see."""
    hooks = {hook.spec.name: hook for hook in shown.hooks}
    for site in sites:
        hook = hooks[site.hook_name]
        site.batch.followers = hook.batch_of(site.path).followers
        site.captured.followers = hook.captured_of(site.path).followers


def on_a_copy(
    model: nn.Module,
    example: Example,
    run: Callable[[nn.Module, Any, Any], T],
    *,
    before: Callable[[nn.Module, Any, Any, Any], None] | None = None,
    larger: Example | None = None,
    training: bool | None = None,
    with_data: bool = True,
    is_whole: Callable[[T], bool] = lambda result: True,
) -> T | str:
    """The result of `run` for a copy of the model and the example's arguments; why the model itself fails on these.

    before: what is run before, with a copy of `larger` too, in place of the model; it raises what the model raises
    larger: arguments of another call
    with_data: a small model may run with data; otherwise, and if that fails, the tensors of the copy are fake
    is_whole:  whether a result with data is complete
    """
    parameters = dict(nn.Module.named_parameters(model))  # a model may redefine it
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            return f"{name} has no shape yet: a lazy module gets it at its first call"
    is_meta_call = all(tensor.is_meta for tensor in tensors(example))
    for name, parameter in parameters.items():
        if parameter.is_meta and not is_meta_call:
            return f"{name} lies on the meta device: the forward gets its values from elsewhere"
    training = model.training if training is None else training
    positional, keywords = example
    call = tuple(positional), dict(keywords)
    # the innermost hooks hold: a checkpoint around a call of the model must not count what the copy saves
    own_saving = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with generators_kept(), torch.inference_mode(mode=False), torch.enable_grad(), own_saving:
        if with_data and is_small(model, call):
            with suppress(Exception):  # the run with fake tensors, which follows, reports what is wrong
                copied, (args, kwargs) = _run_copy(model, call, larger, before, training)
                result = run(copied, args, kwargs)
                if is_whole(result):
                    return result
        mode = FakeMode(allow_non_fake_inputs=True)
        with _quiet():
            try:
                copied, (args, kwargs) = _run_copy(model, call, larger, before, training, mode)
            except Exception as error:  # if the model fails without hooks, they cannot be checked
                return str(error) if isinstance(error, HookrunError) else reason(error) + at_module(error)
            with mode:
                return run(copied, args, kwargs)


_KNOWN = ("torch.nn.modules.", "torchvision.", "hookrun.models.")
"""Packages whose modules change nothing but themselves when they run."""

_SMALL_MODEL = 2**20
"""The most elements of all parameters and buffers for a run with data, which takes a few milliseconds."""
_SMALL_EXAMPLE = 2**14
"""The most elements of all arguments for it."""


def is_small(model: nn.Module, call: Any) -> bool:
    """Whether a copy of the model can run with data: on the CPU, small, of known modules, without hooks.

    call: the arguments
    """
    held = _tensors_of(model)
    given = list(tensors(call))
    if sum(tensor.numel() for tensor in held) > _SMALL_MODEL:
        return False
    if sum(tensor.numel() for tensor in given) > _SMALL_EXAMPLE:
        return False
    for tensor in (*held, *given):
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
            return False
    for name, hooks in vars(nn_module).items():
        if name.startswith("_global_") and "hooks" in name and hooks:
            return False
    return all(map(_is_known, model.modules()))


def _is_known(module: nn.Module) -> bool:
    """Whether the module has the forward of its class, which is known, and no hooks that a copy of it would have."""
    if "forward" in vars(module) or not f"{type(module).__module__}.".startswith(_KNOWN):
        return False
    for name, hooks in vars(module).items():
        if name.endswith("_hooks"):
            for hook in hooks.values():
                if not isinstance(getattr(hook, "__self__", None), RegisteredHook):
                    return False
    return True


def _run_copy(
    model: nn.Module,
    call: Any,
    larger: Any,
    before: Callable[[nn.Module, Any, Any, Any], None] | None,
    training: bool,
    mode: FakeTensorMode | None = None,
) -> tuple[nn.Module, Any]:
    """A copy of the model, which `before` has shown to run without hooks, and a copy of the arguments for another call.

    mode: makes them fake
    """
    call, larger = rebuild((call, larger), _detached)
    # a generator cannot be copied in this mode, and fake tensors draw nothing from it
    same = {id(leaf): leaf for leaf in members(call) if isinstance(leaf, torch.Generator)}
    with nullcontext() if mode is None else FakeCopyMode(mode):
        copied = copy.deepcopy(model)
        args, kwargs = copy.deepcopy(call, dict(same))
        unused = copy.deepcopy(call, dict(same))
        larger = copy.deepcopy(larger, dict(same))
    names = {id(part): name for name, part in _parts(model)}
    for _, part in _parts(copied):
        name = names.get(id(part))
        if name is not None:
            raise HookrunError(f"a deep copy of the model shares {name or 'its root'} with the model")
    copied.train(training)
    with nullcontext() if mode is None else mode:
        if before is None:
            copied(*args, **kwargs)
        else:
            before(copied, args, kwargs, larger)
    return copied, unused


def _detached(leaf: Any) -> Any:
    """A tensor as a leaf of the graph, which copy.deepcopy takes; any other object as it is."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _parts(model: nn.Module) -> Iterator[tuple[str, object]]:
    yield from chain(model.named_modules(), model.named_parameters(), model.named_buffers())


def _run_hooked(
    plan: ResolvedPlan,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    backward: bool | Score,
    replace_op: ReplaceOp | None,
    batches: BatchRuns,
    see: Callable[[Any], None] | None,
) -> ResolvedPlan:
    """Run the copy with its hooks. The plan with what was found, see `prove`."""
    if not isinstance(backward, bool):
        args, kwargs = rebuild((args, kwargs), differentiable)
    edits = [hook.spec for hook in plan.hooks] if replace_op is None else []
    findings = TrialSink(scores=ScoreReads(edits))
    unchecked = None
    with ExitStack() as stack:
        try:
            installed = Installation(plan, model, sink=findings, replace_op=replace_op)
            stack.enter_context(installed)
        except HookError as error:
            return replace(plan, unchecked=_unproven(error))
        shapes = _shapes_of_first_calls(plan, installed.sites)
        try:
            with findings.scores if findings.scores.hooks else nullcontext():
                output = model(*args, **kwargs)
            for hook, path in findings.scores.unread():
                findings.problems.setdefault((hook, UNREAD), []).append(path)
            if see is not None:
                see(output)
            if not isinstance(backward, bool):
                backward(output).backward()
            elif backward:
                _backward_and_step(output, model, {hook.spec.hook_type for hook in plan.hooks})
            if batches.again is not None and any(_captures_part(hook) for hook in plan.hooks):
                findings.captured_of_larger = {}
                batches.run_hooked(model, _sum_backward if backward else None)
        except SpecError:
            raise
        except Exception as error:
            unchecked = reason(error) + at_module(error)
        findings.judge_absent(installed)
    if findings.problems:
        raise CompileError(findings.as_problems())
    if unchecked is not None:
        return replace(plan, unchecked=unchecked)
    for (hook, path), why in findings.without.items():
        unchecked = f"{hook} on {path or '(root)'} cannot run without data: {why}"
    sizes = None if batches.two is None else batches.two.sizes
    hooks = _with_shapes(plan, shapes, findings, sizes)
    return replace(plan, hooks=tuple(hooks), unchecked=unchecked)


def _with_shapes(
    plan: ResolvedPlan,
    shapes: Mapping[tuple[str, bool], str],
    findings: TrialSink,
    sizes: tuple[int, int] | None,
) -> Iterator[PlannedHook]:
    """The hooks with what was found of each of their matches, see `_seen`."""
    skipped: list[str] = []
    for hook in plan.hooks:
        if hook.spec.action.does == "skip" and hook.spec.keys.when.always:
            for match in hook.matches:
                skipped += match.names
    for hook in plan.hooks:
        if hook.spec.hook_type.on_parameters:
            yield hook
            continue
        matches: list[Match] = []
        for match in hook.matches:
            if lies_in(match.names, skipped):
                matches.append(replace(match, called=False))
            else:
                matches.append(_seen(hook, match, shapes, findings, sizes))
        yield replace(hook, matches=tuple(matches))


def _unproven(error: HookError) -> str:
    """Why a user's own function cannot run on the fake model at installation. CompileError for other failures."""
    cause = error.__cause__
    if not isinstance(cause, UserCodeError):
        raise error
    why = only_without_data(cause)
    if why is None:
        raise compile_error(f"hooks.{cause.hook}", str(error)) from error
    return f"{cause.hook} cannot run without data: {why}"


def _shapes_of_first_calls(plan: ResolvedPlan, sites: Iterable[HookSite]) -> dict[tuple[str, bool], str]:
    """(path of a hooked module, `_sees_arguments`) -> the shapes that its hooks see, filled in at its first call."""
    shapes: dict[tuple[str, bool], str] = {}
    modules = {site.path: site.module for site in sites}

    def note(path: str, of_arguments: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # arguments that no hook sees may be anything, also what has no end or cannot be read
        seen = unwrapped(arguments(args, kwargs)) if of_arguments else output
        shapes.setdefault((path, of_arguments), describe(seen))

    watched = set[tuple[str, bool]]()
    for hook in plan.hooks:
        if not hook.spec.hook_type.on_parameters:
            watched |= {(match.path, _sees_arguments(hook)) for match in hook.matches}
    for path, of_arguments in watched:
        nn.Module.register_forward_hook(modules[path], partial(note, path, of_arguments), with_kwargs=True)
    return shapes


def _sees_arguments(hook: PlannedHook) -> bool:
    return hook.spec.hook_type in (FORWARD_PRE, BACKWARD)


def _backward_and_step(output: Any, model: nn.Module, types: Iterable[HookType]) -> None:
    """The backward pass and the optimizer step that hooks of these types need."""
    if any(hook_type.needs_backward for hook_type in types):
        _sum_backward(output)
    if any(hook_type.phase == "step" for hook_type in types):
        without_compiler(torch.optim.SGD)(model.parameters(), lr=0.0).step()


def _sum_backward(output: Any) -> None:
    """A backward pass from the sum of all outputs that carry a gradient."""
    carrying = [tensor for tensor in tensors(output) if tensor.requires_grad]
    if carrying:
        torch.stack([tensor.abs().sum().float() for tensor in carrying]).sum().backward()


def _shapes(captured: Mapping[str, Tensor]) -> Shapes:
    return {path: tensor.shape for path, tensor in captured.items() if not tensor.is_nested}


def _captures_part(hook: PlannedHook) -> bool:
    """Whether the shapes of what it captures, whole batches, do not follow from those of what it sees."""
    spec = hook.spec
    return spec.captures_part and spec.hook_type.batch and not spec.works_by_sample


def _seen(
    hook: PlannedHook,
    match: Match,
    shapes: Mapping[tuple[str, bool], str],
    findings: TrialSink,
    sizes: tuple[int, int] | None,
) -> Match:
    """The match with the shape of what it sees, and with what it captures: batch dimensions and bytes.

    sizes: how many samples the two batches have; None: not known
    """
    shape = shapes.get((match.path, _sees_arguments(hook)))
    place = hook.spec.name, match.path
    note = findings.notes.get(place, match.note)
    if not note and shape is not None and not hook.spec.takes_part and shape.startswith("["):
        note = hook.spec.action.note_on(shape, match.type)
    held = findings.held.get(place)
    match = replace(match, shape=shape, called=shape is not None, note=note, held=held)
    firings = findings.captured.get(place)
    if firings is None:
        return match
    larger = (findings.captured_of_larger or {}).get(place)
    if larger is not None and sizes is not None and _captures_part(hook):
        calls = zip(map(_shapes, firings), map(_shapes, larger), strict=False)
        match = replace(match, captured=followers_of(calls, sizes))
    if sizes is None or not (hook.spec.works_by_sample or _has_rows(hook, match, firings)):
        return replace(match, bytes=_bytes(firings[:1]), per_sample=False)
    return replace(match, bytes=_bytes(firings) / sizes[0], per_sample=True)


def _has_rows(hook: PlannedHook, match: Match, firings: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether every tensor that the hook captures at the match has a batch dimension."""
    dims = replace(hook, matches=(match,)).captured_of(match.path)
    if not hook.spec.hook_type.batch or not dims.is_known:
        return False
    return all(dims.of(path) is not None for firing in firings for path in firing)


def _bytes(firings: Sequence[Mapping[str, Tensor]]) -> int:
    return sum(x.numel() * x.element_size() for firing in firings for x in firing.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off torch's log, which has a long traceback for each shape error with fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass(eq=False)
class TrialSink(Sink):
    """The sink of a trial run: collects failures of hooks and the tensors of captures.

    problems: (hook, what failed) -> the paths where it failed
    captured: (hook, path) -> the fake tensors of each of its firings, by their path in the value
    captured_of_larger: the same for the larger batch, while and after that runs; problems are then not collected
    notes:    (hook, path) -> what the plan says of the hook there
    held:     (hook, path) -> the units of a fold, and the bytes that it holds of them
    without:  (hook, path) -> why the user's own function cannot run without data; its value passed unchanged
    absent:   site of an observer -> what its action does not find in the values there
    scores:   watches what routers return, where a hook edits it
    """

    has_values = False
    problems: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    captured: dict[tuple[str, str], list[dict[str, Tensor]]] = field(default_factory=dict)
    captured_of_larger: dict[tuple[str, str], list[dict[str, Tensor]]] | None = None
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    held: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    without: dict[tuple[str, str], str] = field(default_factory=dict)
    absent: dict[HookSite, str] = field(default_factory=dict)
    scores: ScoreReads = field(default_factory=ScoreReads)
    _measured: set[tuple[Any, ...]] = field(default_factory=set)

    def keeper(self, site: HookSite) -> Keeper:
        """Remember the tensors of every firing."""

        def keep(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            # Detached: the graph of a tensor refers to its hooks, and they to this object: a cycle hidden from gc.
            of_firing = {
                joined(site.current.within, path): leaf.detach()
                for path, leaf in leaves(value if isinstance(value, Tensor) else opened(value))
                if isinstance(leaf, Tensor)
            }
            captured = self.captured if self.captured_of_larger is None else self.captured_of_larger
            captured.setdefault((site.hook_name, site.path), []).append(of_firing)

        return keep

    def emit(self, start: tuple[Any, ...], data: Mapping[str, Any] | Measured, *, show: bool = False) -> None:
        """Record nothing, since the values are not real; statistics are computed: what fails there is a problem.

        Fake tensors of one form have the same statistics: computed once.
        """
        if isinstance(data, Measured):
            x = data.x
            form = data.now, x.layout, x.dtype, x.device, () if x.is_nested else x.shape
            if not is_fake(x) or form not in self._measured:
                data.now(x, False)
                self._measured.add(form)

    def guard(self, site: HookSite, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op, wrapped: if it fails, the failure becomes a problem and the value passes unchanged."""

        def guarded(value: Any) -> Any:
            self.scores.in_hook = True
            try:
                new = op(value)
            except HookrunError as error:
                own = error.__cause__
                if isinstance(own, Absent) and site.spec.action.observes:
                    self.absent.setdefault(site, str(own))
                    return value
                if isinstance(own, UserCodeError) and (why := only_without_data(own)) is not None:
                    self.without[site.hook_name, site.path] = why
                    return value
                self.fail(site, str(error).removeprefix(f"{site.where}: "))
                return value
            finally:
                self.scores.in_hook = False
            # a saved tensor may be replaced, it is restored later
            if not isinstance(new, Packed) and (changed := form_changed(value, new)) is not None:
                self.fail(site, changed)
                return value
            if site.hook_name in self.scores.hooks:
                self.scores.note(site, value, new)
            return new

        return guarded

    def note(self, site: HookSite, text: str, held: tuple[int, int] | None = None) -> None:
        """Remember the first note of a site."""
        self.notes.setdefault((site.hook_name, site.path), text)
        if held is not None:
            self.held[site.hook_name, site.path] = held

    def fail(self, site: HookSite, what: str) -> None:
        """Add the failure of a hook at a site, each different failure once."""
        if self.captured_of_larger is not None:
            return
        paths = self.problems.setdefault((site.hook_name, what), [])
        if site.path not in paths:
            paths.append(site.path)

    def judge_absent(self, installed: Installation) -> None:
        """A hook that records nothing anywhere is a problem; of another the plan says where it records nothing."""
        recording = {site.hook_name for site in installed.sites if site.fired > site.idle}
        for site, what in self.absent.items():
            if site.hook_name in recording:
                self.note(site, f"records nothing, since {what}")
            else:
                self.fail(site, what)

    def as_problems(self) -> list[Problem]:
        """The failures, each with all its places."""
        return [
            Problem(f"hooks.{hook}", f"on {listed([path or '(root)' for path in paths], SHOWN)}: {what}")
            for (hook, what), paths in self.problems.items()
        ]
