"""Which hooks can be part of a graph of torch.compile or torch.export, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator

from hookrun.actions.values import InlineFunction
from hookrun.errors import Problem
from hookrun.plan.plan import ResolvedPlan
from hookrun.spec.hook import HookSpec


def uncompilable(plan: ResolvedPlan) -> list[Problem]:
    """Every hook that cannot be part of a compiled graph, with the reason."""
    return [problem for hook in plan.hooks for problem in _problems(hook.spec)]


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


def _problems(spec: HookSpec) -> Iterator[Problem]:
    """A problem for each part of the hook that a graph cannot contain."""
    action, graph, when = spec.action, spec.hook_type.graph, spec.keys.when
    plainly = f"run it without compiling, or leave it out: ~{spec.where}"

    def problem(key: str, why: str, hint: str = plainly) -> Problem:
        return Problem(spec.where + key, f"{action.action_name} on {spec.hook_type.name!r} {why}", hint)

    if graph.refused is not None:
        yield problem("", *graph.refused)
    elif not graph.inside:
        return
    elif action.own_functions():
        yield problem("", "runs your own Python, which may not work inside a graph")
    elif action.observes:
        yield problem("", "passes values to Python at each firing, which breaks the graph")
    elif action.draws:
        yield problem("", "draws from a generator of its own, which a graph cannot contain")
    for field, value in action.outside_values().items():
        if value.per_sample:
            yield problem(f".{field}", "takes rows of another run at each call, which a graph cannot do")
        elif isinstance(value, InlineFunction):
            yield problem(f".{field}", "calls a function of yours at each call, which a graph cannot do")
    if spec.keys.tokens is not None:
        yield problem(".tokens", "are determined for each call, which a graph cannot do")
    if when.rank is not None:
        yield problem(".when.rank", "is not read inside a graph")
    for key, is_set in (("call", when.call is not None), ("probability", when.probability < 1)):
        if is_set:
            yield problem(f".when.{key}", "is evaluated at each call, but in a graph only once")
