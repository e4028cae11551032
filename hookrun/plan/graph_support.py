"""Which hooks torch.compile and torch.export can take into a graph, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator

from hookrun.actions.base import ON_PARAMETERS
from hookrun.errors import Problem
from hookrun.plan.plan import Plan
from hookrun.spec.hook import HookSpec

OUTSIDE_A_GRAPH = ON_PARAMETERS | {"apply"}
"""Hook types that run before a compiled graph or after it, whatever their action."""


def uncompilable(plan: Plan) -> list[Problem]:
    """Every hook that cannot be part of a compiled graph, with the reason."""
    specs = [hook.spec for hook in plan.hooks]
    return [
        Problem(where, f"{spec.action.action_name} on {spec.hook_type!r} {why}", hint)
        for spec in specs
        for where, why, hint in _reasons(spec)
    ]


def unexportable(plan: Plan) -> list[Problem]:
    """Every hook that an exported program, which only computes outputs, cannot hold."""
    problems = uncompilable(plan)
    for hook in plan.hooks:
        spec = hook.spec
        if spec.hook_type in ON_PARAMETERS or spec.hook_type == "output_grad":
            why = (
                f"hook type {spec.hook_type!r} belongs to training: an exported program computes outputs only"
            )
            problems.append(Problem(spec.where, why, f"leave it out: ~{spec.where}"))
        when = spec.keys.when
        for key in ("step", "epoch"):
            if getattr(when, key) is not None and spec.hook_type not in ON_PARAMETERS:
                why = f"an exported program knows no {key}"
                problems.append(Problem(f"{spec.where}.when.{key}", why, f"leave `{key}` out"))
    return problems


def _reasons(spec: HookSpec) -> Iterator[tuple[str, str, str]]:
    """Key path, reason and next step."""
    if spec.hook_type in OUTSIDE_A_GRAPH:
        return
    plainly = f"run it without compiling, or leave it out: ~{spec.where}"
    if spec.hook_type in ("backward", "backward_pre"):
        hint = "use output_grad, which a graph can hold, or run without compiling"
        yield spec.where, "puts autograd nodes of its own around the module, at which a graph breaks", hint
    elif spec.hook_type == "saved_tensors":
        yield spec.where, "sees nothing: the compiler itself decides what a graph saves", plainly
    elif spec.action.observes:
        yield spec.where, "hands values to Python at each firing, at which a graph breaks", plainly
    elif spec.action.draws:
        yield spec.where, "draws from a generator of its own, which a graph cannot hold", plainly
    for field, value in spec.action.outside_values().items():
        if value.per_sample:
            yield (
                f"{spec.where}.{field}",
                "takes rows of another run at each call, which a graph cannot",
                plainly,
            )
    when = spec.keys.when
    for key, given in (("call", when.call is not None), ("probability", when.probability < 1)):
        if given:
            yield f"{spec.where}.when.{key}", "decides anew at each call, and a graph decides once", plainly
