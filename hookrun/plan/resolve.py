"""Spec x model -> plan: matches every selector against the model's names and checks actions against the modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import nn

from hookrun.actions.fields import Meaning
from hookrun.actions.given import GivenFunction, GivenTensor
from hookrun.actions.own_code import wrong_function
from hookrun.actions.values import OutsideValue
from hookrun.errors import CompileError, HookrunError, Problem, SpecError, listed
from hookrun.plan.heads import HeadCount, head_count
from hookrun.plan.model_tree import ModelNames, Unhookable, unhookable
from hookrun.plan.plan import Match, PlannedHook, ResolvedPlan
from hookrun.plan.texts import Tokenizer, texts_of, tokenizer_of, unknown_spans
from hookrun.run_values import RunReferences, Source, padded_otherwise, read_value, used_runs
from hookrun.spec.hook import HookSpec, Spec
from hookrun.spec.selector import Unmatched
from hookrun.trust.load import ACTIONS, Trusted, load

_SHOWN = 4
_LAZY = "it has no shape yet: a lazy module gets it at its first call; run one batch through the model first"

_MOST_MEMBERS = 20
"""How many members of a list that match nothing are reported."""


def resolve(
    spec: Spec, model: nn.Module, runs: RunReferences | None = None
) -> tuple[ResolvedPlan, list[Problem]]:
    """Match every enabled hook against `model`, which is not changed.

    runs: the other runs that values may come from

    Returns the plan of the hooks that fit, and the problems of the others. Raises CompileError if no hook could fire on
    the model.
    """
    if (reason := unhookable(model)) is not None:
        raise CompileError([Problem("model", reason.what, reason.hint)])
    names, runs = ModelNames(model), runs or RunReferences()
    # the sort is stable: equal priorities keep declaration order
    hooks = sorted((hook for hook in spec.hooks if hook.keys.enabled), key=lambda hook: hook.keys.priority)
    planned, problems = dict[str, PlannedHook](), dict[str, list[Problem]]()
    for hook in sorted(hooks, key=_resolved_first):
        planned[hook.name], problems[hook.name] = _resolve_hook(hook, names, runs)
    fitting = tuple(planned[hook.name] for hook in hooks if not problems[hook.name])
    plan = ResolvedPlan(type(model).__name__, fitting, spec.seed, runs=used_runs(spec, runs))
    return plan, [problem for hook in hooks for problem in problems[hook.name]]


def names_under(spec: Spec, model: nn.Module) -> ModelNames:
    """The names in `model`, with what the enabled hooks that match would add and freeze."""
    names = ModelNames(model)
    enabled = [hook for hook in spec.hooks if hook.keys.enabled and not hook.on_parameters]
    for hook in sorted(enabled, key=_resolved_first):
        if hook.action.freezes or hook.action.adds(hook.name) is not None:
            names.plan_effects(hook, tuple(names.match(path, False) for path in names.select(hook)))
    return names


def _resolved_first(hook: HookSpec) -> int:
    """A sort key: first hooks that run at installation, then those that add parameters, then the others."""
    return 0 if hook.hook_type.phase == "installation" else 1 if hook.action.adds(hook.name) else 2


def _resolve_hook(
    spec: HookSpec, names: ModelNames, runs: RunReferences
) -> tuple[PlannedHook, list[Problem]]:
    problems = [*_carrying(spec), *_meaningless(spec)]
    paths, unselected = select(spec, names)
    problems += unselected
    matches = tuple(names.match(path, spec.on_parameters) for path in paths)
    problems += _fitting(spec, matches, names)
    values, places = dict[str, dict[str, Source]](), {match.path: match.names for match in matches}
    for field, value in spec.action.outside_values().items():
        try:
            values[field] = read_value(value, places, runs)
            problems += _padded_otherwise(spec, field, value, runs)
        except HookrunError as error:
            problems.append(Problem(f"{spec.where}.{field}", str(error)))
    functions = dict[str, Trusted | GivenFunction]()
    for field, named in spec.action.own_functions().items():
        try:
            functions[field] = (
                load(named, ACTIONS, f"{spec.where}.{field}") if isinstance(named, str) else named
            )
            problems += wrong_function(
                functions[field], spec.action.given(Meaning.ARGUMENTS) or {}, spec.where
            )
        except SpecError as error:
            problems += error.errors
    heads, unknown = _heads(spec, matches, names)
    tokenizer, texts, unreadable = _texts(spec, names, runs)
    problems += [*unknown, *unreadable, *unknown_spans(spec.keys.tokens, spec.where, runs.data)]
    if not problems:
        names.plan_effects(spec, matches)
    return PlannedHook(spec, matches, values, functions, heads, texts, tokenizer), problems


def _padded_otherwise(
    spec: HookSpec, field: str, value: OutsideValue | GivenTensor | GivenFunction, runs: RunReferences
) -> Iterator[Problem]:
    """Problems if the hook's tokens are at other positions in the value, because the runs pad differently."""
    if spec.keys.tokens is None or not isinstance(value, OutsideValue) or value.at is None:
        return
    if (why := padded_otherwise(value, runs)) is not None:
        yield Problem(f"{spec.where}.{field}.at", why, "pad the samples of both runs on the same side")


