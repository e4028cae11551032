"""Checks that a plan fits the model: runs a copy of it once with the hooks.

torch's fake tensors have shapes but no data, and work for any model on any device; but they import torch's compiler,
which takes as long as importing torch. Models whose modules do not depend on the device have cheaper copies: a small
model is copied with its data; a larger model is copied to the meta device, where tensors have no data.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.modules import module as nn_module

from hookrun.actions.base import Keeper, Packed
from hookrun.actions.given import GivenFunction
from hookrun.actions.own_code import OwnCodeError, only_without_data
from hookrun.actions.site import TokenRows
from hookrun.errors import (
    CompileError,
    HookError,
    HookrunError,
    Problem,
    SpecError,
    at_module,
    listed,
    reason,
)
from hookrun.hook_types import SAVED_TENSORS
from hookrun.plan.plan import Match, PlannedHook, ResolvedPlan
from hookrun.plan.resolve import resolve
from hookrun.plan.table import text
from hookrun.run_values import RunReferences, with_origins
from hookrun.runtime.install import Installation
from hookrun.runtime.plain_optimizers import without_compiler
from hookrun.runtime.site import HookSite, Sink
from hookrun.runtime.snapshot import held
from hookrun.spec import Spec
from hookrun.values.containers import children, describe, differentiable, rebuild, reshaped, tensors

if TYPE_CHECKING:
    from torch.amp import GradScaler

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of one call of the model."""

Score = Callable[[Any], Tensor]
"""The model's output -> the score of a backward pass without training; SpecError if there is no such score."""

_SHOWN = 4


@dataclass(frozen=True)
class Plan(ResolvedPlan):
    """A plan that can be installed: made by `hookrun.compile`. `str()` is the table that the command line shows."""

    def __str__(self) -> str:
        return text(self)

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
        return Installation(self, model, effects=effects, scaler=scaler, standalone=True, strict=strict)


def compile_plan(
    spec: Spec,
    model: nn.Module,
    *,
    runs: RunReferences | None = None,
    example: Example | None = None,
    training: bool | None = None,
    backward: bool | Score = True,
) -> Plan:
    """Match the hooks against the model, then check them with the example, if there is one.

    backward: run a backward pass after the forward; with a score, from that score and without an optimizer step

    Raises CompileError that lists the problems of both steps: hooks that do not match do not prevent checks of others.
    """
    runs = runs or RunReferences()
    plan, problems = resolve(spec, model, runs)
    if example is not None:
        try:
            plan = prove(plan, model, example, training=training, backward=backward)
        except CompileError as error:
            problems += error.errors
    if problems:
        raise CompileError(with_origins(problems, spec, runs))
    return Plan(**{each.name: getattr(plan, each.name) for each in fields(ResolvedPlan)})


def prove(
    plan: ResolvedPlan,
    model: nn.Module,
    example: Example,
    *,
    training: bool | None = None,
    backward: bool | Score = True,
) -> ResolvedPlan:
    """The plan with shapes, or with the reason why they were not checked. `model` is not changed.

    example:  positional and keyword arguments of one call; tensors in them are read for shape, dtype and device only
    training: check in this mode; None: in the model's own
    backward: run a backward pass and an optimizer step if hooks need them; with a score, only a backward pass from
              it, with inputs that require a gradient

    Raises CompileError that lists every hook that fails, SpecError if the output has no such score.
    """
    training = model.training if training is None else training
    with _quiet(), _no_global_effect():
        if (found := _proven_quickly(plan, model, example, training, backward)) is not None:
            return found
        try:
            copied = fake_copy(model, example)
            _run_bare(copied, training)
        except Exception as error:  # if the model fails without hooks, they cannot be checked
            return replace(plan, unchecked=reason(error) + at_module(error))
        return _hooked(plan, copied, backward)


