"""A backend of torch.compile around the user's: it changes how a graph calls Python, before the graph is compiled.

A call to Python takes some microseconds. Therefore what forward hooks see is one more output of the graph; what cannot
wait for that (gradients, the inside of a checkpointed region, captures) leaves it by a call of its own.

If forward observers have a schedule, the graph is compiled twice, with them and without them. Which of the two runs is
decided at each call: a step in which none of them is due costs as much as without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hookrun.engine.actions.lanes import Lanes
from hookrun.engine.runtime.graph_observers import (
    GraphObservers,
    Observer,
    Schedule,
    Span,
    finished,
    fired,
    give,
    in_lanes,
    joined,
    measured,
    spans_of,
)
from hookrun.engine.spec.when import When
from hookrun.engine.values.private_names import require

Compiled = Callable[..., Any]


def observing(observers: GraphObservers, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which torch.compile compiles a model that has observers. options: the user's"""
    require("torch, compiler")
    others = dict(options)
    settings = dict(others.pop("options", None) or {})
    guard_filter = settings.pop("guard_filter_fn", lambda guards: list(map(_is_needed, guards)))
    backend = others.pop("backend", None) or "inductor"
    wrapper: Any = partial(torch._TorchCompileWrapper, backend)
    if backend == "inductor":
        wrapper = torch._TorchCompileInductorWrapper
    around = wrapper(others.pop("mode", None), settings, options.get("dynamic"))
    ours = {"backend": ObservingBackend(observers, around), "options": {"guard_filter_fn": guard_filter}}
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
        schedules: list[When] = []
        for observer in self._forward_observers(graph):
            if observer.when is not None and observer.when not in schedules:
                schedules.append(observer.when)
        if not schedules:
            return self._compiled(graph, inputs)
        never = self._compiled(self._without_scheduled(graph), inputs)
        due = self._compiled(graph, inputs)
        holds = Schedule(self._observers.clock, schedules).holds

        def compiled(*values: Any) -> Any:
            return due(*values) if holds() else never(*values)

        return compiled

    def _compiled(self, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        waiting = self._join(graph)
        (output,) = graph.graph.find_nodes(op="output")
        measuring = self._measuring(waiting)
        if measuring is None:
            _give_before(output, waiting)
            graph.recompile()
            return self._backend(graph, list(inputs))
        firings = [_number_of(node) for node in waiting]
        spans = measuring.return_numbers(output)
        graph.recompile()
        computed = self._backend(graph, list(inputs))
        receive = self._observers.receiving(firings, spans)

        def compiled(*values: Any) -> Any:
            *outputs, numbers = computed(*values)
            receive(numbers)
            return outputs

        return compiled

    def _measuring(self, waiting: Sequence[Node]) -> _Measuring | None:
        """How the numbers of firings become an output of the graph.

        None: they cannot, because only the graph knows how many there are, or there are none.
        """
        measuring = _Measuring(self._observers.key)
        for node in waiting:
            observer = self._observers.observer(_number_of(node))
            tensors = [tensor.meta["example_value"] for tensor in _tensors_of(node)]
            counts: list[int] = []
            for tensor in tensors:
                count = observer.count_of(tensor)
                if count is None:
                    return None
                counts.append(count)
            lanes = observer.lanes_of(tensors[0]) if len(tensors) == 1 else None
            measuring.add(node, counts, observer.site.spec.action, lanes)
        return measuring if any(measuring.counts.values()) else None

    def _without_scheduled(self, graph: GraphModule) -> GraphModule:
        """A copy of a graph without the firings of forward observers that have a schedule."""
        copied = GraphModule(graph, deepcopy(graph.graph))
        for name, value in vars(graph).items():  # what the compiler's stages tell each other
            vars(copied).setdefault(name, value)
        copied.meta = graph.meta
        for before, node in zip(graph.graph.nodes, list(copied.graph.nodes), strict=True):
            if node.op == "placeholder":
                node._dynamo_source = getattr(before, "_dynamo_source", None)
            observer = self._observer_of(node)
            if observer is not None and observer.is_forward and observer.when is not None:
                copied.graph.erase_node(node)
        for name, part in graph.named_children():
            if isinstance(part, GraphModule):
                setattr(copied, name, self._without_scheduled(part))
        copied.recompile()
        return copied

    def _join(self, graph: GraphModule) -> list[Node]:
        """Let the numbers of all firings that can wait leave the graph in one call, in the order of the firings.

        Returns those that can wait until its end.
        """
        waiting: list[Node] = []
        for node in list(graph.graph.nodes):
            observer = self._observer_of(node)
            if observer is not None and observer.can_wait:
                waiting.append(node)
                continue
            region = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(region, GraphModule) and self._forward_observers(region):
                (end,) = region.graph.find_nodes(op="output")
                _give_before(end, self._join(region))
                region.recompile()
            elif observer is None:
                continue
            _give_before(node, waiting)
            waiting = []
        return waiting

    def _forward_observers(self, graph: GraphModule) -> list[Observer]:
        """The forward observers that fire in a graph, or in a part that it runs, as a checkpointed region."""
        parts = [part for part in graph.modules() if isinstance(part, GraphModule)]
        firing = [self._observer_of(node) for part in parts for node in part.graph.nodes]
        return [observer for observer in firing if observer is not None and observer.is_forward]

    def _observer_of(self, node: Node) -> Observer | None:
        """The observer of this installation that fires here."""
        if node.target is not fired:
            return None
        arguments: tuple[Any, ...] = node.args
        key, number, _, _ = arguments
        return self._observers.observer(number) if key == self._observers.key else None


class _Measuring:
    """How the numbers of firings become the last output of a graph: tensors with lanes are finished together.

    counts: firing -> how many numbers there are of each of its tensors
    """

    def __init__(self, observers: int) -> None:
        self.counts: dict[Node, Sequence[int]] = {}
        self._observers = observers
        self._whole: list[Node] = []
        self._in_lanes: dict[tuple[int, tuple[int, ...]], list[tuple[Node, int]]] = {}

    def add(self, firing: Node, counts: Sequence[int], action: Any, lanes: Lanes | None) -> None:
        """Measure what a firing sees. lanes: of its only tensor"""
        self.counts[firing] = counts
        if lanes is None:
            self._whole.append(firing)
        else:
            of_hook = self._in_lanes.setdefault((id(action), lanes.shape), [])
            of_hook.append((firing, lanes.length))

    def return_numbers(self, output: Node) -> list[Span]:
        """Add the output; where the numbers of each tensor are, in the order of the firings."""
        graph = output.graph
        numbers: list[Node] = []
        ordered = list(self._whole)
        for firing in self._whole:
            with graph.inserting_before(firing):
                arguments = self._observers, _number_of(firing), _tensors_of(firing)
                numbers.append(graph.call_function(measured, arguments))
        for members in self._in_lanes.values():
            of_lanes: list[Node] = []
            for firing, _ in members:
                ordered.append(firing)
                with graph.inserting_before(firing):
                    arguments = self._observers, _number_of(firing), _tensors_of(firing)
                    of_lanes.append(graph.call_function(in_lanes, arguments))
            lengths = [length for _, length in members]
            with graph.inserting_before(output):
                first = _number_of(members[0][0])
                numbers.append(graph.call_function(finished, (self._observers, first, of_lanes, lengths)))
        with graph.inserting_before(output):
            together = graph.call_function(joined, (numbers,))
        outputs: Any = output.args[0]
        output.args = ((*outputs, together),)
        following = iter(spans_of([count for firing in ordered for count in self.counts[firing]]))
        spans = {firing: [next(following) for _ in self.counts[firing]] for firing in ordered}
        for firing in self.counts:
            graph.erase_node(firing)
        return [span for firing in self.counts for span in spans[firing]]


def _give_before(node: Node, waiting: Sequence[Node]) -> None:
    """Let firings give their numbers in one call before a node. waiting: calls of `fired`, which are taken out"""
    if not waiting:
        return
    firings: list[int] = []
    numbers: list[Node] = []
    for firing in waiting:
        key, number, token, tensors = firing.args
        with firing.graph.inserting_before(firing):
            numbers.append(firing.graph.call_function(measured, (key, number, tensors)))
        firings.append(_number_of(firing))
        firing.graph.erase_node(firing)
    with node.graph.inserting_before(node):
        node.graph.call_function(give, (token, firings, numbers))


def _number_of(firing: Node) -> int:
    number: Any = firing.args[1]
    return number


def _tensors_of(firing: Node) -> list[Node]:
    tensors: Any = firing.args[3]
    return list(tensors)


_OF_OBSERVER = re.compile(r"\.__self__\.firings(\[\d+\](\.traced(\.__func__|\.__self__.*)?)?)?$")
"""The end of the name of what is read of an observer, from the hook that torch calls. A removed hook is another one."""


def _is_needed(guard: Any) -> bool:
    """Whether a guard is compared at each call: if it is about anything but what observers read, which cannot change.

    Each comparison would cost as much as a part of a small layer. The mode of the model and tensors are not theirs.
    Only in the frame of `Installation.compile`: another one may be called for several observers.
    """
    if guard.guard_type == "TENSOR_MATCH" or guard.name.endswith(".training"):
        return True
    if guard.name.startswith("G['__import_hookrun"):
        return False
    return not (guard.name.startswith("hooked_model") and _OF_OBSERVER.search(guard.name))
