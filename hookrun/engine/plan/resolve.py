"""Spec x model -> plan: matches every selector against the model's names and checks actions against the modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from hookrun.engine.actions.base import name_taken
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.own_parameters import OnOwnParameters
from hookrun.engine.actions.user_code import added_names, checked, untrainable
from hookrun.engine.actions.values import InlineFunction, OutsideValue, PassValue, RunFaults, is_by_sample
from hookrun.engine.hook_types import BACKWARD, FORWARD, FORWARD_PRE
from hookrun.engine.plan.heads import head_count, last_dimension_holds_heads
from hookrun.engine.plan.model_tree import (
    ModelNames,
    Unhookable,
    class_name,
    computed_before,
    is_scripted,
    unhookable_model,
)
from hookrun.engine.plan.plan import SHOWN, HeadCount, Match, PlannedHook, ResolvedPlan
from hookrun.engine.plan.texts import texts_of, tokenizer_of, unknown_fields, unknown_spans
from hookrun.engine.spec.heads import Heads
from hookrun.engine.spec.hook import HookSpec, Spec
from hookrun.engine.spec.selector import Selector
from hookrun.engine.trust.load import ACTIONS, Trusted, load
from hookrun.errors import CompileError, HookrunError, Mistakes, Problem, listed, nearest, problems_where
from hookrun.run.experiment.run_values import Source, read_faults, read_value
from hookrun.run.experiment.run_values.runs import RunReferences, padded_otherwise, used_runs

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
    if (reason := unhookable_model(model)) is not None:
        raise CompileError([Problem("model", reason.what, reason.hint)])
    names, runs = ModelNames(model), runs or RunReferences()
    # the sort is stable: equal priorities keep declaration order
    hooks = sorted((hook for hook in spec.hooks if hook.keys.enabled), key=lambda hook: hook.keys.priority)
    planned, mistakes = dict[str, PlannedHook](), {hook.name: Mistakes() for hook in hooks}
    for hook in sorted(hooks, key=_resolved_first):
        planned[hook.name] = _resolve_hook(hook, names, runs, planned, mistakes[hook.name])
    fitting = tuple(planned[hook.name] for hook in hooks if not mistakes[hook.name].problems)
    plan = ResolvedPlan(class_name(model), fitting, spec.seed, runs=used_runs(spec, runs))
    return plan, [problem for hook in hooks for problem in mistakes[hook.name].problems]


def names_under(spec: Spec, model: nn.Module) -> ModelNames:
    """The names in `model`, with what the enabled hooks that match would add and freeze."""
    names = ModelNames(model)
    enabled = [hook for hook in spec.hooks if hook.keys.enabled and not hook.hook_type.on_parameters]
    for hook in sorted(enabled, key=_resolved_first):
        _, own, _ = _own_code(hook, names, Mistakes())
        if own or hook.action.does == "freeze" or hook.action.adds(hook.name) is not None:
            names.plan_effects(hook, names.matches(hook), own)
    return names


def _resolved_first(hook: HookSpec) -> tuple[bool, ...]:
    """A sort key: first hooks that run at installation, then those on modules: adding parameters, captures, others."""
    kind, adds = hook.hook_type, hook.action.adds(hook.name) is not None
    return kind.phase != "installation", kind.on_parameters, not adds, not hook.action.captures


def _own_code(
    spec: HookSpec, names: ModelNames, mistakes: Mistakes
) -> tuple[dict[str, Trusted | InlineFunction], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The user's own functions that the action names, by field; the parameters, and the buffers, of own modules.

    Of a tensor that the model does not have yet: the name under which a hooked module will have it -> shape.
    """
    functions = dict[str, Trusted | InlineFunction]()
    parameters, buffers = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    reached = spec.hook_type in {FORWARD, FORWARD_PRE}
    arguments = spec.action.value_of(Meaning.ARGUMENTS) or {}
    for field, named in spec.action.own_functions().items():
        where = f"{spec.where}.{field}"
        function = mistakes.tried(load, named, ACTIONS, where) if isinstance(named, str) else named
        if function is None:
            continue
        functions[field] = function
        own, wrong = checked(function, arguments, spec.where)
        mistakes.add(wrong)
        added = {} if wrong else added_names(own, spec.name)
        new = {name: tensor for tensor, name in added.items() if id(tensor) not in names.own}
        if new and (why := untrainable(own, reached=reached)) is not None:
            mistakes.note(where, f"'{function.code.name}' {why[0]}", why[1])
            continue
        for name, tensor in new.items() if reached else ():
            of_kind = parameters if isinstance(tensor, nn.Parameter) else buffers
            of_kind[name] = tuple(tensor.shape)
    return functions, parameters, buffers


