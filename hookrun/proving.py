"""Checks that a plan fits the model: runs a copy of it once with the hooks, with fake tensors unless it is small."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookrun.actions.given import GivenFunction
from hookrun.actions.own_code import OwnCodeError, only_without_data
from hookrun.containers import describe, differentiable, rebuild, tensors
from hookrun.errors import CompileError, HookError, Problem, SpecError, at_module, listed, reason
from hookrun.hook_types import SAVED_TENSORS
from hookrun.plan.plan import Match, PlannedHook, ResolvedPlan
from hookrun.plan.resolve import resolve
from hookrun.plan.table import text
from hookrun.run_values import UsedBy, with_origins
from hookrun.runtime.install import Installation
from hookrun.runtime.plain_optimizers import without_compiler
from hookrun.spec import Spec
from hookrun.trial_copies import Example as Example
from hookrun.trial_copies import TrialCopy, fake_copy, quick_copy
from hookrun.trial_findings import TrialSink

if TYPE_CHECKING:
    from torch.amp import GradScaler

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
    used_by: UsedBy | None = None,
    example: Example | None = None,
    training: bool | None = None,
    backward: bool | Score = True,
) -> Plan:
    """Match the hooks against the model, then check them with the example, if there is one.

    backward: run a backward pass after the forward; with a score, from that score and without an optimizer step

    Raises CompileError that lists the problems of both steps: hooks that do not match do not prevent checks of others.
    """
    used_by = used_by or UsedBy()
    plan, problems = resolve(spec, model, used_by)
    if example is not None:
        try:
            plan = prove(plan, model, example, training=training, backward=backward)
        except CompileError as error:
            problems += error.errors
    if problems:
        raise CompileError(with_origins(problems, spec, used_by.runs))
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
