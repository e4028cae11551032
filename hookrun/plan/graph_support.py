"""Which hooks can be part of a graph of torch.compile or torch.export, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator

from hookrun.actions.given import GivenFunction
from hookrun.errors import Problem
from hookrun.plan.plan import ResolvedPlan
from hookrun.spec.hook import HookSpec


def uncompilable(plan: ResolvedPlan) -> list[Problem]:
    """Every hook that cannot be part of a compiled graph, with the reason."""
    specs = [hook.spec for hook in plan.hooks]
    return [
        Problem(where, f"{spec.action.action_name} on {spec.hook_type.name!r} {why}", hint)
        for spec in specs
        for where, why, hint in _reasons(spec)
    ]


def unexportable(plan: ResolvedPlan) -> list[Problem]:
    """Every hook that an exported program, which only computes outputs, cannot contain."""
    problems = uncompilable(plan)
    for hook in plan.hooks:
        spec, kind, when = hook.spec, hook.spec.hook_type, hook.spec.keys.when
        if kind.phase in ("backward", "step") and kind.graph.refused is None:
            why = f"hook type {kind.name!r} belongs to training: an exported program computes outputs only"
            problems.append(Problem(spec.where, why, f"leave it out: ~{spec.where}"))
        for key in ("step", "epoch"):
            if getattr(when, key) is not None and not kind.on_parameters:
                why = f"an exported program has no {key}"
                problems.append(Problem(f"{spec.where}.when.{key}", why, f"leave `{key}` out"))
    return problems


def _reasons(spec: HookSpec) -> Iterator[tuple[str, str, str]]:
    """(key path, reason, next step) for each part of the hook that a graph cannot contain."""
    graph = spec.hook_type.graph
    plainly = f"run it without compiling, or leave it out: ~{spec.where}"
    if graph.refused is not None:
        why, hint = graph.refused
        yield spec.where, why, hint
    elif not graph.inside:
        return
    elif spec.action.own_functions():
        yield (
            spec.where,
            "runs your own Python, which may not work inside a graph",
            plainly,
        )
    elif spec.action.observes:
        yield spec.where, "passes values to Python at each firing, which breaks the graph", plainly
    elif spec.action.draws:
        yield spec.where, "draws from a generator of its own, which a graph cannot contain", plainly
    for field, value in spec.action.outside_values().items():
        if value.per_sample:
            why = "takes rows of another run at each call, which a graph cannot do"
            yield f"{spec.where}.{field}", why, plainly
        elif isinstance(value, GivenFunction):
            yield (
                f"{spec.where}.{field}",
                "calls a function of yours at each call, which a graph cannot do",
                plainly,
            )
    if spec.keys.tokens is not None:
        yield f"{spec.where}.tokens", "are determined for each call, which a graph cannot do", plainly
    when = spec.keys.when
    if when.rank is not None:
        yield f"{spec.where}.when.rank", "is not read inside a graph", plainly
    for key, given in (("call", when.call is not None), ("probability", when.probability < 1)):
        if given:
            yield f"{spec.where}.when.{key}", "is evaluated at each call, but in a graph only once", plainly
