"""Chooses before the run, by name, the parameters that are trained and their groups in the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hookrun.errors import Problem, listed, nearest
from hookrun.plan.model_tree import ModelNames
from hookrun.plan.resolve import names_under
from hookrun.spec import HookSpec, Spec
from hookrun.spec.experiment import Optimizer, Train
from hookrun.spec.parameters import AddedBy, Choice
from hookrun.spec.selector import Selector

PARAMETERS, GROUPS = "train.parameters", "train.optimizer.groups"
_SHOWN = 4


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

    groups:   the optimizer's groups; each trained parameter is in one. Those in no configured group come first
    frozen:   the parameters that `train.parameters` leaves out; hooks may add some of them later
    count:    the number of all parameters, trained or not
    elements: the numbers of elements of the trained and of all parameters, without those that hooks will add
    note:     a text that says whether hooks will add parameters; may be empty
    """

    groups: tuple[ParameterGroup, ...]
    frozen: frozenset[str]
    count: int
    elements: tuple[int, int]
    note: str = ""

    @property
    def names(self) -> list[str]:
        """The names of all trained parameters."""
        return [name for group in self.groups for name in group.names]

    def freeze_rest(self, model: nn.Module) -> None:
        """Set requires_grad to False for the parameters in `frozen` that the model has now."""
        for name, parameter in model.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(False)

    def lines(self, optimizer: Optimizer) -> Iterator[str]:
        """The lines that are shown with the plan."""
        count, (elements, total) = len(self.names), self.elements
        which = f"all {count}" if count == self.count else f"{count} of {self.count}"
        yield f"trains {which} parameters ({elements:,} of {total:,} elements{self.note}) with {_called(optimizer)}"
        for group in self.groups:
            if group.where:
                args = ", ".join(f"{key}={value}" for key, value in group.args.items()) or "no arguments"
                place = group.where.removeprefix("train.optimizer.")
                names = listed(group.names, _SHOWN)
                yield f"  {place} ({group.label}): {args} for {names}"


def _called(optimizer: Optimizer) -> str:
    args = ", ".join(f"{key}={value}" for key, value in optimizer.args.items())
    return f"{optimizer.name}({args})"


def chosen(train: Train, hooks: Spec, model: nn.Module) -> tuple[Trained, list[Problem]]:
    """The parameters of the model that a run with these hooks trains, and all mistakes in the settings for them."""
    choosing = _Choosing(hooks, names_under(hooks, model))
    names = choosing.names
    every = names.select_parameters()
    trained, left_out = list(filter(names.trains, every)), frozenset[str]()
    problems = choosing.problems
    if train.parameters is not None:
        asked = {
            name for found in choosing.members(train.parameters, PARAMETERS, set(trained)) for name in found
        }
        if not problems:
            left_out = frozenset(every) - asked
            trained = [name for name in trained if name in asked]
    if not trained and not problems:
        text = "nothing to train: no parameter of the model requires a gradient"
        problems.append(Problem(PARAMETERS, text, "use task=evaluate, or unfreeze a parameter"))
    groups = list(_groups(train.optimizer, choosing, trained))
    grouped = {name for group in groups for name in group.names}
    rest = tuple(name for name in trained if name not in grouped)
    if rest:
        groups.insert(0, ParameterGroup("", "", rest))
    sizes = {name: names.match(name, on_parameters=True).parameters for name in every}
    elements = sum(sizes[name] for name in trained), sum(sizes.values())
    note = ", without those that hooks add" if any(names.added.values()) else ""
    return Trained(tuple(groups), left_out, len(every), elements, note), problems


def _groups(optimizer: Optimizer, choosing: _Choosing, trained: list[str]) -> Iterator[ParameterGroup]:
    """The configured groups of the optimizer; adds a problem for parameters that two groups select."""
    owner = dict[str, tuple[int, Choice]]()
    for number, group in enumerate(optimizer.groups):
        where = f"{GROUPS}.{number}"
        found = choosing.members(group.select, f"{where}.select", set(trained))
        names = [name for name in trained if any(name in each for each in found)]
        shared: dict[tuple[int, Choice], list[str]] = {}
        for name in names:
            if name in owner:
                shared.setdefault(owner[name], []).append(name)
            owner.setdefault(name, (number, group.select))
        for (other, select), both in shared.items():
            text = (
                f"'{group.select}' and '{select}' of groups.{other} both name {listed(both, _SHOWN)}; "
                "a parameter can be in only one group"
            )
            hint = "narrow one of the two, for example by `select: {path: ..., exclude: ...}`"
            choosing.problems.append(Problem(f"{where}.select", text, hint))
        yield ParameterGroup(where, str(group.select), tuple(names), group.args)


class _Choosing:
    """Finds the parameters that selectors choose, and collects the mistakes in the selectors."""

    def __init__(self, hooks: Spec, names: ModelNames) -> None:
        enabled = [hook for hook in hooks.hooks if hook.keys.enabled]
        self.names = names
        self.problems = list[Problem]()
        self._adding = {hook.name: hook for hook in enabled if hook.action.adds(hook.name) is not None}

    def members(self, choice: Choice, where: str, trained: set[str]) -> list[list[str]]:
        """For each member of the choice, the names of the parameters that it selects.

        where:   the key path of the choice
        trained: the parameters that require a gradient; a member without any of them is a mistake
        """
        return [self._member(member, place, trained) for place, member in choice.placed(where)]

    def _member(self, member: Selector | AddedBy, where: str, trained: set[str]) -> list[str]:
        found = self._added(member, where) if isinstance(member, AddedBy) else self._selected(member, where)
        if found and trained.isdisjoint(found):
            text = f"'{member}' names only parameters that are not trained: {listed(found, _SHOWN)}"
            hint = "leave it out, or do not freeze them by hooks, the model or `train.parameters`"
            self.problems.append(Problem(where, text, hint))
        return found

    def _selected(self, selector: Selector, where: str) -> list[str]:
        found = self.names.select_parameters(selector)
        missing = list(selector.unmatched(self.names.tree, self.names.parameter_tree()))
        for each in missing:
            text = f"'{each.selector}' ({each.place}) matches no parameter"
            self.problems.append(Problem(where, text, self.names.nearest(each.selector, on_parameters=True)))
        if not found and not missing:
            text = f"'{selector}' matches no parameter of {type(self.names.model).__name__}"
            self.problems.append(Problem(where, text, self.names.nearest(selector, on_parameters=True)))
        return found

    def _added(self, member: AddedBy, where: str) -> list[str]:
        if not self._adding:
            hint = "add_bias with `trainable: true` and add_parameter do"
            self.problems.append(Problem(where, f"'{member}': no hook adds parameters", hint))
        elif not member.every and member.hook not in self._adding:
            text = f"'{member}': there is no hook {member.hook!r} that adds parameters"
            self.problems.append(Problem(where, text, nearest(member.hook, self._adding)))
        hooks = [hook for name, hook in self._adding.items() if member.every or name == member.hook]
        return list(self._names_added(hooks))

    def _names_added(self, hooks: Iterable[HookSpec]) -> Iterator[str]:
        """The names of the parameters that hooks add. A hook without matches is reported by the plan, not here."""
        for hook in hooks:
            for path in self.names.select(hook):
                yield f"{path}.{hook.action.adds(hook.name)}" if path else str(hook.action.adds(hook.name))