def _resolve_hook(
    spec: HookSpec,
    names: ModelNames,
    runs: RunReferences,
    planned: Mapping[str, PlannedHook],
    mistakes: Mistakes,
) -> PlannedHook:
    matches = names.matches(spec)
    mistakes.add([*_carrying(spec), *_meaningless(spec), *_unexpected(spec, matches, names)])
    functions, own, buffers = _own_code(spec, names, mistakes)
    mistakes.add(_fitting(spec, matches, names, [*own, *buffers]))
    values = dict[str, Mapping[str, Source]]()
    outside = spec.action.outside_values()
    places = {match.path: _captured_as(spec, match) for match in matches if outside}
    for field, value in outside.items():
        try:
            match value:
                case RunFaults():
                    values[field] = read_faults(value, spec, places, runs)
                case PassValue():
                    values[field] = read_value(_passed_on(value, spec, planned), places, runs)
                case _:
                    values[field] = read_value(value, places, runs)
            at_tokens = spec.keys.tokens is not None and getattr(value, "at", None) is not None
            if at_tokens and (why := padded_otherwise(value, runs)) is not None:
                mistakes.note(
                    f"{spec.where}.{field}.at", why, "pad the samples of both runs on the same side"
                )
        except HookrunError as error:
            mistakes.note(f"{spec.where}.{field}", str(error))
    heads = dict[str, HeadCount]()
    if spec.keys.heads is not None and not spec.hook_type.on_parameters:
        heads = _heads(spec, spec.keys.heads, matches, names, mistakes)
    if (wanted := spec.keys.when.data) is not None and runs.data is not None:
        mistakes.add(unknown_fields(wanted, f"{spec.where}.when.data", runs.data))
    elif wanted is not None and runs.settings is None:
        mistakes.note(
            f"{spec.where}.when.data",
            "reads the data of a run, which a model in a loop of your own does not have",
            "leave it out, or choose the rows in the loop; `when: {value: …}` needs no data",
        )
    tokenizer, texts = None, dict[str, tuple[tuple[int, ...], ...]]()
    if spec.keys.tokens is not None:
        mistakes.add(unknown_spans(spec.keys.tokens, spec.where, runs.data))
        lookup = tokenizer_of(names.model, runs.tokenizer)
        # Data that could not be described may have a tokenizer.
        if lookup.tokenizer is not None or runs.settings is None or runs.data is not None:
            tokenizer = lookup.tokenizer
            texts, unreadable = texts_of(spec.keys.tokens, spec.where, lookup)
            mistakes.add(unreadable)
    if not mistakes.problems:
        names.plan_effects(spec, matches, own)
    return PlannedHook(spec, matches, values, functions, heads, texts, tokenizer, own, buffers)


def _captured_as(spec: HookSpec, match: Match) -> tuple[str, ...]:
    """The names under which a run may have captured the match: for an action on own parameters theirs, too."""
    action = spec.action_on(match.own)
    own = action.parameters if isinstance(action, OnOwnParameters) else None
    return (*match.names, *(f"{name}.{each}".lstrip(".") for name in match.names for each in own or ()))


def _passed_on(value: PassValue, spec: HookSpec, planned: Mapping[str, PlannedHook]) -> PassValue:
    """The value with the path of its module. Raises HookrunError, which says why the hook cannot have it."""
    carriers = (FORWARD, FORWARD_PRE)
    if spec.hook_type not in carriers or spec.action.adds(spec.name):
        raise HookrunError(
            "a value of this forward is for edits on forward or forward_pre, not for parameters"
        )
    captures = {
        name: hook
        for name, hook in planned.items()
        if hook.spec.action.captures and hook.spec.hook_type in carriers
    }
    if (source := captures.get(value.hook)) is None:
        raise HookrunError(
            f"there is no capture {value.hook!r} on forward or forward_pre: {nearest(value.hook, captures)}"
        )
    paths = [match.path for match in source.matches]
    module = paths[0] if value.module is None and len(paths) == 1 else value.module
    if module is None or (path := source.aliases.get(module)) is None:
        raise HookrunError(f"{value.hook} captures {listed(paths, SHOWN)}: name one of them with `module`")
    if not (when := source.spec.keys.when).covers(spec.keys.when):
        raise HookrunError(
            f"{value.hook} may not fire when this hook does ({when}): give both the same `when`"
        )
    return value.model_copy(update={"module": path})


