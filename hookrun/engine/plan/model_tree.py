"""A model's names: modules and parameters once per object, each with all of its names."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from hookrun.engine.actions.base import was_added
from hookrun.engine.actions.own_parameters import LAZY
from hookrun.engine.plan.attention_points import POINTS, lacks_points
from hookrun.engine.plan.plan import Match, PlannedHook
from hookrun.engine.plan.points import Point
from hookrun.engine.spec.hook import HookSpec
from hookrun.engine.spec.selector import Names, Node, Selector, Tree
from hookrun.engine.spec.selector.tree import ancestors
from hookrun.engine.values.private_names import require
from hookrun.errors import Problem, listed, misnamed, shortened

PointsAt = Mapping[int, Sequence[nn.Module]]
"""id of a module -> what hooks add there; a module may not be hashable."""


class Unhookable(NamedTuple):
    """Why hooks on the submodules of a module do not fire, and what to do.

    itself: hooks on the module itself do not fire either
    """

    what: str
    hint: str
    itself: bool = True


def unhookable(module: nn.Module) -> Unhookable | None:
    """Why hooks inside `module` would never fire, or None."""
    if is_scripted(module):
        return Unhookable(
            f"{class_name(module)} calls its modules without Python hooks",
            "hook it as a whole, or hook the model that it was made from",
            itself=False,
        )
    compiled = "an already compiled module ignores new hooks"
    first = "install the hooks first, then compile"
    if module._compiled_call_impl is not None and not hasattr(module._compiled_call_impl, "hooks_fire"):
        return Unhookable(compiled, first)
    # takes half a second to import, and is imported if anything is compiled
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        require("torch, compiler")
        if isinstance(module, dynamo.OptimizedModule):
            return Unhookable(compiled, first, itself=False)
    if isinstance(module, nn.DataParallel):
        return Unhookable(
            "DataParallel's threads race on hooks", "use DistributedDataParallel, or hook the inner module"
        )
    return None


def is_scripted(module: nn.Module) -> bool:
    """Whether it is a TorchScript module, of torch.jit.script, trace or load."""
    return isinstance(module, torch.jit.ScriptModule)


def unhookable_model(model: nn.Module) -> Unhookable | None:
    """Why no hook on the model would fire, or None: a TorchScript model has at least its root."""
    return None if is_scripted(model) else unhookable(model)


def children_first(module: nn.Module, points: PointsAt = MappingProxyType({})) -> Iterator[nn.Module]:
    """The modules in the order of `Module.apply`, a shared one once for each parent.

    A model may define methods `apply` and `children` of its own, which mean something else.

    points: those that hooks add at a module, which are called within its call
    """
    for child in (*module._modules.values(), *points.get(id(module), ())):
        if child is not None:
            yield from children_first(child, points)
    yield module


def parametrized(module: nn.Module) -> dict[str, ParametrizationList]:
    """The parametrized parameters of a module, by the names under which its forward reads them."""
    lists = getattr(module, "parametrizations", None)
    members = lists.items() if isinstance(lists, nn.ModuleDict) else ()
    return {
        name: computed
        for name, computed in members
        if isinstance(computed, ParametrizationList) and computed._parameters
    }


def computed_before(module: nn.Module, name: str) -> str | None:
    """That a pre-hook of the module computes a tensor from this parameter for the forward, or None.

    As torch.nn.utils.prune does, and the older weight_norm and spectral_norm.
    """
    for key, value in vars(module).items():
        if isinstance(value, Tensor) and name.startswith(f"{key}_"):
            return (
                f"a pre-hook of torch.nn.utils computes {key!r} from it, which is what the forward reads: make that "
                "permanent (prune.remove), or use torch.nn.utils.parametrizations"
            )
    return None


MOST_OF_A_CLASS = 200
"""How many characters of the name of a class are shown and stored."""


def class_name(module: nn.Module) -> str:
    """The name of its class; of a longer one than `MOST_OF_A_CLASS` the beginning and the end.

    Of a TorchScript module that of the class it was made from: all have a class of torch, and a copy another one.
    """
    name = f"{module.original_name} (TorchScript)" if is_scripted(module) else type(module).__name__
    is_plain = len(name) <= MOST_OF_A_CLASS and name.isidentifier()
    return name if is_plain else shortened(name, MOST_OF_A_CLASS)


class ModelNames:
    """The names that selectors are matched against, and what the hooks planned so far will add and freeze.

    modules, parameters: by each of their names
    added:  first path of a module -> names of parameters that hooks will add
    added_by: name of a hook -> those that it adds to each of its modules
    frozen: names of the parameters that hooks will freeze
    disabled_points: the selectors of what hooks would add that are not enabled
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names = _names_by_object(self.modules) | _names_by_object(self.parameters)
        self.added = defaultdict[str, list[str]](list)
        self.added_by = dict[str, list[str]]()
        self.frozen = set[str]()
        self.disabled_points: Sequence[str] = ()
        # of parameters, of readings; reset when a planned hook adds parameters
        self._trees = dict[bool, Tree]()

    @cached_property
    def tree(self) -> Tree:
        """The modules, with all of their names. Globs pass over those without a forward, but not in its `whole`."""
        types = {cls: _type_names(cls) for cls in set(map(type, self.modules.values()))}
        nodes: dict[str, Node] = {}
        numbered: dict[str, list[str]] = {}
        silent = set[str]()
        for path, module in self.modules.items():
            size = sum(map(_numel, nn.Module.parameters(module)))  # a module may redefine `parameters`
            nodes[path] = Node(path, types[type(module)], not module._modules, size)
            children = list(filter(str.isdecimal, module._modules.keys()))
            if children:
                numbered[path] = children
            # calling it raises: a list or dict of modules or parameters, or a class without a forward
            forward = getattr(module, "forward", None)
            if getattr(forward, "__func__", None) is nn.Module.forward:
                silent.add(path)
        return Tree(nodes, numbered, self._first_names(self.modules), silent)

    @cached_property
    def own(self) -> set[int]:
        """The ids of the model's parameters and buffers, without those that hooks have added."""
        ids = set[int]()
        for module in self.modules.values():
            tensors = chain(module._parameters.items(), module._buffers.items())
            ids |= {id(tensor) for name, tensor in tensors if not was_added(module, name)}
        return ids

    def owner_of(self, parameter: str) -> nn.Module:
        """The module that has the parameter of this name."""
        return self.modules[parameter.rpartition(".")[0]]

    def tree_of(self, spec: HookSpec) -> Tree:
        """The modules as the hook sees them: without a forward they still have parameters and can be changed."""
        return self.tree if spec.hook_type.sees_batch else self.tree.whole

    def parameter_tree(self, *, readings: bool = False) -> Tree:
        """The parameters, with all of their names, including those that planned hooks will add.

        readings: the same as modules read them: each reader of a shared parameter by itself, and parametrized ones
        """
        if readings not in self._trees:
            names = [*self.parameters, *_names_in(self.added)]
            if readings:
                names += _names_in({path: parametrized(module) for path, module in self.modules.items()})
                first: Mapping[str, str] = {name: self._first_reading(name) for name in names}
            else:
                first = self._first_names(self.parameters)
            self._trees[readings] = self._tree_of_parameters(names, first)
        return self._trees[readings]

    def _tree_of_parameters(self, names: Iterable[str], first: Mapping[str, str]) -> Tree:
        nodes: dict[str, Node] = {}
        numbered = {path: [*children] for path, children in self.tree.numbered.items()}
        for name in dict.fromkeys(names):
            container, _, last = name.rpartition(".")
            owner = self.tree.nodes[container]
            size = _numel(self.parameters[name]) if name in self.parameters else 0
            nodes[name] = Node(name, owner.types, owner.leaf, size)
            if last.isdecimal():
                numbered.setdefault(container, []).append(last)
        return Tree(nodes, numbered, first, modules=self.tree.whole)

    def _first_reading(self, name: str) -> str:
        """The name of a parameter at the first name of its module."""
        path, _, parameter = name.rpartition(".")
        return f"{self.first_name(path)}.{parameter}".lstrip(".")

    def _first_names(self, objects: Mapping[str, object]) -> Mapping[str, str]:
        """Each name -> the first one of its object."""
        return {name: self._names[id(named)][0] for name, named in objects.items()}

    def matches(self, spec: HookSpec) -> tuple[Match, ...]:
        """The modules or parameters that the hook's selector matches: by first names, once per object, in order."""
        selector = spec.keys.select
        reading = spec.hook_type.on == "reading"
        if spec.hook_type.on_parameters:
            names = self.select_parameters(selector, readings=reading)
            return tuple(self.match(name, on_parameters=True, reading=reading) for name in names)
        paths = map(self.first_name, selector.select(self.tree_of(spec)))
        if not spec.takes_parameters:
            return tuple(self.match(path, on_parameters=False) for path in dict.fromkeys(paths))
        parameters = self._matched_parameters(selector)
        matches: list[Match] = []
        for path in dict.fromkeys((*paths, *parameters)):
            match = self.match(path, on_parameters=False)
            matches.append(replace(match, matched_parameters=tuple(parameters.get(path, ()))))
        return tuple(matches)

    def _matched_parameters(self, selector: Selector) -> dict[str, list[str]]:
        """First path of a module that the selector does not match -> those of its parameters that it matches."""
        parameters = defaultdict[str, list[str]](list)
        modules = set(map(self.first_name, selector.select(self.tree.whole)))
        for name in selector.select(self.parameter_tree()):
            owner, _, last = name.rpartition(".")
            enclosing = map(self.first_name, ancestors(name))
            of_owner = parameters[self.first_name(owner)]
            if modules.isdisjoint(enclosing) and last not in of_owner:
                of_owner.append(last)
        return {path: names for path, names in parameters.items() if names}

    def select_parameters(self, selector: Selector | None = None, *, readings: bool = False) -> list[str]:
        """The parameters that a selector matches, by default all: first names, once per object, in order."""
        tree = self.parameter_tree(readings=readings)
        matching = tree.nodes if selector is None else selector.paths(tree)
        # a parametrized parameter stands also for what it is computed from
        names = [name for name in tree.nodes if name in matching and _parametrized_name(name) not in matching]
        return list(dict.fromkeys(tree.first.get(name, name) for name in names))

    def first_name(self, path: str) -> str:
        """The first name of a module."""
        return self.tree.first.get(path, path)

    def match(self, path: str, on_parameters: bool, *, reading: bool = False) -> Match:
        """The Match of the module or parameter with this first name; `reading`: of one module that reads it."""
        if not on_parameters:
            module = self.modules[path]
            names = self._names[id(module)]
            size = 0 if path in self.tree.points else self.tree.nodes[path].parameters
            return Match(path, tuple(names), class_name(module), size)
        container, _, last = path.rpartition(".")
        owner = self.modules[container]
        parameter = self.parameters.get(path)
        names = [path]
        if reading:
            names = [f"{name}.{last}".lstrip(".") for name in self._names[id(owner)]]
        elif parameter is not None:
            names = self._names[id(parameter)]
        match = Match(path, tuple(names), class_name(owner), 0)
        if parameter is None or is_lazy(parameter):
            return match
        return replace(match, parameters=parameter.numel(), shape=str(list(parameter.shape)))

    def trains(self, name: str) -> bool:
        """Whether the parameter will require a gradient when the hooks planned so far are installed."""
        parameter = self.parameters.get(name)
        return name not in self.frozen and (parameter is None or parameter.requires_grad)

    def without_gradient(self, name: str) -> str | None:
        """Why no gradient of the parameter can be hooked, or None."""
        if not self.trains(name):
            return "carries no gradient: it does not require one"
        return LAZY if name in self.parameters and is_lazy(self.parameters[name]) else None

    def plan_effects(
        self, spec: HookSpec, matches: tuple[Match, ...], parameters: Iterable[str] = ()
    ) -> None:
        """Record what a planned hook will add to its modules and freeze in them.

        parameters: the names of those of the user's own module
        """
        name = spec.action.adds(spec.name)
        names = [*parameters] if name is None else [name]
        self.added_by[spec.name] = names
        for match in matches:
            new = [name for name in names if name not in self.added[match.path]]
            if new:
                self.added[match.path] += new
                self._trees.clear()
            if spec.action.does == "freeze":
                chosen = getattr(spec.action_on(match.matched_parameters), "parameters", None)
                for last, parameter in self.modules[match.path].named_parameters():
                    if chosen is None or last in chosen:
                        self.frozen.update(self._names.get(id(parameter), ()))

    def add_points(self, hook: PlannedHook) -> None:
        """Add what the action of a planned hook adds at its modules, for the hooks that select it."""
        for path, place in hook.points.items():
            added = path.removeprefix(place)
            self.tree.points[path] = f"hook{added}"  # made before the points are among the modules
            self.modules[path] = point = Point()
            self._names[id(point)] = [name + added for name in self._names[id(self.modules[place])]]

    def hooks_adding(self, matches: Iterable[Match]) -> set[str]:
        """The names of the hooks that add those of the matches that are points."""
        points = [self.tree.points[match.path] for match in matches if match.path in self.tree.points]
        return {point.removeprefix("hook:").partition(".")[0] for point in points}

    @cached_property
    def unhookable(self) -> Mapping[int, Unhookable]:
        """id of a module -> why hooks on it would never fire; found in the whole model."""
        reasons: dict[int, Unhookable] = {}
        for path, module in self.modules.items():  # the outermost first: it is the one that is named
            reason = unhookable(module)
            if reason is None:
                continue
            if path:
                reason = reason._replace(what=f"{path}: {reason.what}")
            for inside in module.modules():
                if inside is not module or reason.itself:
                    reasons.setdefault(id(inside), reason)
        return reasons

    def inside(self) -> dict[str, Match]:
        """Path -> each module that only a compiled or scripted module calls; its shape says that it takes no hooks."""
        matches: dict[str, Match] = {}
        for path, module in self.modules.items():
            why = self.unhookable.get(id(module))
            if why is not None and path == self.first_name(path):
                match = self.match(path, on_parameters=False)
                matches[path] = replace(match, shape=f"no hooks: {why.what}")
        return matches

    def unmatched(self, problem: Problem, selector: Selector, on_parameters: bool) -> Problem:
        """The problem of a selector that matches nothing, with the selector that was meant."""
        options = selector.possible(self._all_names(on_parameters))
        found = misnamed(problem.where, problem.what, selector.text, options, problem.hint)
        return replace(found, fix=None) if selector.select(self.tree.whole) else found

    def _all_names(self, on_parameters: bool) -> Names:
        classes = tuple(set(map(class_name, self.model.modules())))
        parameters = tuple(self.parameters) if on_parameters else ()
        points = tuple(dict.fromkeys(self.tree.points.values()))
        return Names(tuple(self.modules), parameters, classes, points, self.disabled_points)

    def nearest(self, selector: Selector, on_parameters: bool) -> str:
        """A hint with what a selector that matches nothing finds beside it, or the names closest to it."""
        beside = selector.select(self.tree.whole)
        if beside:
            lack = "that have none" if on_parameters else "without a forward, around which no hook fires"
            return f"it matches modules {lack}: {listed([path or '(root)' for path in beside], 4)}"
        near = selector.nearest(self._all_names(on_parameters))
        last = str(selector).rpartition(".")[2]
        points = set(re.findall(r"\w+", last)).intersection(POINTS)
        if points and not on_parameters and any(map(lacks_points, self.modules.values())):
            added = listed(sorted(points), len(POINTS))
            near += f"; model.args.attention=points, or hookrun.points(model), adds {added} to each attention module"
        return near


def _names_in(parameters: Mapping[str, Iterable[str]]) -> list[str]:
    """The names in the model of the parameters of each module, which are given by its path."""
    return [f"{path}.{name}".lstrip(".") for path, names in parameters.items() for name in names]


def _names_by_object(objects: Mapping[str, object]) -> dict[int, list[str]]:
    """id of an object -> all of its names."""
    names: dict[int, list[str]] = {}
    for name, named in objects.items():
        names.setdefault(id(named), []).append(name)
    return names


def _parametrized_name(name: str) -> str | None:
    """``fc.parametrizations.weight.original`` -> ``fc.weight``, which is computed from it; else None."""
    owner, found, own = f".{name}".rpartition(".parametrizations.")
    tensor, _, last = own.partition(".")
    return f"{owner}.{tensor}".lstrip(".") if found and last.startswith("original") else None


def _type_names(cls: type) -> frozenset[str]:
    names = set[str]()
    for base in cls.__mro__:
        if base is not object:
            names |= {base.__name__, f"{base.__module__}.{base.__qualname__}"}
    return frozenset(names)


def _numel(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()