def _proven_quickly(
    plan: ResolvedPlan, model: nn.Module, example: Example, training: bool, backward: bool | Score
) -> ResolvedPlan | None:
    """The plan, if a copy without fake tensors is enough to check it; None: fake tensors are needed.

    A user's own code is not called with real tensors or on another device; nothing is saved to disk.
    """
    own_code = any(hook.spec.action.own_code or _given_function(hook) for hook in plan.hooks)
    saves = any(hook.spec.hook_type is SAVED_TENSORS for hook in plan.hooks)
    if own_code:
        return None
    try:
        if (copied := quick_copy(model, example, may_compute=not saves)) is None:
            return None
        _run_bare(copied, training)
        found = _hooked(plan, copied, backward)
    except Exception:  # the run with fake tensors, which follows, reports what is wrong
        return None
    return found if found.unchecked is None else None


def _given_function(hook: PlannedHook) -> bool:
    return any(isinstance(each, GivenFunction) for values in hook.values.values() for each in values.values())


def _run_bare(copied: TrialCopy, training: bool) -> None:
    copied.model.train(training)
    with copied.inside():
        copied.model(*copied.args, **copied.kwargs)


def _hooked(plan: ResolvedPlan, copied: TrialCopy, backward: bool | Score) -> ResolvedPlan:
    with copied.inside():
        return _run_hooked(plan, copied, backward)


def _run_hooked(plan: ResolvedPlan, copied: TrialCopy, backward: bool | Score) -> ResolvedPlan:
    fake, args, kwargs = copied.model, copied.args, copied.kwargs
    if not isinstance(backward, bool):
        args, kwargs = rebuild((args, kwargs), differentiable)
    findings, shapes, unchecked = TrialSink(), dict[str, str](), None
    with ExitStack() as stack:
        try:
            stack.enter_context(Installation(plan, fake, sink=findings))
        except HookError as error:
            return replace(plan, unchecked=_unproven(error))
        _watch_shapes(plan, fake, shapes)
        try:
            output = fake(*args, **kwargs)
            types = {hook.spec.hook_type for hook in plan.hooks} if backward is True else set()
            if any(each.needs_backward for each in types):
                _backward(output)
            if any(each.phase == "step" for each in types):
                without_compiler(torch.optim.SGD)(fake.parameters(), lr=0.0).step()
            if not isinstance(backward, bool):
                backward(output).backward()
        except SpecError:
            raise
        except Exception as error:
            unchecked = reason(error) + at_module(error)
    if findings.problems:
        raise CompileError(_problems(findings))
    if unchecked is not None:
        return replace(plan, unchecked=unchecked)
    for (hook, path), why in findings.without.items():
        unchecked = f"{hook} on {path or '(root)'} cannot run without data: {why}"
    batch = next((tensor.shape[0] for tensor in tensors((args, kwargs)) if tensor.dim()), 0)
    hooks = tuple(_with_shapes(hook, shapes, findings, batch) for hook in plan.hooks)
    return replace(plan, hooks=hooks, unchecked=unchecked)


def _unproven(error: HookError) -> str:
    """Why a user's own function cannot run on the fake model at installation. CompileError for other failures."""
    own = error.__cause__
    if not isinstance(own, OwnCodeError):
        raise error
    if (why := only_without_data(own)) is None:
        raise CompileError([Problem(f"hooks.{own.hook}", str(error))]) from error
    return f"{own.hook} cannot run without data: {why}"


def _watch_shapes(plan: ResolvedPlan, fake: nn.Module, shapes: dict[str, str]) -> None:
    """Record the output shape of every hooked module at its first call, in `shapes`."""
    modules = dict(fake.named_modules(remove_duplicate=False))
    paths = {match.path for hook in plan.hooks if not hook.spec.on_parameters for match in hook.matches}
    for path in paths:
        modules[path].register_forward_hook(
            lambda module, args, output, path=path: shapes.setdefault(path, describe(output)) and None
        )


def _backward(output: Any) -> None:
    carrying = [tensor for tensor in tensors(output) if tensor.requires_grad]
    if carrying:
        torch.stack([tensor.abs().sum().float() for tensor in carrying]).sum().backward()