def _heads(
    spec: HookSpec, heads: Heads, matches: Iterable[Match], names: ModelNames, mistakes: Mistakes
) -> dict[str, HeadCount]:
    """How many heads each match has; it is a mistake if that is unknown or a head does not exist."""
    counts, unknown = dict[str, HeadCount](), list[str]()
    for match in matches:
        counted = head_count(names.model, match.path, heads)
        if counted is None:
            unknown.append(match.path or "(root)")
            continue
        if heads.count is None:
            sides = [
                last_dimension_holds_heads(names.model, match.path, of_input=of_input)
                for of_input in _seen_sides(spec)
            ]
            counted = replace(counted, in_last=all(sides))
        counts[match.path] = counted
        wrong = [heads.misfit(count) for count in counted.counts]
        if all(reason is not None for reason in wrong):
            mistakes.note(f"{spec.where}.heads", f"on {match.path or '(root)'}: {wrong[0]}")
    if unknown:
        mistakes.note(
            f"{spec.where}.heads",
            f"the number of heads of {listed(unknown, SHOWN)} is unknown: the model's configuration has none",
            f"add the count: heads: {{count: 12, pick: {list(heads.pick)}}}",
        )
    return counts


def _seen_sides(spec: HookSpec) -> tuple[bool, ...]:
    """Whether the hook sees a module's input, or its gradient (True), or its output, or its gradient (False)."""
    if spec.hook_type is not BACKWARD:
        return (spec.hook_type is FORWARD_PRE,)
    if not spec.action.observes:
        return (True,)
    target = spec.keys.target
    return (True, False) if target is None else (target.keys[0] == "grad_input",)


def _unexpected(hook: HookSpec, matches: Sequence[Match], names: ModelNames) -> Iterator[Problem]:
    """Problems of a selector of which a member matches nothing, or which does not match the expected number."""
    selector, tree, either = hook.keys.select, names.tree_of(hook), hook.takes_parameters
    on_parameters, unmatched = hook.hook_type.on_parameters, list[tuple[Selector, str]]()
    kind = "module or parameter" if either else "parameter" if on_parameters else "module"
    names_parameters = either or on_parameters
    if 0 not in hook.keys.expect:
        readings = hook.hook_type.on == "reading"
        unmatched = list(
            selector.unmatched(names.parameter_tree(readings=readings) if names_parameters else tree)
        )
        if either:  # a module without parameters is matched, too
            unmatched = [member for member in selector.unmatched(tree) if member in unmatched]
        for member, place in unmatched[:_MOST_MEMBERS]:
            yield Problem(
                f"{hook.where}.select",
                f"{str(member)!r} ({place}) matches no {kind}",
                f'{names.nearest(member, names_parameters)}; `expect: ">=0"` lets members match nothing',
            )
    if len(matches) in hook.keys.expect:
        return
    if matches:
        shown = listed([match.path or "(root)" for match in matches], 8)
        kinds = "parameters" if on_parameters else "modules"
        yield Problem(
            f"{hook.where}.expect",
            f"expected {hook.keys.expect} {kinds}, {str(selector)!r} matches {len(matches)}: {shown}",
            "narrow `select`, or change `expect`",
        )
    elif not unmatched:
        yield Problem(
            f"{hook.where}.select",
            f"{str(selector)!r} matches no {kind} of {type(names.model).__name__}",
            f"{names.nearest(selector, names_parameters)}; `task=modules` lists every path",
        )


def _carrying(spec: HookSpec) -> Iterator[Problem]:
    """Problems of actions and values that cannot be used with the hook type."""
    action, kind = spec.action, spec.hook_type
    if kind.shipped not in action.hook_types:
        text = f"action {action.action_name!r} does not go with hook type {kind.name!r}"
        carriers = ", ".join(sorted(carrier.name for carrier in action.hook_types))
        yield Problem(f"{spec.where}.action", text, f"it goes with {carriers}")
    elif (reason := action.carried_by(kind)) is not None:
        yield Problem(f"{spec.where}.action", reason)
    adds = action.adds(spec.name) is not None
    if adds or kind.phase == "installation":
        for key, ramp in action.ramps().items():
            yield Problem(
                f"{spec.where}.{key}",
                f"{ramp}: {action.action_name} reads its values once, at installation",
                "give a number",
            )
    for field, value in action.outside_values().items():
        where, in_place = f"{spec.where}.{field}", isinstance(value, OutsideValue) and value.at is not None
        yield from problems_where(
            (
                is_by_sample(value) and (adds or not kind.batch),
                where,
                f"{value}: a value for each sample goes with hooks that see a batch of samples",
                "take one for all: sample: mean",
            ),
            (
                in_place and spec.takes_part and adds,
                f"{where}.at",
                "`at: same` does not go with a parameter that is added: it is of the part's shape itself",
                "use the value's own `index`, or leave `at` out",
            ),
            (
                in_place and not spec.takes_part,
                f"{where}.at",
                "`at: same` takes the part of the value that `index`, `tokens` and `heads` name, and the hook has "
                "no `index`, `tokens` or `heads`",
                "use the value's own `index`, or leave `at` out",
            ),
            (
                adds and isinstance(value, InlineFunction),
                where,
                f"{value}: a parameter starts from numbers, not from a function of another tensor",
                "give a number, a list or a tensor",
            ),
        )


