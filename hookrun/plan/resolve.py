"""Spec x model -> Plan: every selector against the model's names, every action against the modules it meets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath
from types import MappingProxyType

from torch import Tensor, nn

from hookrun.actions.base import NEEDS_GRADIENT, ON_PARAMETERS
from hookrun.actions.values import FileValue, RunValue
from hookrun.errors import CompileError, HookrunError, Problem, nearest
from hookrun.plan.model_tree import Deaf, ModelNames, deaf
from hookrun.plan.plan import Match, Plan, PlannedHook
from hookrun.plan.rows import Source
from hookrun.spec.hook import HookSpec, Spec
from hookrun.spec.selector import Unmatched

ReadRun = Callable[[RunValue], Source]
"""Reads what another run captured; raises HookrunError."""

_MOST_MEMBERS = 20
"""Of the members of a list that match nothing, so many are reported."""


def resolve(spec: Spec, model: nn.Module, read_run: ReadRun) -> Plan:
    """Match every enabled hook against `model`, which is not changed.

    Raises CompileError with every misfit of every hook.
    """
    plan, problems = resolved(spec, model, read_run)
    if problems:
        raise CompileError(problems)
    return plan


def resolved(spec: Spec, model: nn.Module, read_run: ReadRun) -> tuple[Plan, list[Problem]]:
    """The plan of the hooks that match, and every misfit of the others."""
    if (reason := deaf(model)) is not None:
        raise CompileError([Problem("model", reason.what, reason.hint)])
    names = ModelNames(model)
    # stable: ties stay in declaration order
    hooks = sorted((hook for hook in spec.hooks if hook.keys.enabled), key=lambda hook: hook.keys.priority)
    planned, problems = dict[str, PlannedHook](), dict[str, list[Problem]]()
    for hook in sorted(hooks, key=_settles):
        planned[hook.name], problems[hook.name] = _resolve_hook(hook, names, read_run)
    fitting = tuple(planned[hook.name] for hook in hooks if not problems[hook.name])
    plan = Plan(type(model).__name__, fitting, spec.seed)
    return plan, [problem for hook in hooks for problem in problems[hook.name]]


def _settles(hook: HookSpec) -> int:
    """Installation runs `apply` hooks first and adds parameters next: the other hooks meet the model after that."""
    return 0 if hook.hook_type == "apply" else 1 if hook.action.adds(hook.name) else 2


def _resolve_hook(spec: HookSpec, names: ModelNames, read_run: ReadRun) -> tuple[PlannedHook, list[Problem]]:
    problems = [*_carrying(spec)]
    paths = names.select(spec)
    unmatched = [] if 0 in spec.keys.expect else names.unmatched(spec)
    problems += [_unmatched_problem(spec, each, names) for each in unmatched[:_MOST_MEMBERS]]
    if len(paths) not in spec.keys.expect and (paths or not unmatched):
        problems.append(_count_problem(spec, paths, names))
    matches = tuple(names.match(path, spec.on_parameters) for path in paths)
    problems += _fitting(spec, matches, names)
    values = dict[str, Source]()
    for field, value in spec.action.outside_values().items():
        try:
            values[field] = _read_file(value) if isinstance(value, FileValue) else read_run(value)
        except HookrunError as error:
            problems.append(Problem(f"{spec.where}.{field}", str(error)))
    if not problems:
        names.plan_effects(spec, matches)
    return PlannedHook(spec, matches, MappingProxyType(values)), problems


def _carrying(spec: HookSpec) -> Iterable[Problem]:
    action, hook = spec.action, spec.hook_type
    if hook not in action.hooks:
        text = f"action {action.action_name!r} does not go with hook type {hook!r}"
        yield Problem(f"{spec.where}.action", text, "it goes with " + ", ".join(sorted(action.hooks)))
    elif (reason := action.carried_by(hook)) is not None:
        yield Problem(f"{spec.where}.action", reason)
    keys = spec.keys
    senseless = dict[str, str]()
    if hook == "apply":
        why = "sees the module once, at installation"
        senseless = {key: why for key in ("target", "index") if getattr(keys, key) is not None}
        senseless |= {} if keys.when.always else {"when": why}
    if (hook in ON_PARAMETERS or hook == "saved_tensors") and keys.target is not None:
        senseless["target"] = "sees one tensor"
    if hook in ON_PARAMETERS and keys.when.call is not None:
        senseless["when.call"] = "belongs to no call of a module"
    for field, value in action.outside_values().items():
        if value.per_sample and (
            hook in ON_PARAMETERS or hook in ("apply", "saved_tensors") or action.adds(spec.name)
        ):
            text = f"{value}: a value for each sample goes with hooks that see a batch of samples"
            yield Problem(f"{spec.where}.{field}", text, "take one for all: sample: mean")
    for key, why in senseless.items():
        text = f"has no meaning on hook type {hook!r}, which {why}"
        yield Problem(f"{spec.where}.{key}", text, f"leave `{key}` out")


def _count_problem(spec: HookSpec, paths: list[str], names: ModelNames) -> Problem:
    kind = "parameter" if spec.on_parameters else "module"
    if not paths:
        where = f"{spec.where}.select"
        text = f"{str(spec.keys.select)!r} matches no {kind} of {type(names.model).__name__}"
        return Problem(
            where,
            text,
            names.nearest(spec.keys.select, spec.on_parameters) + "; `task=modules` lists every path",
        )
    shown = ", ".join(path or "(root)" for path in paths[:8]) + (", ..." if len(paths) > 8 else "")
    text = f"expected {spec.keys.expect} {kind}s, {str(spec.keys.select)!r} matches {len(paths)}: {shown}"
    return Problem(f"{spec.where}.expect", text, "narrow `select`, or change `expect`")


def _unmatched_problem(spec: HookSpec, member: Unmatched, names: ModelNames) -> Problem:
    kind = "parameter" if spec.on_parameters else "module"
    text = f"{str(member.selector)!r} ({member.place}) matches no {kind}"
    hint = names.nearest(member.selector, spec.on_parameters)
    return Problem(f"{spec.where}.select", text, f'{hint}; `expect: ">=0"` lets members match nothing')


def _fitting(spec: HookSpec, matches: Iterable[Match], names: ModelNames) -> Iterable[Problem]:
    reasons = defaultdict[str, list[str]](list)
    unheard = defaultdict[Deaf, list[str]](list)
    for match in matches:
        if spec.on_parameters:
            if spec.hook_type in NEEDS_GRADIENT and not names.trains(match.path):
                reasons["carries no gradient: it does not require one"].append(match.path)
            continue
        module = names.modules[match.path]
        if id(module) in names.deaf and spec.hook_type != "apply":
            unheard[names.deaf[id(module)]].append(match.path)
        if (
            reason := spec.action.unfit(spec.hook_type, module, names.parameter_names(match.path))
        ) is not None:
            reasons[reason].append(match.path or "(root)")
    for reason, paths in reasons.items():
        yield Problem(spec.where, f"{spec.action.action_name} on {_some(paths)}: {reason}")
    for unhearing, paths in unheard.items():
        yield Problem(f"{spec.where}.select", f"matches {_some(paths)}; {unhearing.what}", unhearing.hint)


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def _read_file(value: FileValue) -> Tensor:
    from safetensors import SafetensorError, safe_open

    path = FilePath(value.file).expanduser().absolute()
    if not path.is_file():
        raise HookrunError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            key = value.key if value.key is not None else keys[0] if len(keys) == 1 else None
            if key is None:
                raise HookrunError(
                    f"{path} holds {len(keys)} tensors: name one with `key`; {nearest('', keys)}"
                )
            if key not in keys:
                raise HookrunError(f"{path} has no tensor {key!r}: {nearest(key, keys)}")
            tensor: Tensor = file.get_tensor(key)
            return tensor
    except (SafetensorError, OSError) as error:
        raise HookrunError(f"{path} is no readable safetensors file: {error}") from error