def _with_shapes(
    hook: PlannedHook, shapes: Mapping[str, str], findings: TrialSink, batch: int
) -> PlannedHook:
    if hook.spec.on_parameters:
        return hook
    captured = findings.captured
    return replace(
        hook,
        matches=tuple(
            _with_shape(
                match,
                shapes,
                captured.get((hook.spec.name, match.path)),
                batch,
                tokens=hook.spec.keys.tokens is not None,
            )
            for match in hook.matches
        ),
    )


def _with_shape(
    match: Match, shapes: Mapping[str, str], captured: list[Tensor] | None, batch: int, *, tokens: bool
) -> Match:
    match = replace(match, shape=shapes.get(match.path), called=match.path in shapes)
    if captured is None:
        return match
    per_sample = batch > 0 and all(
        tensor.dim() > 0 and (tensor.shape[0] == batch or tokens) for tensor in captured
    )
    total = sum(tensor.numel() * tensor.element_size() for tensor in captured)
    return replace(match, bytes=total / batch if per_sample else total, per_sample=per_sample)


def _problems(findings: TrialSink) -> list[Problem]:
    problems = dict[tuple[str, str], list[str]]()
    for hook, path, what in findings.problems:
        problems.setdefault((hook, what), []).append(path or "(root)")
    return [
        Problem(f"hooks.{hook}", f"on {listed(paths, _SHOWN)}: {what}")
        for (hook, what), paths in problems.items()
    ]


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


@contextmanager
def _no_global_effect() -> Iterator[None]:
    """A context with gradients enabled that restores the global generator."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


class TrialSink(Sink):
    """The sink of a trial run: collects failures of hooks and the tensors of captures.

    problems: (hook, path, what) of every hook that failed
    captured: (hook, path) -> the fake tensors of its first capture
    without:  (hook, path) -> why the user's own function cannot run without data; its value passed unchanged
    """

    has_values = False

    def __init__(self) -> None:
        self.problems = list[tuple[str, str, str]]()
        self.captured = dict[tuple[str, str], list[Tensor]]()
        self.without = dict[tuple[str, str], str]()

    def keeper(self, site: HookSite) -> Keeper:
        """Remember the tensors of the first firing."""

        def keep(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            # Detached: the graph of a tensor refers to its hooks, and they to this object: a cycle hidden from gc.
            seen = [tensor.detach() for tensor in held(value)]
            self.captured.setdefault((site.hook_name, site.path), seen)

        return keep

    def emit(self, start: tuple[Any, ...], data: Mapping[str, Any], *, show: bool = False) -> None:
        """Record nothing, since the values are not real; statistics are computed: what fails there is a problem."""
        dict(data)

    def guard(self, site: HookSite, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op, wrapped: if it fails, the failure becomes a problem and the value passes unchanged."""

        def guarded(value: Any) -> Any:
            try:
                new = op(value)
            except HookrunError as error:
                own = error.__cause__
                if isinstance(own, OwnCodeError) and (why := only_without_data(own)) is not None:
                    self.without[site.hook_name, site.path] = why
                    return value
                self.fail(site, str(error).removeprefix(f"{site.where}: "))
                return value
            if (changed := _changed_form(value, new)) is not None:
                self.fail(site, changed)
                return value
            return new

        return guarded

    def fail(self, site: HookSite, what: str) -> None:
        """Add the failure of a hook at a site, each different failure once."""
        if (found := (site.hook_name, site.path, what)) not in self.problems:
            self.problems.append(found)


def _changed_form(old: Any, new: Any) -> str | None:
    """How an edit changed type, shape, dtype or device, or None."""
    if old is new or isinstance(new, Packed):  # a saved tensor may be replaced, it is restored later
        return None
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return reshaped(old, new)
    if type(old) is not type(new):
        return f"the action changes the type from {type(old).__name__} to {type(new).__name__}"
    before, after = children(old), children(new)
    if [key for key, _ in before] != [key for key, _ in after]:
        return f"the action changes the members of the {type(old).__name__}"
    pairs = zip(before, after, strict=True)
    return next((text for (_, a), (_, b) in pairs if (text := _changed_form(a, b)) is not None), None)


