"""Forward passes that do not compute again what runs before a hook: finished modules return their stored outputs.

What runs before it, and which dimensions grow with the batch, is seen in a run of a copy of the model.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.hook_types import FORWARD_PRE
from hookrun.plan.plan import PlannedHook
from hookrun.prove.trial import Example, on_a_copy
from hookrun.tasks.metrics.rows import own_token_scores
from hookrun.values import containers
from hookrun.values.containers import members, rebuild, tensors


@dataclass(frozen=True)
class Call:
    """One call of a module in a forward pass.

    path:       the module
    number:     which of its calls, from 0
    start, end: when it began and ended, on a clock that counts both
    grows:      for each tensor of its output whether the first dimension grows with the batch; None: another dimension
                does, or the output holds objects that are not tensors, so that it cannot be stored
    """

    path: str
    number: int
    start: int
    end: int
    grows: tuple[bool, ...] | None


@dataclass(frozen=True)
class Scouted:
    """What was seen in a forward pass.

    calls:   every call, in the order in which they ended
    first:   path of a hooked module -> when the hook's value was there for the first time
    shapes:  path of a hooked module -> the shape of the first tensor of floating-point numbers in that value
    head:    the linear layer whose output is the model's scores for tokens; None: there is none
    largest: the largest number of elements of an output for one sample, the scores left out
    scores:  the number of scores for one sample
    """

    calls: tuple[Call, ...] = ()
    first: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    head: str | None = None
    largest: int = 0
    scores: int = 0


def scouted(model: nn.Module, example: Example, hook: PlannedHook) -> Scouted | str:
    """Run a copy of the model with the example, then with one more sample; or why the model cannot run there."""
    return on_a_copy(model, example, partial(_seen, hook), training=False)


_PLAIN = (Tensor, type(None), bool, int, float, str)


def _seen(hook: PlannedHook, model: nn.Module, args: Any, kwargs: Any) -> Scouted:
    rows = next((x.shape[0] for x in tensors((args, kwargs)) if x.dim()), 0)
    with torch.no_grad():
        small = _run(model, args, kwargs)
        large = _run(model, *rebuild((args, kwargs), partial(_one_more, rows)))
    grows: list[tuple[bool, ...] | None] = [None] * len(small)
    if [place[:2] for place, _, _ in small] == [place[:2] for place, _, _ in large]:
        grows = [_grows(output, more) for (_, _, output), (_, _, more) in zip(small, large, strict=True)]
    calls = [Call(*place, each) for (place, _, _), each in zip(small, grows, strict=True)]
    keys = hook.spec.keys.target.keys if hook.spec.keys.target is not None else ()
    before = hook.spec.hook_type is FORWARD_PRE
    first, shapes = dict[str, int](), dict[str, Sequence[int]]()
    for call, (_, inputs, output) in zip(calls, small, strict=True):
        if call.path in hook.aliases and call.number == 0:
            first[call.path] = call.start if before else call.end
            value = containers.get(inputs if before else output, keys)
            shapes[call.path] = next((x.shape for x in tensors(value) if x.is_floating_point()), ())
    scores = own_token_scores(small[-1][-1])
    makers = [path for (path, *_), _, output in small if output is scores]
    linear = [path for path in makers if isinstance(model.get_submodule(path), nn.Linear)]
    is_called_once = len(linear) == 1 and sum(call.path == linear[0] for call in calls) == 1
    numbers = [x.numel() for _, _, output in small for x in tensors(output) if x is not scores]
    return Scouted(
        tuple(calls),
        first,
        shapes,
        linear[0] if is_called_once else None,
        max(numbers, default=0) // max(rows, 1),
        0 if scores is None else scores.numel() // max(rows, 1),
    )


def _run(model: nn.Module, args: Any, kwargs: Any) -> list[tuple[tuple[str, int, int, int], Any, Any]]:
    """((path, number, start, end), arguments, output) of each call, in the order in which they end."""
    calls, open_calls = list[tuple[tuple[str, int, int, int], Any, Any]](), list[tuple[str, int, int]]()
    time, numbers, handles = count(1), Counter[str](), list[Any]()

    def begins(path: str, *call: Any) -> None:
        open_calls.append((path, numbers[path], next(time)))
        numbers[path] += 1

    def ends(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(((*open_calls.pop(), next(time)), containers.arguments(args, kwargs), output))

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(begins, path), prepend=True))
        handles.append(module.register_forward_hook(ends, with_kwargs=True))
    try:
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _one_more(rows: int, leaf: Any) -> Any:
    grows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
    return torch.cat([leaf, leaf[:1]]) if grows else leaf


def _grows(small: Any, large: Any) -> tuple[bool, ...] | None:
    """For each tensor whether its first dimension alone grows with the batch; None where that is not so."""
    pairs = list(zip(members(small), members(large), strict=False))
    if not all(isinstance(leaf, _PLAIN) for pair in pairs for leaf in pair):
        return None
    grows = list[bool]()
    for a, b in pairs:
        if not isinstance(a, Tensor):
            continue
        if a.shape[1:] != b.shape[1:] or (a.shape != b.shape and a.shape[0] * 3 != b.shape[0] * 2):
            return None
        grows.append(a.shape != b.shape)
    return tuple(grows)


# ---- passes that skip what runs before a hook ----------------------------------------------------------------------


class Replay:
    """Stores outputs in the unedited pass over a batch, and returns them in later passes over the same batch.

    The outputs are those of `forward` itself: forward hooks run on them again. A module is called for its stored output
    only as long as the calls come in the order of the unedited pass; afterwards everything is computed.

    paths:  number of a job -> the modules that it hooks
    groups: the hooked module that runs first, and the jobs of which it is that, in the order of the modules; None: it
            is not known
    """

    def __init__(self, model: nn.Module, scouted: Scouted, paths: Mapping[int, Sequence[str]]) -> None:
        self._modules, first = dict(model.named_modules()), scouted.first
        groups: dict[str | None, list[int]] = {None: []}
        for number, hooked in paths.items():
            is_known = hooked and all(path in first for path in hooked)
            groups.setdefault(min(hooked, key=first.__getitem__) if is_known else None, []).append(number)
        self.groups = sorted(groups.items(), key=lambda group: -1 if group[0] is None else first[group[0]])
        self._before = {path: _outermost(scouted.calls, first[path]) for path in groups if path is not None}
        self._wanted = {(call.path, call.number): call for calls in self._before.values() for call in calls}
        self._stored = dict[tuple[str, int], tuple[Any, tuple[bool, ...]]]()
        # what was stored when the hook at a module fired first
        self._there = dict[str, set[tuple[str, int]]]()
        self._keeps_state: bool | None = None

    def reach(self, path: str) -> None:
        """Note that the hook at the module fires in the unedited pass."""
        self._there.setdefault(path, set(self._stored))

    @contextmanager
    def storing(self) -> Iterator[None]:
        """The unedited pass over a batch."""
        self._stored.clear()
        self._there.clear()
        numbers = Counter[str]()

        def store(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            call = self._wanted.get((path, numbers[path]))
            numbers[path] += 1
            output = forward(*args, **kwargs)
            if call is not None and call.grows is not None:
                self._stored[path, call.number] = rebuild(output, partial(repeated, 1)), call.grows
            return output

        before = _states(self._modules) if self._keeps_state is None else None
        with _forwards(self._modules, {path: partial(store, path) for path, _ in self._wanted}):
            yield
        if before is not None:
            self._keeps_state = before != _states(self._modules)

    @contextmanager
    def from_entry(self, path: str | None, copies: int) -> Iterator[None]:
        """A pass over `copies` of the batch, one after the other, that computes only what runs after the entry."""
        if path is None or self._keeps_state or path not in self._there:
            yield
            return
        calls = [(call.path, call.number) for call in self._before[path]]
        ahead = deque(call for call in calls if call in self._there[path])

        def answer(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not ahead or ahead[0][0] != name:
                return forward(*args, **kwargs)
            output, grows = self._stored[ahead.popleft()]
            times = (copies if each else 1 for each in grows)
            return rebuild(output, lambda x: repeated(next(times), x) if isinstance(x, Tensor) else x)

        with _forwards(self._modules, {name: partial(answer, name) for name, _ in ahead}):
            yield


def _outermost(calls: Sequence[Call], end: int) -> list[Call]:
    """The storable calls that have ended by then, in their order, without those inside another of them."""
    found = [call for call in calls if call.end <= end and call.grows is not None]
    found.sort(key=lambda call: call.start)
    outermost = list[Call]()
    for call in found:
        if not outermost or call.start > outermost[-1].end:
            outermost.append(call)
    return outermost


@contextmanager
def _forwards(modules: Mapping[str, nn.Module], instead: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the block the function runs in place of the module's forward, which is its first argument."""
    own = {path: vars(modules[path]).get("forward") for path in instead}
    try:
        for path, function in instead.items():
            vars(modules[path])["forward"] = partial(function, modules[path].forward)
        yield
    finally:
        for path, forward in own.items():
            vars(modules[path]).pop("forward", None)
            if forward is not None:
                vars(modules[path])["forward"] = forward


def repeated(times: int, leaf: Any) -> Any:
    """A tensor so many times along its first dimension, in memory of its own."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.repeat(times, *[1] * (leaf.dim() - 1)) if leaf.dim() else leaf.clone()


_OF_TORCH = {"_parameters", "_buffers", "_modules", "forward"}


def _states(modules: Mapping[str, nn.Module]) -> list[Any]:
    """What changes if a forward pass writes into its modules: another pass must not leave that out."""
    states = list[Any]()
    for module in modules.values():
        states += [(id(buffer), buffer._version) for buffer in module._buffers.values() if buffer is not None]
        for name, value in vars(module).items():
            if name in _OF_TORCH or name.endswith("_hooks"):
                continue
            inside = value.values() if isinstance(value, dict) else value
            held = [id(each) for each in inside] if isinstance(value, dict | list | set | tuple) else []
            states.append((name, id(value), held))
    return states
