"""A backend of torch.compile around the user's: it changes how a graph calls Python, before the graph is compiled.

A call to Python takes some microseconds. Therefore what forward hooks see leaves the graph in one call at its end; what
cannot wait for that (gradients, the inside of a checkpointed region, captures) leaves it by a call of its own.

If forward observers have a schedule, the graph is compiled twice, with them and without them. Which of the two runs is
decided at each call: a step in which none of them is due costs as much as without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hookrun.engine.runtime.graph_observers import GraphObservers, Observer, Schedule, fired, give, measured
from hookrun.engine.values.private_names import require

Compiled = Callable[..., Any]


def observing(observers: GraphObservers, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which torch.compile compiles a model that has observers. options: the user's"""
    require("torch, compiler")
    backend = options.get("backend") or "inductor"
    dynamic = options.get("dynamic")
    mode = options.get("mode")
    settings = dict(options.get("options") or {})
    guard_filter = settings.pop("guard_filter_fn", _needed)
    around: Any
    if backend == "inductor":
        around = torch._TorchCompileInductorWrapper(mode, settings, dynamic)
    else:
        around = torch._TorchCompileWrapper(backend, mode, settings, dynamic)
    ours = {"backend": ObservingBackend(observers, around), "options": {"guard_filter_fn": guard_filter}}
    others = {key: value for key, value in options.items() if key != "mode"}
    return others | ours


class ObservingBackend:
    """The backend for the graphs of one installation. backend: compiles them"""

    def __init__(
        self, observers: GraphObservers, backend: Callable[[GraphModule, list[Any]], Compiled]
    ) -> None:
        self._observers = observers
        self._backend = backend

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Compiled:
        """Compile a graph of the compiler's first stage."""
        schedules = [
            observer.when for observer in self._forward_observers(graph) if observer.when is not None
        ]
        if not schedules:
            return self._compiled(graph, inputs)
        never = self._compiled(self._without_scheduled(graph), inputs)
        due = self._compiled(graph, inputs)
        different = [when for place, when in enumerate(schedules) if when not in schedules[:place]]
        holds = Schedule(self._observers.clock, different).holds

        def compiled(*values: Any) -> Any:
            return due(*values) if holds() else never(*values)

        return compiled

    def _compiled(self, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        self._join(graph)
        return self._backend(graph, list(inputs))

    def _without_scheduled(self, graph: GraphModule) -> GraphModule:
        """A copy of a graph without the firings of forward observers that have a schedule."""
        copied = GraphModule(graph, deepcopy(graph.graph))
        copied.meta.update(graph.meta)
        for name, value in vars(graph).items():  # what the compiler's stages tell each other
            vars(copied).setdefault(name, value)
        for before, node in zip(graph.graph.nodes, list(copied.graph.nodes), strict=True):
            if hasattr(before, "_dynamo_source"):
                node._dynamo_source = before._dynamo_source
            observer = self._observer_of(node)
            if observer is not None and observer.is_forward and observer.when is not None:
                copied.graph.erase_node(node)
            body = _body_of(graph, node)
            if body is not None:
                setattr(copied, node.target, self._without_scheduled(body))
        copied.recompile()
        return copied

    def _join(self, graph: GraphModule) -> None:
        """Let the numbers of all firings that can wait leave the graph in one call, in the order of the firings."""
        waiting: list[Node] = []
        for node in list(graph.graph.nodes):
            observer = self._observer_of(node)
            if observer is not None and observer.can_wait:
                waiting.append(node)
                continue
            region = _body_of(graph, node)
            if region is not None and self._forward_observers(region):
                self._join(region)
            elif observer is None and node.op != "output":
                continue
            _give_before(node, waiting)
            waiting = []
        graph.recompile()

    def _forward_observers(self, graph: GraphModule) -> list[Observer]:
        """The forward observers that fire in a graph."""
        found: list[Observer] = []
        for node in graph.graph.nodes:
            observer = self._observer_of(node)
            if observer is not None and observer.is_forward:
                found.append(observer)
            body = _body_of(graph, node)
            if body is not None:
                found.extend(self._forward_observers(body))
        return found

    def _observer_of(self, node: Node) -> Observer | None:
        """The observer of this installation that fires here."""
        if node.target is not fired:
            return None
        key, number, _, _ = node.args
        return self._observers.observer(number) if key == self._observers.key else None


def _body_of(graph: GraphModule, node: Node) -> GraphModule | None:
    """The graph that a node names, which a later one runs: a checkpointed region, or a hook on a tensor."""
    body = getattr(graph, node.target, None) if node.op == "get_attr" else None
    return body if isinstance(body, GraphModule) else None


def _give_before(node: Node, waiting: Sequence[Node]) -> None:
    """Let firings give their numbers in one call before a node. waiting: calls of `fired`, which are taken out"""
    graph = node.graph
    numbers: list[Node] = []
    firings: list[int] = []
    for firing in waiting:
        key, number, token, tensors = firing.args
        with graph.inserting_before(firing):
            numbers.append(graph.call_function(measured, (key, number, tensors)))
        firings.append(number)
        graph.erase_node(firing)
    if waiting:
        with graph.inserting_before(node):
            graph.call_function(give, (token, firings, numbers))


_OF_OBSERVER = re.compile(r"\.__self__\.firings(\[\d+\](\.traced(\.__func__|\.__self__.*)?)?)?$")
"""The end of the name of what is read of an observer, from the hook that torch calls. A removed hook is another one."""


def _needed(guards: Sequence[Any]) -> list[bool]:
    """Which guards are compared at each call: not those about what observers read, which cannot change.

    Each comparison would cost as much as a part of a small layer.
    """
    return [_is_needed(guard) for guard in guards]


def _is_needed(guard: Any) -> bool:
    """Whether a guard is about anything but what observers read; the mode of the model and tensors are not theirs.

    Only in the frame of `Installation.compile`: another one may be called for several observers.
    """
    if guard.guard_type == "TENSOR_MATCH" or guard.name.endswith(".training"):
        return True
    if guard.name.startswith("G['__import_hookrun"):
        return False
    return not (guard.name.startswith("hooked_model") and _OF_OBSERVER.search(guard.name))
