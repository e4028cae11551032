"""Spec x model -> Plan: resolve the names, prove that every hook fits. Nothing is changed."""

from __future__ import annotations

from torch import nn

from hookrun.compiler.check import Example, Findings, Install, check
from hookrun.compiler.plan import Plan, PlannedHook, Target
from hookrun.compiler.resolve import ReadRun, resolve, resolved
from hookrun.errors import CompileError
from hookrun.spec import Spec

__all__ = ["Example", "Findings", "Plan", "PlannedHook", "Target", "check", "compile_plan", "resolve"]


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
