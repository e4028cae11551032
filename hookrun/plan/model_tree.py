"""A model's names: modules and parameters once per object, each with all of its names."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hookrun.plan.plan import Match
from hookrun.spec.hook import HookSpec
from hookrun.spec.selector import Names, Node, Selector, Tree, Unmatched


class Unhookable(NamedTuple):
    """Why hooks on the submodules of a module do not fire, and what to do.

    itself: hooks on the module itself do not fire either
    """

    what: str
    hint: str
    itself: bool = True


def unhookable(module: nn.Module) -> Unhookable | None:
    """Why hooks inside `module` would never fire, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return Unhookable(
            "a scripted module runs without Python hooks", "hook the module before torch.jit.script"
        )
    compiled = "an already compiled module ignores new hooks"
    first = "install the hooks first, then compile"
    if module._compiled_call_impl is not None and not hasattr(module._compiled_call_impl, "hooks_fire"):
        return Unhookable(compiled, first)
    # takes half a second to import, and is imported if anything is compiled
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return Unhookable(compiled, first, itself=False)
    if isinstance(module, nn.DataParallel):
        hint = "use DistributedDataParallel, or hook the inner module"
        return Unhookable("DataParallel's threads race on hooks", hint)
    return None


class ModelNames:
    """The names that selectors are matched against, and what the hooks planned so far will add and freeze."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._aliases = defaultdict[int, list[str]](list)
        for path, module in self.modules.items():
            self._aliases[id(module)].append(path)
        self.added = defaultdict[str, list[str]](
            list
        )  # first module path -> names of parameters that hooks will add
        self.frozen = set[str]()
        self._parameter_tree: Tree | None = None  # reset when a planned hook adds parameters

    @cached_property
    def tree(self) -> Tree:
        """The modules, with all of their names."""
        sizes = {id(module): sum(map(_numel, module.parameters())) for module in self.model.modules()}
        types = {type(module): _type_names(type(module)) for module in self.model.modules()}
        nodes = {
            path: Node(path, types[type(module)], not module._modules, sizes[id(module)])
            for path, module in self.modules.items()
        }
        numbered = {
            path: [name for name in module._modules.keys() if name.isdecimal()]  # noqa: SIM118 (a scripted one)
            for path, module in self.modules.items()
        }
        first = {path: self.first_name(path) for path in self.modules}
        return Tree(nodes, {path: names for path, names in numbered.items() if names}, _others(first))

    @cached_property
    def _parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self.model.named_parameters(remove_duplicate=False))

    @cached_property
    def _parameter_aliases(self) -> Mapping[int, list[str]]:
        aliases = defaultdict[int, list[str]](list)
        for name, parameter in self._parameters.items():
            aliases[id(parameter)].append(name)
        return aliases

    def parameter_tree(self) -> Tree:
        """The parameters, with all of their names, including those that planned hooks will add."""
        if self._parameter_tree is None:
            self._parameter_tree = self._build_parameter_tree()
        return self._parameter_tree

    def _build_parameter_tree(self) -> Tree:
        names = dict.fromkeys(self._parameters) | dict.fromkeys(self._added_names())
        nodes = {}
        numbered = defaultdict[str, list[str]](
            list, {path: [*own] for path, own in self.tree.numbered.items()}
        )
        for name in names:
            container, _, last = name.rpartition(".")
            owner = self.tree.nodes[container]
            size = _numel(self._parameters[name]) if name in self._parameters else 0
            nodes[name] = Node(name, owner.types, owner.leaf, size)
            if last.isdecimal():
                numbered[container].append(last)
        first = {name: self._first_parameter_name(name) for name in names}
        return Tree(nodes, numbered, _others(first))

    def _added_names(self) -> list[str]:
        return [f"{path}.{name}" if path else name for path, names in self.added.items() for name in names]

    def select(self, spec: HookSpec) -> list[str]:
        """The modules or parameters that the hook's selector matches: first names, once per object, in order."""
        selector = spec.keys.select
        if not spec.on_parameters:
            return list(dict.fromkeys(map(self.first_name, selector.select(self.tree))))
        return self.select_parameters(selector)

    def select_parameters(self, selector: Selector) -> list[str]:
        """The parameters that a selector matches: first names, once per object, in order."""
        parameters = self.parameter_tree()
        found = selector.select_parameters(self.tree, parameters)
        return self._once(name for name in parameters.nodes if name in found)

    def parameters(self) -> list[str]:
        """Every parameter: first names, once per object, in order."""
        return self._once(self.parameter_tree().nodes)

    def _once(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(map(self._first_parameter_name, names)))

    def unmatched(self, spec: HookSpec) -> list[Unmatched]:
        """The members of the selector's lists that match no module, or no parameter of a parameter hook."""
        parameters = self.parameter_tree() if spec.on_parameters else None
        return list(spec.keys.select.unmatched(self.tree, parameters))

    def _first_parameter_name(self, name: str) -> str:
        parameter = self._parameters.get(name)
        return name if parameter is None else self._parameter_aliases[id(parameter)][0]

    def first_name(self, path: str) -> str:
        """The first name of a module."""
        return self._aliases[id(self.modules[path])][0]

    def match(self, path: str, on_parameters: bool) -> Match:
        """The Match of the module or parameter with this first name."""
        if not on_parameters:
            module = self.modules[path]
            names = tuple(self._aliases[id(module)])
            return Match(path, names, type(module).__name__, self.tree.nodes[path].parameters)
        owner = type(self.modules[path.rpartition(".")[0]]).__name__
        parameter = self._parameters.get(path)
        if parameter is None:
            return Match(path, (path,), owner, 0)
        shape = None if is_lazy(parameter) else str(list(parameter.shape))
        return Match(path, tuple(self._parameter_aliases[id(parameter)]), owner, _numel(parameter), shape)

    def trains(self, name: str) -> bool:
        """Whether the parameter will require a gradient when the hooks planned so far are installed."""
        parameter = self._parameters.get(name)
        return name not in self.frozen and (parameter is None or parameter.requires_grad)

    def lazy(self, name: str) -> bool:
        """Whether the parameter gets its shape at the first call of its module."""
        parameter = self._parameters.get(name)
        return parameter is not None and is_lazy(parameter)

    def parameter_names(self, path: str) -> list[str]:
        """Names of the module's own parameters, including those that planned hooks will add."""
        own = [name for name, parameter in self.modules[path]._parameters.items() if parameter is not None]
        return own + self.added.get(path, [])

    def plan_effects(self, spec: HookSpec, matches: tuple[Match, ...]) -> None:
        """Record what a planned hook will add to its modules and freeze in them."""
        name = spec.action.adds(spec.name)
        for match in matches:
            if name is not None and name not in self.added[match.path]:
                self.added[match.path].append(name)
                self._parameter_tree = None
            if spec.action.freezes:
                frozen = {id(parameter) for parameter in self.modules[match.path].parameters()}
                self.frozen |= {
                    name for name, parameter in self._parameters.items() if id(parameter) in frozen
                }

    @cached_property
    def unhookable(self) -> Mapping[int, Unhookable]:
        """id of a module -> why hooks on it would never fire; found in the whole model."""
        found = dict[int, Unhookable]()
        for path, module in self.modules.items():
            if (reason := unhookable(module)) is not None:
                named = reason._replace(what=f"{path}: {reason.what}") if path else reason
                inner = iter(module.modules())
                if not reason.itself:
                    next(inner)
                found = {id(each): named for each in inner} | found  # name the outermost module
        return found

    def nearest(self, selector: Selector, on_parameters: bool) -> str:
        """A hint with the names closest to a selector that matches nothing."""
        classes = {type(module).__name__ for module in self.model.modules()}
        parameters = tuple(self._parameters) if on_parameters else ()
        return selector.nearest(Names(tuple(self.modules), parameters, tuple(classes)))


def _others(first: Mapping[str, str]) -> Mapping[str, str]:
    return {name: main for name, main in first.items() if name != main}


def _type_names(cls: type) -> frozenset[str]:
    bases = [base for base in cls.__mro__ if base is not object]
    return frozenset(
        [base.__name__ for base in bases] + [f"{base.__module__}.{base.__qualname__}" for base in bases]
    )


def _numel(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()