def _texts(
    spec: HookSpec, names: ModelNames, runs: RunReferences
) -> tuple[Tokenizer | None, dict[str, tuple[int, ...]], list[Problem]]:
    """The tokenizer of a hook with `tokens`, the token ids of its texts, and problems of texts without tokens."""
    if spec.keys.tokens is None:
        return None, {}, []
    found = tokenizer_of(names.model, runs.tokenizer)
    if found.tokenizer is None and runs.settings is not None and runs.data is None:
        return None, {}, []  # the data may have one
    return found.tokenizer, *texts_of(spec.keys.tokens, spec.where, found)


def _heads(
    spec: HookSpec, matches: Iterable[Match], names: ModelNames
) -> tuple[dict[str, HeadCount], list[Problem]]:
    """How many heads each match has, and problems of matches where that is unknown or a head does not exist."""
    heads, found, problems = spec.keys.heads, dict[str, HeadCount](), list[Problem]()
    if heads is None or spec.on_parameters:
        return found, problems
    unknown = list[str]()
    for match in matches:
        counted = head_count(names.model, match.path, heads)
        if counted is None:
            unknown.append(match.path or "(root)")
            continue
        found[match.path] = counted
        wrong = [heads.misfit(count) for count in counted.counts]
        if all(each is not None for each in wrong):
            problems.append(Problem(f"{spec.where}.heads", f"on {match.path or '(root)'}: {wrong[0]}"))
    if unknown:
        text = (
            f"the number of heads of {listed(unknown, _SHOWN)} is unknown: the model's configuration has none"
        )
        hint = f"add the count: heads: {{count: 12, pick: {list(heads.pick)}}}"
        problems.append(Problem(f"{spec.where}.heads", text, hint))
    return found, problems


def select(hook: HookSpec, names: ModelNames) -> tuple[list[str], list[Problem]]:
    """The paths that the hook's selector matches, and problems with them or their number."""
    paths = names.select(hook)
    unmatched = [] if 0 in hook.keys.expect else names.unmatched(hook)
    problems = [_unmatched_problem(hook, each, names) for each in unmatched[:_MOST_MEMBERS]]
    if len(paths) not in hook.keys.expect and (paths or not unmatched):
        problems.append(_count_problem(hook, paths, names))
    return paths, problems


def _carrying(spec: HookSpec) -> Iterator[Problem]:
    """Problems of actions and values that cannot be used with the hook type."""
    action, kind = spec.action, spec.hook_type
    if kind not in action.hook_types:
        text = f"action {action.action_name!r} does not go with hook type {kind.name!r}"
        carriers = ", ".join(sorted(each.name for each in action.hook_types))
        yield Problem(f"{spec.where}.action", text, f"it goes with {carriers}")
    elif (reason := action.carried_by(kind)) is not None:
        yield Problem(f"{spec.where}.action", reason)
    for field, value in action.outside_values().items():
        if value.per_sample and (not kind.batch or action.adds(spec.name)):
            text = f"{value}: a value for each sample goes with hooks that see a batch of samples"
            yield Problem(f"{spec.where}.{field}", text, "take one for all: sample: mean")
        in_place = isinstance(value, OutsideValue) and value.at is not None
        if in_place and (not spec.takes_part or action.adds(spec.name)):
            text = (
                "`at: same` takes the part of the value that `index`, `tokens` and `heads` name, and the hook has no "
                "`index`, `tokens` or `heads`"
            )
            if spec.takes_part:
                text = (
                    "`at: same` does not go with a parameter that is added: it is of the part's shape itself"
                )
            yield Problem(f"{spec.where}.{field}.at", text, "use the value's own `index`, or leave `at` out")
        if isinstance(value, GivenFunction) and action.adds(spec.name):
            text = f"{value}: a parameter starts from numbers, not from a function of another tensor"
            yield Problem(f"{spec.where}.{field}", text, "give a number, a list or a tensor")


