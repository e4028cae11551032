"""Chooses before the run, by name, the parameters that are trained and their groups in the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from hookrun.engine.plan.model_tree import ModelNames
from hookrun.engine.plan.resolve import names_under
from hookrun.engine.spec import HookSpec, Spec
from hookrun.engine.spec.parameters import AddedBy, Choice
from hookrun.engine.spec.selector import Selector
from hookrun.engine.validation import join
from hookrun.errors import Problem, listed, nearest
from hookrun.run.experiment.settings import Optimizer, Train

PARAMETERS, GROUPS = "train.parameters", "train.optimizer.groups"


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with their own arguments in the optimizer.

    where: the key path of the group; empty for the parameters that are in no group of the configuration
    label: the selector as it was written
    names: the names of the parameters
    args:  the arguments of the group
    """

    where: str
    label: str
    names: tuple[str, ...]
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The parameters that a run trains.

    groups: the optimizer's groups; each trained parameter is in one. Those in no configured group come first
    frozen: the parameters that `train.parameters` leaves out; hooks may add some of them later
    shown:  how many of all parameters and of their elements are trained, as the plan shows it
    """

    groups: tuple[ParameterGroup, ...]
    frozen: frozenset[str]
    shown: str

    def freeze_rest(self, model: nn.Module) -> None:
        """Set requires_grad to False for the parameters in `frozen` that the model has now."""
        for name, parameter in model.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(False)

    def lines(self, optimizer: Optimizer) -> Iterator[str]:
        """The lines that are shown with the plan."""
        yield f"trains {self.shown} with {optimizer.name}({_written(optimizer.args)})"
        for group in self.groups:
            if group.where:
                args = _written(group.args) or "no arguments"
                place = group.where.removeprefix("train.optimizer.")
                yield f"  {place} ({group.label}): {args} for {listed(group.names)}"


def _written(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in args.items())


def chosen(train: Train, hooks: Spec, model: nn.Module) -> tuple[Trained, list[Problem]]:
    """The parameters of the model that a run with these hooks trains, and all mistakes in the settings for them."""
    names = names_under(hooks, model)
    adding = {hook.name: hook for hook in hooks.hooks if names.added_by.get(hook.name)}
    problems: list[Problem] = []
    members = partial(_members, names=names, adding=adding, problems=problems)
    every = names.select_parameters()
    trained = [name for name in every if names.trains(name)]
    left_out = frozenset[str]()
    if train.parameters is not None:
        selected = members(train.parameters, PARAMETERS, set(trained))
        if not problems:
            left_out = frozenset(every) - selected
            trained = [name for name in trained if name not in left_out]
    if not trained and not problems:
        problems.append(
            Problem(
                PARAMETERS,
                "nothing to train: no parameter of the model requires a gradient",
                "use task=evaluate, or unfreeze a parameter",
            )
        )
    groups: list[ParameterGroup] = []
    rest = trained
    for number, group in enumerate(train.optimizer.groups):
        where = f"{GROUPS}.{number}"
        selected = members(group.select, f"{where}.select", set(trained))
        problems += _in_two_groups(f"{where}.select", str(group.select), selected, groups)
        in_group = tuple(name for name in trained if name in selected)
        groups.append(ParameterGroup(where, str(group.select), in_group, group.args))
        rest = [name for name in rest if name not in selected]
    if rest:
        groups.insert(0, ParameterGroup("", "", tuple(rest)))
    return Trained(tuple(groups), left_out, _shown(names, every, trained)), problems


def _in_two_groups(
    where: str, label: str, selected: set[str], groups: Sequence[ParameterGroup]
) -> Iterator[Problem]:
    """A problem for each earlier group that has some of the selected parameters too."""
    for other in groups:
        both = [name for name in other.names if name in selected]
        if both:
            yield Problem(
                where,
                f"'{label}' and '{other.label}' of {other.where.removeprefix('train.optimizer.')} both "
                f"name {listed(both)}; a parameter can be in only one group",
                "narrow one of the two, for example by `select: {path: ..., exclude: ...}`",
            )


def _shown(names: ModelNames, every: Sequence[str], trained: Sequence[str]) -> str:
    """How many of all parameters and of their elements are trained."""
    sizes = {name: names.match(name, on_parameters=True).parameters for name in every}
    trained_elements = sum(sizes[name] for name in trained)
    which = f"all {len(every)}" if len(trained) == len(every) else f"{len(trained)} of {len(every)}"
    note = ", without those that hooks add" if any(names.added.values()) else ""
    return f"{which} parameters ({trained_elements:,} of {sum(sizes.values()):,} elements{note})"


def _members(
    choice: Choice,
    where: str,
    trained: set[str],
    *,
    names: ModelNames,
    adding: Mapping[str, HookSpec],
    problems: list[Problem],
) -> set[str]:
    """The names of the parameters that the choice selects.

    where:    the key path of the choice
    trained:  the parameters that require a gradient; a member without any of them is a mistake
    adding:   the hooks that add parameters, by name
    problems: receives the mistakes
    """
    names_of_all = set[str]()
    for place, member in choice.placed(where):
        if isinstance(member, AddedBy):
            selected = _added(member, place, names, adding, problems)
        else:
            selected = _selected(member, place, names, problems)
        if selected and trained.isdisjoint(selected):
            problems.append(
                Problem(
                    place,
                    f"'{member}' names only parameters that are not trained: {listed(selected)}",
                    "leave it out, or do not freeze them by hooks, the model or `train.parameters`",
                )
            )
        names_of_all.update(selected)
    return names_of_all


def _selected(selector: Selector, where: str, names: ModelNames, problems: list[Problem]) -> list[str]:
    """The names of the parameters that a selector chooses. problems: receives the mistakes in it."""
    selected = names.select_parameters(selector)
    unmatched = list(selector.unmatched(names.parameter_tree()))
    for member, place in unmatched:
        near = names.nearest(member, on_parameters=True)
        problems.append(Problem(where, f"'{member}' ({place}) matches no parameter", near))
    if not selected and not unmatched:
        what = f"'{selector}' matches no parameter of {type(names.model).__name__}"
        problems.append(Problem(where, what, names.nearest(selector, on_parameters=True)))
    return selected


def _added(
    member: AddedBy, where: str, names: ModelNames, adding: Mapping[str, HookSpec], problems: list[Problem]
) -> list[str]:
    """The names of the parameters that hooks will add. problems: receives the mistakes in the name of the hook.

    A hook without matches is reported by the plan, not here.
    """
    if not adding:
        problems.append(
            Problem(
                where,
                f"'{member}': no hook adds parameters",
                "add_bias with `trainable: true` and add_parameter do",
            )
        )
    elif not member.every and member.hook not in adding:
        problems.append(
            Problem(
                where,
                f"'{member}': there is no hook {member.hook!r} that adds parameters",
                nearest(member.hook, adding),
            )
        )
    added: list[str] = []
    for hook_name, hook in adding.items():
        if member.every or hook_name == member.hook:
            for match in names.matches(hook):
                added += [join(match.path, name) for name in names.added_by[hook_name]]
    return added