_SAME_ANYWHERE = (
    *(
        f"torch.nn.modules.{name}"
        for name in (
            "activation",
            "batchnorm",
            "channelshuffle",
            "container",
            "conv",
            "dropout",
            "flatten",
            "instancenorm",
            "linear",
            "normalization",
            "padding",
            "pixelshuffle",
            "pooling",
            "sparse",
            "upsampling",
        )
    ),
    "torchvision.models",
    "torchvision.ops.misc",
    "torchvision.ops.stochastic_depth",
    "hookrun.models",
)
"""Packages whose modules compute the same shapes, by the same calls, on every device."""


_SMALL_MODEL, _SMALL_EXAMPLE = 2**20, 2**14
"""The most elements of all parameters and buffers, and of all arguments, for a copy with data: a few milliseconds."""


@dataclass(frozen=True)
class TrialCopy:
    """A copy of a model and of the arguments of one call.

    inside: returns the context manager in which the copy runs
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inside: Callable[[], AbstractContextManager[Any]]


def fake_copy(model: nn.Module, example: Example) -> TrialCopy:
    """A copy with fake tensors, for any model. The originals are not changed."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        made = copy.deepcopy(model)
    with mode:
        args, kwargs = rebuild(_plain(example), lambda leaf: _if_tensor(leaf, mode.from_tensor))
    return TrialCopy(made, args, kwargs, lambda: mode)


def quick_copy(model: nn.Module, example: Example, *, may_compute: bool) -> TrialCopy | None:
    """A copy that needs no compiler; None where it might behave differently. The originals are not changed.

    may_compute: whether the copy may have tensors with data
    """
    held, given = [*model.parameters(), *model.buffers()], list(tensors(_plain(example)))
    if not _computes_the_same(model) or not all(map(_is_ordinary, [*held, *given])):
        return None
    if may_compute and _elements(held) <= _SMALL_MODEL and _elements(given) <= _SMALL_EXAMPLE:
        memo, change = {}, _as_it_is
    else:
        memo, change = {id(tensor): _on_meta(tensor) for tensor in held}, _on_meta
    args, kwargs = rebuild(_plain(example), lambda leaf: _if_tensor(leaf, change))
    return TrialCopy(copy.deepcopy(model, memo), args, kwargs, nullcontext)


def _elements(found: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in found)


def _plain(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = example
    return tuple(args), dict(kwargs)


def _if_tensor(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(leaf) if isinstance(leaf, Tensor) else leaf


def _computes_the_same(model: nn.Module) -> bool:
    """Whether every module is of a known class, with the forward of its class and without hooks."""
    hooked = any(
        getattr(nn_module, name)
        for name in vars(nn_module)
        if name.startswith("_global_") and "hooks" in name
    )
    return not hooked and all(map(_is_known, model.modules()))


def _is_known(module: nn.Module) -> bool:
    home = type(module).__module__
    if not any(home == each or home.startswith(f"{each}.") for each in _SAME_ANYWHERE):
        return False
    if isinstance(module, nn.MultiheadAttention):  # its computation depends on the device
        return False
    own = vars(module)
    return (
        "forward" not in own
        and not any(own.get(name) for name in own if name.endswith("_hooks"))
        and all(_is_setting(value) for name, value in own.items() if name not in _OF_EVERY_MODULE)
    )


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has: parameters, buffers, modules, hooks and mode."""


def _is_setting(value: Any) -> bool:
    """Whether the value is a setting such as a size, a mode or a name, which is cheap and safe to copy."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_setting, value))
    if isinstance(value, dict):
        return all(_is_setting(each) for item in value.items() for each in item)
    if isinstance(value, partial):
        return _is_setting((value.args, value.keywords))
    if is_dataclass(value) and not isinstance(value, type):
        return _is_setting(vars(value))
    return value is None or isinstance(value, _SETTINGS)


_SETTINGS = (
    bool,
    int,
    float,
    str,
    type,
    Enum,
    FunctionType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
)


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether a meta tensor with the same shape, strides and dtype can replace the tensor."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.grad_fn is None
        and not tensor.is_quantized
        and not tensor._is_view()
    )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