def _meaningless(spec: HookSpec) -> Iterator[Problem]:
    """Problems of keys that have no meaning for the hook type."""
    keys, kind = spec.keys, spec.hook_type
    given = {
        "target": keys.target is not None,
        "index": keys.index is not None,
        "tokens": keys.tokens is not None,
        "heads": keys.heads is not None,
        "batch_dim": keys.batch_dim is not None,
        "when": not keys.when.always,
        "when.call": keys.when.call is not None and "when" in kind.takes,
    }
    for key, was_given in given.items():
        if was_given and key not in kind.takes:
            yield Problem(
                f"{spec.where}.{key}",
                f"has no meaning on hook type {kind.name!r}, which fires {kind.fires} and sees {kind.sees}",
                f"leave `{key}` out",
            )
        elif was_given and spec.action.of_call and not key.startswith("when"):
            yield Problem(
                f"{spec.where}.{key}",
                f"has no meaning for {spec.action.action_name}, which acts on the whole call of the module",
                f"leave `{key}` out",
            )
    if keys.index is not None and spec.action.does == "pack":
        yield Problem(
            f"{spec.where}.index",
            f"cannot be used with {spec.action.action_name}, which packs the whole tensor",
            "leave it out",
        )
    if keys.when.of_samples and (why := _no_choice(spec)) is not None:
        yield Problem(
            f"{spec.where}.when.{'data' if keys.when.value is None else 'value'}",
            f"chooses among the rows of a batch, and {why}",
            "leave it out, or use another action on forward, forward_pre or output_grad",
        )
    if keys.when.rank is not None and not spec.action.observes:
        yield Problem(
            f"{spec.where}.when.rank",
            f"{spec.action.action_name} changes values, and on some ranks alone their models would become different",
            "leave it out; it is for hooks that only look: capture, print, stats, check",
        )


def _no_choice(spec: HookSpec) -> str | None:
    """Why the hook cannot act on some rows of a batch only, or None."""
    action, kind = spec.action, spec.hook_type
    if not kind.batch:
        return f"{kind.name!r} sees {kind.sees}"
    if action.of_call:
        return f"{action.action_name} acts on the whole call"
    if "flipped" in action.uses:
        return f"{action.action_name} lists what it does to all of them"
    return f"{action.action_name} computes a row from the other rows too" if action.mixes_rows else None


def _fitting(
    spec: HookSpec, matches: Iterable[Match], names: ModelNames, own: Collection[str]
) -> Iterator[Problem]:
    """Problems of matches that the hook does not fit.

    own: the names of the parameters and buffers of the user's own module
    """
    reasons, kind = defaultdict[str, list[str]](list), spec.hook_type
    never_fired = defaultdict[Unhookable, list[str]](list)
    for match in matches:
        owner, _, parameter = match.path.rpartition(".") if kind.on_parameters else (match.path, "", "")
        module = names.modules[owner]
        of_calls = not kind.on_parameters or kind.on == "reading"
        if of_calls and id(module) in names.unhookable and kind.phase != "installation":
            never_fired[names.unhookable[id(module)]].append(match.path)
        of_values = kind.of_rows and not (spec.action.of_call or own or spec.action.adds(spec.name))
        if is_scripted(module) and not of_values:
            reason: str | None = "a TorchScript module takes hooks on the values of its calls only"
        elif not kind.on_parameters:
            reason = _incompatibility(spec, match, names, own)
        elif of_calls:
            reason = computed_before(module, parameter)
        else:
            reason = names.without_gradient(match.path) if kind.phase == "backward" else None
        if reason is not None:
            reasons[reason].append(match.path or "(root)")
    for reason, paths in reasons.items():
        yield Problem(spec.where, f"{spec.action.action_name} on {listed(paths, SHOWN)}: {reason}")
    for why, paths in never_fired.items():
        yield Problem(f"{spec.where}.select", f"matches {listed(paths, SHOWN)}; {why.what}", why.hint)


def _incompatibility(spec: HookSpec, match: Match, names: ModelNames, own: Collection[str]) -> str | None:
    """Why the action, or a parameter that it adds, does not fit the module, or None."""
    module, action = names.modules[match.path], spec.action_on(match.own)
    planned, name = names.added.get(match.path, []), action.adds(spec.name)
    for new in own if name is None else [name]:
        if (taken := name_taken(module, new, planned)) is not None:
            return f"{taken}: choose another name" + (" for the hook" if action.trains or own else "")
    if match.own and "parameters" in spec.action.model_fields_set:
        return "`select` names parameters, and so does `parameters`: leave one of them out"
    present = [name for name, parameter in module._parameters.items() if parameter is not None]
    return action.incompatibility(spec.hook_type, module, present + planned)
