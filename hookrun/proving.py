"""Proves that a plan fits: one run of a fake deep copy of the model with the hooks in place, without real compute."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from hookrun.actions.base import NEEDS_GRADIENT, ON_PARAMETERS
from hookrun.containers import describe, rebuild, tensors
from hookrun.errors import CompileError, Problem
from hookrun.plan.plan import Match, Plan
from hookrun.plan.resolve import ReadRun, resolved
from hookrun.spec import Spec


@dataclass
class Findings:
    """What a hooked fake run showed.

    problems: (hook, path, what) of every hook that failed
    captured: (hook, path) -> the fake tensors of its first capture
    """

    problems: list[tuple[str, str, str]] = field(default_factory=list)
    captured: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)


Example = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of one call of the model."""

Install = Callable[[Plan, nn.Module], AbstractContextManager[Findings]]
"""Installs a plan on the fake copy; the stage that runs hooks gives it, since the compiler knows nothing of it."""


def compile_plan(
    spec: Spec,
    model: nn.Module,
    read_run: ReadRun,
    install: Install,
    *,
    example: Example | None = None,
    training: bool | None = None,
) -> Plan:
    """Resolve, then check with the example, if there is one.

    Raises CompileError with what both found wrong: hooks that do not resolve keep none of the others from being
    checked.
    """
    plan, problems = resolved(spec, model, read_run)
    if example is not None:
        try:
            plan = check(plan, model, example, install, training=training)
        except CompileError as error:
            problems += error.errors
    if problems:
        raise CompileError(problems)
    return plan


def check(
    plan: Plan,
    model: nn.Module,
    example: Example,
    install: Install,
    *,
    training: bool | None = None,
) -> Plan:
    """The plan with shapes, or with the reason why they could not be checked. `model` is not changed.

    example:  positional and keyword arguments of one call; tensors in them are read for shape, dtype and device only
    training: check in this mode; None: in the model's own

    Raises CompileError with the failure of every hook that does not fit.
    """
    args, kwargs = example
    with _quiet(), _no_global_effect():
        try:
            fakes = FakeTensorMode(allow_non_fake_inputs=True)
            with FakeCopyMode(fakes):
                fake = copy.deepcopy(model)
            fake.train(model.training if training is None else training)
            with fakes:
                args, kwargs = rebuild((tuple(args), dict(kwargs)), _faked_by(fakes))
                fake(*args, **kwargs)
        except Exception as error:  # any failure of the bare model says only that it can't be checked
            return replace(plan, unchecked=_reason(error))
        with fakes:
            return _hooked(plan, fake, (args, kwargs), install)


def _hooked(
    plan: Plan,
    fake: nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    install: Install,
) -> Plan:
    shapes = dict[str, str]()
    args, kwargs = example
    unchecked = None
    with install(plan, fake) as findings:
        modules = dict(fake.named_modules(remove_duplicate=False))
        for path in {
            match.path for hook in plan.hooks if not hook.spec.on_parameters for match in hook.matches
        }:
            modules[path].register_forward_hook(
                lambda module, args, output, path=path: shapes.setdefault(path, describe(output)) and None
            )
        try:
            output = fake(*args, **kwargs)
            types = {hook.spec.hook_type for hook in plan.hooks}
            if types & (NEEDS_GRADIENT | ON_PARAMETERS | {"saved_tensors"}):
                _backward(output)
            if types & {"optimizer_step_pre", "optimizer_step_post"}:
                torch.optim.SGD(fake.parameters(), lr=0.0).step()
        except Exception as error:
            unchecked = _reason(error)
    if findings.problems:
        raise CompileError(_problems(findings))
    if unchecked is not None:
        return replace(plan, unchecked=unchecked)
    batch = next((tensor.shape[0] for tensor in tensors((args, kwargs)) if tensor.dim()), 0)
    hooks = tuple(
        replace(
            hook,
            matches=tuple(
                match
                if hook.spec.on_parameters
                else _with_shape(match, shapes, findings.captured.get((hook.spec.name, match.path)), batch)
                for match in hook.matches
            ),
        )
        for hook in plan.hooks
    )
    return replace(plan, hooks=hooks, unchecked=unchecked)


def _backward(output: Any) -> None:
    carrying = [tensor for tensor in tensors(output) if tensor.requires_grad]
    if carrying:
        torch.stack([tensor.abs().sum().float() for tensor in carrying]).sum().backward()


def _with_shape(match: Match, shapes: Mapping[str, str], captured: list[Tensor] | None, batch: int) -> Match:
    match = replace(match, shape=shapes.get(match.path), called=match.path in shapes)
    if captured is None:
        return match
    per_sample = batch > 0 and all(tensor.dim() > 0 and tensor.shape[0] == batch for tensor in captured)
    total = sum(tensor.numel() * tensor.element_size() for tensor in captured)
    return replace(match, bytes=total / batch if per_sample else total, per_sample=per_sample)


def _problems(findings: Findings) -> list[Problem]:
    problems = dict[tuple[str, str], list[str]]()
    for hook, path, what in findings.problems:
        problems.setdefault((hook, what), []).append(path or "(root)")
    return [
        Problem(
            f"hooks.{hook}",
            f"on {', '.join(paths[:4])}{f' and {len(paths) - 4} more' if len(paths) > 4 else ''}: {what}",
        )
        for (hook, what), paths in problems.items()
    ]


def _faked_by(mode: FakeTensorMode) -> Callable[[Any], Any]:
    return lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a long traceback of its own for each shape error under fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _no_global_effect() -> Iterator[None]:
    """Gradients on, whatever the caller has set, and the global generator as it was."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield
