"""Spec x model -> plan: matches every selector against the model's names and checks actions against the modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from hookrun.engine.actions.base import name_taken
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.own_parameters import OnOwnParameters
from hookrun.engine.actions.user_code import added_names, checked, untrainable
from hookrun.engine.actions.values import (
    FileValue,
    FolderValue,
    InlineFunction,
    InlineTensor,
    OutsideValue,
    PassValue,
    RunFaults,
    RunValue,
    is_by_sample,
)
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
from hookrun.engine.plan.outside import NoValues, Places, Source, Values
from hookrun.engine.plan.plan import SHOWN, HeadCount, Match, PlannedHook, ResolvedPlan
from hookrun.engine.plan.texts import Ids, Tokenizer, texts_of, tokenizer_of, unknown_fields, unknown_spans
from hookrun.engine.spec.hook import HookSpec, Spec
from hookrun.engine.spec.selector import Selector
from hookrun.engine.trust.load import ACTIONS, Trusted, load
from hookrun.errors import HookrunError, Mistakes, Problem, compile_error, listed, nearest

_MOST_MEMBERS = 20
"""How many members of a list that match nothing are reported."""

_ON_CALLS = (FORWARD, FORWARD_PRE)
"""The hook types whose edits can use what another hook captured in the same forward."""


def resolve(
    spec: Spec, model: nn.Module, values: Values | None = None, names: ModelNames | None = None
) -> tuple[ResolvedPlan, list[Problem]]:
    """Match every enabled hook against `model`, which is not changed.

    values: reads the values that come from files and other runs; None: there are none
    names:  those of the model, with what other hooks add; None: there are none of these

    Returns the plan of the hooks that fit, and the problems of the others. Raises CompileError if no hook could fire on
    the model.
    """
    reason = unhookable_model(model)
    if reason is not None:
        raise compile_error("model", reason.what, reason.hint)
    names = names or ModelNames(model)
    names.disabled_points = [
        f"hook:{hook.name}.{point}"
        for hook in spec.hooks
        if not hook.keys.enabled
        for point in hook.action.points
    ]
    values = values or NoValues()
    # the sort is stable: equal priorities keep declaration order
    hooks = sorted((hook for hook in spec.hooks if hook.keys.enabled), key=lambda hook: hook.keys.priority)
    mistakes = {hook.name: Mistakes() for hook in hooks}
    planned: dict[str, PlannedHook] = {}
    for hook in sorted(hooks, key=_resolved_first):
        planned[hook.name] = _resolve_hook(hook, names, values, planned, mistakes[hook.name])
        # of a hook with mistakes, too, so that the hooks there have none because of it
        names.add_points(planned[hook.name])
    fitting: dict[str, PlannedHook] = {}
    problems: list[Problem] = []
    later = {hook.name for hook in hooks}
    for hook in hooks:
        later.remove(hook.name)
        adding = names.hooks_adding(planned[hook.name].matches)
        for name in adding & later:
            what = f"the hook {name!r}, which adds it, fires after this one"
            hint = "declare that hook before this one, or give it a lower priority"
            mistakes[hook.name].add([Problem(f"{hook.where}.select", what, hint)])
        wrong = mistakes[hook.name].problems
        problems += wrong
        if not wrong and adding.isdisjoint(planned.keys() - fitting.keys()):
            fitting[hook.name] = planned[hook.name]
    runs = values.used_runs(spec)
    plan = ResolvedPlan(class_name(model), tuple(fitting.values()), spec.seed, runs=runs, bundle=spec.bundle)
    return plan, problems


def names_under(spec: Spec, model: nn.Module) -> ModelNames:
    """The names in `model`, with what the enabled hooks that match would add and freeze."""
    names = ModelNames(model)
    enabled = [hook for hook in spec.hooks if hook.keys.enabled and not hook.hook_type.on_parameters]
    for hook in sorted(enabled, key=_resolved_first):
        code = _own_code(hook, names, Mistakes())
        if code.parameters or hook.action.does == "freeze" or hook.action.adds(hook.name) is not None:
            names.plan_effects(hook, names.matches(hook), code.parameters)
    return names


def _resolved_first(hook: HookSpec) -> tuple[bool, ...]:
    """A sort key: first hooks that run at installation, then those on modules.

    Of these come first those that add points, then those that add parameters, captures, and others.
    """
    kind = hook.hook_type
    adds = hook.action.adds(hook.name) is not None
    return (
        kind.phase != "installation",
        kind.on_parameters,
        not hook.action.points,
        not adds,
        not hook.action.captures,
    )


def _resolve_hook(
    spec: HookSpec,
    names: ModelNames,
    values: Values,
    planned: Mapping[str, PlannedHook],
    mistakes: Mistakes,
) -> PlannedHook:
    matches = names.matches(spec)
    mistakes.add(_wrong_hook_type(spec))
    mistakes.add(_wrong_values(spec))
    mistakes.add(_meaningless_keys(spec))
    mistakes.add(_unexpected_matches(spec, matches, names))
    code = _own_code(spec, names, mistakes)
    mistakes.add(_unfit_matches(spec, matches, names, [*code.parameters, *code.buffers]))
    sources = _read_values(spec, matches, values, planned, mistakes)
    heads = _heads(spec, matches, names, mistakes)
    mistakes.add(_unknown_in_data(spec, values))
    tokenizer, texts = _tokens(spec, names.model, values, mistakes)
    if not mistakes.problems:
        names.plan_effects(spec, matches, code.parameters)
    return PlannedHook(
        spec,
        matches,
        values=sources,
        functions=code.functions,
        heads=heads,
        texts=texts,
        tokenizer=tokenizer,
        new_parameters=code.parameters,
        new_buffers=code.buffers,
    )


# ---- the user's own functions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The user's own functions that an action names, by field, and the tensors that their modules add.

    Of a tensor that the model does not have yet: the name under which a hooked module will have it -> shape.
    """

    functions: dict[str, Trusted | InlineFunction] = field(default_factory=dict)
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)


def _own_code(spec: HookSpec, names: ModelNames, mistakes: Mistakes) -> OwnCode:
    code = OwnCode()
    gets_gradients = spec.hook_type in _ON_CALLS
    arguments = spec.action.value_of(Meaning.ARGUMENTS) or {}
    for key, named in spec.action.own_functions().items():
        where = f"{spec.where}.{key}"
        function = mistakes.tried(load, named, ACTIONS, where) if isinstance(named, str) else named
        if function is None:
            continue
        code.functions[key] = function
        made, wrong = checked(function, arguments, spec.where)
        mistakes.add(wrong)
        added = {} if wrong else added_names(made, spec.name)
        new = {name: tensor for tensor, name in added.items() if id(tensor) not in names.own}
        if not new:
            continue
        why = untrainable(made, reached=gets_gradients)
        if why is not None:
            mistakes.add([Problem(where, f"'{function.code.name}' {why[0]}", why[1])])
            continue
        if not gets_gradients:
            continue
        for name, tensor in new.items():
            shapes = code.parameters if isinstance(tensor, nn.Parameter) else code.buffers
            shapes[name] = tuple(tensor.shape)
    return code


# ---- values, heads, data, tokens ---------------------------------------------------------------------------------


def _read_values(
    spec: HookSpec,
    matches: Sequence[Match],
    values: Values,
    planned: Mapping[str, PlannedHook],
    mistakes: Mistakes,
) -> dict[str, Mapping[str, Source]]:
    """Field of the action -> path of a match -> its value; a value that cannot be read is a mistake."""
    given = spec.action.outside_values()
    if not given:
        return {}
    sources: dict[str, Mapping[str, Source]] = {}
    places = {match.path: captured_as(spec, match) for match in matches}
    for key, value in given.items():
        where = f"{spec.where}.{key}"
        try:
            sources[key] = _read(value, spec, places, values, planned)
            if spec.keys.tokens is None or getattr(value, "at", None) is None:
                continue
            why = values.padded_otherwise(value)
            if why is not None:
                hint = "pad the samples of both runs on the same side"
                mistakes.add([Problem(f"{where}.at", why, hint)])
        except HookrunError as error:
            mistakes.add([Problem(where, str(error))])
    return sources


def _read(
    value: FileValue | FolderValue | RunValue | RunFaults | PassValue | InlineTensor | InlineFunction,
    spec: HookSpec,
    places: Places,
    values: Values,
    planned: Mapping[str, PlannedHook],
) -> Mapping[str, Source]:
    """Path -> the value for that module. Raises HookrunError if there is none."""
    match value:
        case InlineTensor():
            return dict.fromkeys(places, value.tensor)
        case InlineFunction():
            return dict.fromkeys(places, value)
        case PassValue():
            return dict.fromkeys(places, _of_this_forward(value, spec, planned))
        case RunFaults():
            return values.faults(value, spec, places)
    return values.read(value, places)


def captured_as(spec: HookSpec, match: Match) -> tuple[str, ...]:
    """The names under which a run may have captured the match: for an action on own parameters theirs, too."""
    action = spec.action_on(match.matched_parameters)
    if not isinstance(action, OnOwnParameters) or not action.parameters:
        return match.names
    names = list(match.names)
    for name in match.names:
        names += [f"{name}.{parameter}".lstrip(".") for parameter in action.parameters]
    return tuple(names)


def _of_this_forward(value: PassValue, spec: HookSpec, planned: Mapping[str, PlannedHook]) -> PassValue:
    """The value with the path of its module. Raises HookrunError, which says why the hook cannot have it."""
    if spec.hook_type not in _ON_CALLS or spec.action.adds(spec.name):
        raise HookrunError(
            "a value of this forward is for edits on forward or forward_pre, not for parameters"
        )
    captures = {
        name: hook
        for name, hook in planned.items()
        if hook.spec.action.captures and hook.spec.hook_type in _ON_CALLS
    }
    source = captures.get(value.hook)
    if source is None:
        raise HookrunError(
            f"there is no capture {value.hook!r} on forward or forward_pre: {nearest(value.hook, captures)}"
        )
    paths = [match.path for match in source.matches]
    module = value.module
    if module is None and len(paths) == 1:
        module = paths[0]
    path = None if module is None else source.aliases.get(module)
    if path is None:
        raise HookrunError(f"{value.hook} captures {listed(paths, SHOWN)}: name one of them with `module`")
    when = source.spec.keys.when
    if not when.covers(spec.keys.when):
        raise HookrunError(
            f"{value.hook} may not fire when this hook does ({when}): give both the same `when`"
        )
    return value.model_copy(update={"module": path})


def _heads(
    spec: HookSpec, matches: Iterable[Match], names: ModelNames, mistakes: Mistakes
) -> dict[str, HeadCount]:
    """How many heads each match has; it is a mistake if that is unknown or a head does not exist."""
    counts: dict[str, HeadCount] = {}
    heads = spec.keys.heads
    if heads is None or spec.hook_type.on_parameters:
        return counts
    where = f"{spec.where}.heads"
    unknown: list[str] = []
    for match in matches:
        shown = match.path or "(root)"
        is_point = match.path in names.tree.points and heads.count is None
        counted = None if is_point else head_count(names.model, match.path, heads)
        if counted is None:
            unknown.append(shown)
            continue
        if heads.count is None:
            sides = [
                last_dimension_holds_heads(names.model, match.path, of_input=of_input)
                for of_input in _seen_sides(spec)
            ]
            counted = replace(counted, in_last=all(sides))
        counts[match.path] = counted
        misfits = [heads.misfit(count) for count in counted.counts]
        if None not in misfits:
            mistakes.add([Problem(where, f"on {shown}: {misfits[0]}")])
    if unknown:
        what = (
            f"the number of heads of {listed(unknown, SHOWN)} is unknown: the model's configuration has none"
        )
        hint = f"add the count: heads: {{count: 12, pick: {list(heads.pick)}}}"
        mistakes.add([Problem(where, what, hint)])
    return counts


def _seen_sides(spec: HookSpec) -> tuple[bool, ...]:
    """Whether the hook sees a module's input, or its gradient (True), or its output, or its gradient (False)."""
    if spec.hook_type is not BACKWARD:
        return (spec.hook_type is FORWARD_PRE,)
    if not spec.action.observes:
        return (True,)
    target = spec.keys.target
    return (True, False) if target is None else (target.keys[0] == "grad_input",)


def _unknown_in_data(spec: HookSpec, values: Values) -> Iterator[Problem]:
    """Problems of fields and spans that the samples do not have."""
    where = f"{spec.where}.when.data"
    wanted = spec.keys.when.data
    if wanted is not None and values.data is not None:
        yield from unknown_fields(wanted, where, values.data)
    elif wanted is not None and not values.of_run:
        yield Problem(
            where,
            "reads the data of a run, which a model in a loop of your own does not have",
            "leave it out, or choose the rows in the loop; `when: {value: …}` needs no data",
        )
    yield from unknown_spans(spec.keys.tokens, spec.where, values.data)


def _tokens(
    spec: HookSpec, model: nn.Module, values: Values, mistakes: Mistakes
) -> tuple[Tokenizer | None, dict[str, tuple[Ids, ...]]]:
    """The tokenizer, and text -> the ways in which it may be tokens, for a hook with `tokens`."""
    if spec.keys.tokens is None:
        return None, {}
    lookup = tokenizer_of(model, None if values.data is None else values.data.tokenizer)
    if lookup.tokenizer is None and values.of_run and values.data is None:
        return None, {}  # data that could not be described may have a tokenizer
    texts, unreadable = texts_of(spec.keys.tokens, spec.where, lookup)
    mistakes.add(unreadable)
    return lookup.tokenizer, texts


# ---- checks ------------------------------------------------------------------------------------------------------


def _unexpected_matches(hook: HookSpec, matches: Sequence[Match], names: ModelNames) -> Iterator[Problem]:
    """Problems of a selector of which a member matches nothing, or which does not match the expected number."""
    selector = hook.keys.select
    expected = hook.keys.expect
    on_parameters = hook.hook_type.on_parameters
    on_either = hook.takes_parameters
    kind = "parameter" if on_parameters else "module"
    if on_either:
        kind = "module or parameter"
    unmatched = _unmatched_members(hook, names) if 0 not in expected else []
    for member, place in unmatched[:_MOST_MEMBERS]:
        what = f"{str(member)!r} ({place}) matches no {kind}"
        hint = (
            f'{names.nearest(member, on_either or on_parameters)}; `expect: ">=0"` lets members match nothing'
        )
        problem = Problem(f"{hook.where}.select", what, hint)
        problem = names.unmatched(problem, member, on_either or on_parameters)
        yield replace(problem, fix=None)  # `select` holds other members, too
    if len(matches) in expected or (matches and hook.action.finds):
        return
    if matches:
        shown = listed([match.path or "(root)" for match in matches], 8)
        kinds = "parameters" if on_parameters else "modules"
        yield Problem(
            f"{hook.where}.expect",
            f"expected {expected} {kinds}, {str(selector)!r} matches {len(matches)}: {shown}",
            "narrow `select`, or change `expect`",
        )
    elif not unmatched:
        what = f"{str(selector)!r} matches no {kind} of {type(names.model).__name__}"
        hint = f"{names.nearest(selector, on_either or on_parameters)}; `task=modules` lists every path"
        problem = Problem(f"{hook.where}.select", what, hint)
        yield names.unmatched(problem, selector, on_either or on_parameters)


def unexpected_finds(plan: ResolvedPlan) -> Iterator[Problem]:
    """Problems of hooks that look for their modules, and did not find as many as they expect."""
    for hook in plan.hooks:
        spec = hook.spec
        expected = spec.keys.expect
        if spec.action.finds and hook.is_found and len(hook.matches) not in expected:
            found = f"{len(hook.matches)} of those that {str(spec.keys.select)!r} matches have {spec.action.finds}"
            hint = f'{spec.action.otherwise}; or allow that there are none: expect: ">=0"'
            yield Problem(f"{spec.where}.expect", f"expected {expected} modules, {found}", hint)


def _unmatched_members(hook: HookSpec, names: ModelNames) -> list[tuple[Selector, str]]:
    """The members of the selector that match nothing, with their places in it."""
    selector = hook.keys.select
    on_either = hook.takes_parameters
    if not on_either and not hook.hook_type.on_parameters:
        return list(selector.unmatched(names.tree_of(hook)))
    of_parameters = names.parameter_tree(readings=hook.hook_type.on == "reading")
    unmatched = list(selector.unmatched(of_parameters))
    if on_either:  # a module without parameters is matched, too
        unmatched = [member for member in selector.unmatched(names.tree_of(hook)) if member in unmatched]
    return unmatched


def _wrong_hook_type(spec: HookSpec) -> Iterator[Problem]:
    """The problem of an action that cannot be used with the hook type."""
    action = spec.action
    kind = spec.hook_type
    where = f"{spec.where}.action"
    if kind.shipped not in action.hook_types:
        what = f"action {action.action_name!r} does not go with hook type {kind.name!r}"
        carriers = ", ".join(sorted(carrier.name for carrier in action.hook_types))
        yield Problem(where, what, f"it goes with {carriers}")
        return
    reason = action.carried_by(kind)
    if reason is not None:
        yield Problem(where, reason)


def _wrong_values(spec: HookSpec) -> Iterator[Problem]:
    """Problems of values that cannot be used with the hook type or the action."""
    action = spec.action
    adds = action.adds(spec.name) is not None
    if adds or spec.hook_type.phase == "installation":
        for key, ramp in action.ramps().items():
            yield Problem(
                f"{spec.where}.{key}",
                f"{ramp}: {action.action_name} reads its values once, at installation",
                "give a number",
            )
    for key, value in action.outside_values().items():
        where = f"{spec.where}.{key}"
        if is_by_sample(value) and (adds or not spec.hook_type.batch):
            yield Problem(
                where,
                f"{value}: a value for each sample goes with hooks that see a batch of samples",
                "take one for all: sample: mean",
            )
        if isinstance(value, OutsideValue) and value.at is not None:
            yield from _wrong_place(spec, f"{where}.at", adds=adds)
        if adds and isinstance(value, InlineFunction):
            yield Problem(
                where,
                f"{value}: a parameter starts from numbers, not from a function of another tensor",
                "give a number, a list or a tensor",
            )


def _wrong_place(spec: HookSpec, where: str, *, adds: bool) -> Iterator[Problem]:
    """The problem of `at: same` where there is no part of a value to take, or a parameter that is added."""
    hint = "use the value's own `index`, or leave `at` out"
    if not spec.takes_part:
        yield Problem(
            where,
            "`at: same` takes the part of the value that `index`, `tokens` and `heads` name, and the hook has "
            "no `index`, `tokens` or `heads`",
            hint,
        )
    elif adds:
        yield Problem(
            where,
            "`at: same` does not go with a parameter that is added: it is of the part's shape itself",
            hint,
        )


def _meaningless_keys(spec: HookSpec) -> Iterator[Problem]:
    """Problems of keys that have no meaning for the hook type or the action."""
    keys = spec.keys
    action = spec.action
    kind = spec.hook_type
    for key in _given_keys(spec):
        if key not in kind.takes:
            yield Problem(
                f"{spec.where}.{key}",
                f"has no meaning on hook type {kind.name!r}, which fires {kind.fires} and sees {kind.sees}",
                f"leave `{key}` out",
            )
        elif action.acts_on_call and not key.startswith("when"):
            yield Problem(
                f"{spec.where}.{key}",
                f"has no meaning for {action.action_name}, which acts on the whole call of the module",
                f"leave `{key}` out",
            )
    if keys.index is not None and action.does == "pack":
        yield Problem(
            f"{spec.where}.index",
            f"cannot be used with {action.action_name}, which packs the whole tensor",
            "leave it out",
        )
    why = _why_not_by_row(spec) if keys.when.of_samples else None
    if why is not None:
        key = "data" if keys.when.value is None else "value"
        yield Problem(
            f"{spec.where}.when.{key}",
            f"chooses among the rows of a batch, and {why}",
            "leave it out, or use another action on forward, forward_pre or output_grad",
        )
    if keys.when.rank is not None and not action.observes:
        yield Problem(
            f"{spec.where}.when.rank",
            f"{action.action_name} changes values, and on some ranks alone their models would become different",
            "leave it out; it is for hooks that only look: capture, print, stats, check",
        )


def _given_keys(spec: HookSpec) -> Iterator[str]:
    """The keys that were given among those that only some hook types have."""
    for key in ("target", "index", "tokens", "heads", "batch_dim"):
        if getattr(spec.keys, key) is not None:
            yield key
    when = spec.keys.when
    if not when.always:
        yield "when"
    if when.call is not None and "when" in spec.hook_type.takes:
        yield "when.call"


def _why_not_by_row(spec: HookSpec) -> str | None:
    """Why the hook cannot act on some rows of a batch only, or None."""
    action = spec.action
    kind = spec.hook_type
    if not kind.batch:
        return f"{kind.name!r} sees {kind.sees}"
    if action.acts_on_call:
        return f"{action.action_name} acts on the whole call"
    if "flipped" in action.uses:
        return f"{action.action_name} lists what it does to all of them"
    if action.mixes_rows:
        return f"{action.action_name} computes a row from the other rows too"
    if action.scope == "together":
        return f"{action.action_name} takes several tensors together"
    return None


def _unfit_matches(
    spec: HookSpec, matches: Iterable[Match], names: ModelNames, added: Collection[str]
) -> Iterator[Problem]:
    """Problems of matches that the hook does not fit.

    added: the names of the parameters and buffers of the user's own module
    """
    unfit = defaultdict[str, list[str]](list)
    never_fired = defaultdict[Unhookable, list[str]](list)
    for match in matches:
        why = _why_never_fired(spec, match, names)
        if why is not None:
            never_fired[why].append(match.path)
        reason = _why_unfit(spec, match, names, added)
        if reason is not None:
            unfit[reason].append(match.path or "(root)")
    for reason, paths in unfit.items():
        yield Problem(spec.where, f"{spec.action.action_name} on {listed(paths, SHOWN)}: {reason}")
    for why, paths in never_fired.items():
        yield Problem(f"{spec.where}.select", f"matches {listed(paths, SHOWN)}; {why.what}", why.hint)


def _why_never_fired(spec: HookSpec, match: Match, names: ModelNames) -> Unhookable | None:
    """Why the hook would never fire on the match, or None."""
    kind = spec.hook_type
    if kind.phase == "installation":
        return None
    if not kind.on_parameters:
        return names.unhookable.get(id(names.modules[match.path]))
    if kind.on == "reading":
        return names.unhookable.get(id(names.owner_of(match.path)))
    return None


def _why_unfit(spec: HookSpec, match: Match, names: ModelNames, added: Collection[str]) -> str | None:
    """Why the match cannot have the hook, or None."""
    kind = spec.hook_type
    action = spec.action
    if match.path in names.tree.points and action.acts_on_call:
        return "it acts on the call of a module, and this is a value within the call: use replace or scale"
    if match.path in names.tree.points and (added or action.adds(spec.name)):
        return "it adds parameters, and this is a value, which has none: add them to a module"
    owner = names.owner_of(match.path) if kind.on_parameters else names.modules[match.path]
    only_values = kind.sees_batch and not action.acts_on_call and not added and not action.adds(spec.name)
    if is_scripted(owner) and not only_values:
        return "a TorchScript module takes hooks on the values of its calls only"
    if not kind.on_parameters:
        return _incompatibility(spec, match, names, added)
    if kind.on == "reading":
        return computed_before(owner, match.path.rpartition(".")[2])
    return names.without_gradient(match.path) if kind.phase == "backward" else None


def _incompatibility(spec: HookSpec, match: Match, names: ModelNames, added: Collection[str]) -> str | None:
    """Why the action, or a parameter that it adds, does not fit the module, or None."""
    module = names.modules[match.path]
    action = spec.action_on(match.matched_parameters)
    planned = names.added.get(match.path, [])
    name = action.adds(spec.name)
    for new in added if name is None else [name]:
        taken = name_taken(module, new, planned)
        if taken is None:
            continue
        for_the_hook = " for the hook" if action.trains or added else ""
        return f"{taken}: choose another name{for_the_hook}"
    if match.matched_parameters and "parameters" in spec.action.model_fields_set:
        return "`select` names parameters, and so does `parameters`: leave one of them out"
    present = [name for name, parameter in module._parameters.items() if parameter is not None]
    return action.incompatibility(spec.hook_type, module, present + planned)