def _meaningless(spec: HookSpec) -> Iterator[Problem]:
    """Problems of keys that have no meaning for the hook type."""
    keys, kind = spec.keys, spec.hook_type
    given = {
        "target": keys.target is not None,
        "index": keys.index is not None,
        "tokens": keys.tokens is not None,
        "heads": keys.heads is not None,
        "when": not keys.when.always,
        "when.call": keys.when.call is not None and "when" in kind.takes,
    }
    for key, was_given in given.items():
        if was_given and key not in kind.takes:
            text = f"has no meaning on hook type {kind.name!r}, which fires {kind.fires} and sees {kind.sees}"
            yield Problem(f"{spec.where}.{key}", text, f"leave `{key}` out")
    if keys.when.rank is not None and not spec.action.observes:
        text = f"{spec.action.action_name} changes values, and on some ranks alone their models would become different"
        hint = "leave it out; it is for hooks that only look: capture, print, stats, check"
        yield Problem(f"{spec.where}.when.rank", text, hint)


def _count_problem(spec: HookSpec, paths: list[str], names: ModelNames) -> Problem:
    kind = "parameter" if spec.on_parameters else "module"
    if not paths:
        where = f"{spec.where}.select"
        text = f"{str(spec.keys.select)!r} matches no {kind} of {type(names.model).__name__}"
        bare = spec.keys.select.select(names.tree) if spec.on_parameters else ()
        near = names.nearest(spec.keys.select, spec.on_parameters)
        hint = f"it matches modules that have none: {listed(bare, _SHOWN)}" if bare else near
        hint += "; `task=modules` lists every path"
        return Problem(where, text, hint)
    shown = listed([path or "(root)" for path in paths], 8)
    text = f"expected {spec.keys.expect} {kind}s, {str(spec.keys.select)!r} matches {len(paths)}: {shown}"
    return Problem(f"{spec.where}.expect", text, "narrow `select`, or change `expect`")


def _unmatched_problem(spec: HookSpec, member: Unmatched, names: ModelNames) -> Problem:
    kind = "parameter" if spec.on_parameters else "module"
    text = f"{str(member.selector)!r} ({member.place}) matches no {kind}"
    hint = names.nearest(member.selector, spec.on_parameters)
    return Problem(f"{spec.where}.select", text, f'{hint}; `expect: ">=0"` lets members match nothing')


def _fitting(spec: HookSpec, matches: Iterable[Match], names: ModelNames) -> Iterator[Problem]:
    """Problems of matches that the hook does not fit."""
    reasons = defaultdict[str, list[str]](list)
    never_fired = defaultdict[Unhookable, list[str]](list)
    for match in matches:
        if spec.on_parameters:
            if spec.hook_type.phase == "backward":
                if not names.trains(match.path):
                    reasons["carries no gradient: it does not require one"].append(match.path)
                elif names.lazy(match.path):
                    reasons[_LAZY].append(match.path)
            continue
        module = names.modules[match.path]
        if id(module) in names.unhookable and spec.hook_type.phase != "installation":
            never_fired[names.unhookable[id(module)]].append(match.path)
        if (
            reason := spec.action.unfit(spec.hook_type, module, names.parameter_names(match.path))
        ) is not None:
            reasons[reason].append(match.path or "(root)")
    for reason, paths in reasons.items():
        yield Problem(spec.where, f"{spec.action.action_name} on {listed(paths, _SHOWN)}: {reason}")
    for why, paths in never_fired.items():
        yield Problem(f"{spec.where}.select", f"matches {listed(paths, _SHOWN)}; {why.what}", why.hint)
