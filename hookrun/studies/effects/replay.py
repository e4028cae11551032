"""Forward passes that do not compute again what runs before a hook: finished modules return their stored outputs.

Which dimensions grow with the batch is seen in a run of a copy of the model.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.engine.hook_types import FORWARD_PRE
from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.prove.batch import noting_calls, one_more_sample
from hookrun.engine.values import containers
from hookrun.engine.values.containers import members, rebuild, tensors
from hookrun.studies.kit.passes import own_token_scores


@dataclass(frozen=True)
class Scouted:
    """What was seen in a forward pass.

    grows:   path and number of a call -> for each tensor of its output whether the first dimension grows with the
             batch; None: another one does, or the output holds objects that are not tensors, so it cannot be stored
    calls:   path of a module -> how often it was called
    shapes:  path of a hooked module -> the shape of the first tensor of floating-point numbers in the hook's value
    head:    the linear layer whose output is the model's scores for tokens; None: there is none
    largest: the largest number of elements of an output for one sample, the scores left out
    scores:  the number of scores for one sample
    """

    grows: Mapping[tuple[str, int], Sequence[bool] | None] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    head: str | None = None
    largest: int = 0
    scores: int = 0


_PLAIN = (type(None), bool, int, float, str)


def scout(hook: PlannedHook, model: nn.Module, args: Any, kwargs: Any) -> Scouted:
    """What is seen in a run of the model with an example, and in one with one more sample."""
    two = one_more_sample((args, kwargs))
    modules = dict(model.named_modules())
    with torch.no_grad():
        with noting_calls(modules) as calls:
            model(*args, **kwargs)
        rows = 1
        if two is not None:
            args, kwargs = two.larger
            rows = two.sizes[0]
        with noting_calls(modules) as more:
            model(*args, **kwargs)
    grows: dict[tuple[str, int], Sequence[bool] | None] = {}
    if list(calls) == list(more):
        for call, (_, output) in calls.items():
            grows[call] = _grows(output, more[call][1])
    outputs = {call: output for call, (_, output) in calls.items()}
    scores = own_token_scores(outputs["", 0])
    return Scouted(
        grows,
        Counter(path for path, _ in calls),
        _shapes(hook, calls),
        _head(model, outputs, scores),
        _largest(outputs.values(), scores) // rows,
        0 if scores is None else scores.numel() // rows,
    )


def _shapes(hook: PlannedHook, calls: Mapping[tuple[str, int], Any]) -> dict[str, Sequence[int]]:
    """Path of a hooked module -> the shape of what the hook sees there first."""
    keys = hook.spec.keys.target.keys if hook.spec.keys.target is not None else ()
    shapes: dict[str, Sequence[int]] = {}
    for (path, number), (inputs, output) in calls.items():
        if path in hook.aliases and number == 0:
            value = containers.get(inputs if hook.spec.hook_type is FORWARD_PRE else output, keys)
            floats = [tensor for tensor in tensors(value) if tensor.is_floating_point()]
            shapes[path] = floats[0].shape if floats else ()
    return shapes


def _head(model: nn.Module, outputs: Mapping[tuple[str, int], Any], scores: Tensor | None) -> str | None:
    """The linear layer, called once, whose output is the model's scores for tokens; None: there is none."""
    linear: list[str] = []
    for (path, _), output in outputs.items():
        if output is scores and isinstance(nn.Module.get_submodule(model, path), nn.Linear):
            linear.append(path)
    return linear[0] if len(linear) == 1 and (linear[0], 1) not in outputs else None


def _largest(outputs: Iterable[Any], scores: Tensor | None) -> int:
    """The largest number of elements of a tensor, the scores left out."""
    largest = 0
    for output in outputs:
        for tensor in tensors(output):
            if tensor is not scores:
                largest = max(largest, tensor.numel())
    return largest


def _grows(small: Any, large: Any) -> tuple[bool, ...] | None:
    """For each tensor whether its first dimension alone grows with the batch; None where anything else does."""
    before = members(small)
    after = members(large)
    if len(before) != len(after):  # such as a list of one tensor for each sample
        return None
    grows: list[bool] = []
    for a, b in zip(before, after, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            grown = (a.shape[0] * 3 / 2, *a.shape[1:]) if a.dim() else ()  # from two samples to three
            if b.shape not in (a.shape, grown):
                return None
            grows.append(a.shape != b.shape)
        elif not isinstance(a, _PLAIN) or type(a) is not type(b) or a != b:
            return None
    return tuple(grows)


# ---- passes that skip what runs before a hook ----------------------------------------------------------------------


class Replay:
    """Stores outputs in one pass over a batch, and returns them in later passes over the same batch.

    The outputs are those of `forward` itself: forward hooks run on them again. A module is called for its stored output
    only as long as the calls come in the order of the stored pass; afterwards everything is computed.

    paths:  number of a trial -> the hooked modules at which it differs from the stored pass
    needed: the hooked modules that all must have run in the stored pass; else no trial starts from it
    """

    def __init__(
        self,
        model: nn.Module,
        scouted: Scouted,
        paths: Mapping[int, Set[str]],
        needed: Iterable[str] = (),
    ) -> None:
        self._modules = dict(model.named_modules())
        self._scouted = scouted
        self._paths = paths
        self._needed = frozenset(needed)
        self._hooked = set[str]().union(*paths.values())
        # path, output and growing tensors of the calls that have ended, without those inside another of them
        self._ended = list[tuple[str, Any, Sequence[bool]]]()
        # hooked module -> the calls that had ended when the hook fired there first
        self._before = dict[str, list[tuple[str, Any, Sequence[bool]]]]()
        self._keeps_state: bool | None = None

    def note_fired(self, path: str) -> None:
        """Note that the hook at the module fires in the pass that is stored."""
        self._before.setdefault(path, list(self._ended))

    @contextmanager
    def storing(self) -> Iterator[None]:
        """The pass over a batch that is stored."""
        self._ended.clear()
        self._before.clear()
        numbers = Counter[str]()

        def store(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            inside = len(self._ended)
            output = forward(*args, **kwargs)
            grows = self._scouted.grows.get((path, numbers[path]))
            numbers[path] += 1
            if grows is not None and not self._before.keys() >= self._hooked:
                self._ended[inside:] = [(path, rebuild(output, partial(repeated, 1)), grows)]
            return output

        before = None
        if self._keeps_state is None:
            before = list(_states(self._modules))
        with _forwards(self._modules, {path: partial(store, path) for path, _ in self._scouted.grows}):
            yield
        if before is not None:
            self._keeps_state = before != list(_states(self._modules))

    def groups(self) -> dict[str | None, list[int]]:
        """The module at which they first differ from the stored pass -> its trials, in the order of the pass.

        None: modules of these trials did not run, there or in the run of the copy, which data-dependent branches end.
        """
        calls = self._scouted.calls  # a point is reached by the call of its module: layer4:sae.features
        order = {path: place for place, path in enumerate(self._before) if path.partition(":")[0] in calls}
        groups: dict[str | None, list[int]] = {path: [] for path in (None, *order)}
        for number, hooked in self._paths.items():
            first = None
            if hooked and order.keys() >= self._needed | hooked:
                first = min(hooked, key=order.__getitem__)
            groups[first].append(number)
        return groups

    @contextmanager
    def from_entry(self, path: str | None, copies: int) -> Iterator[None]:
        """A pass over `copies` of the batch, one after the other, that computes only what runs after the entry."""
        ahead = deque[tuple[str, Any, Sequence[bool]]]()
        if path is not None and not self._keeps_state:
            ahead.extend(self._before[path])

        def answer(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not ahead or ahead[0][0] != name:
                return forward(*args, **kwargs)
            _, output, grows = ahead.popleft()
            of_tensors = iter(grows)

            def repeat(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                return repeated(copies if next(of_tensors) else 1, leaf)

            return rebuild(output, repeat)

        with _forwards(self._modules, {name: partial(answer, name) for name, *_ in ahead}):
            yield


@contextmanager
def _forwards(modules: Mapping[str, nn.Module], instead: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the block the function runs in place of the module's forward, which is its first argument."""
    before = {path: vars(modules[path]).get("forward") for path in instead}
    try:
        for path, function in instead.items():
            vars(modules[path])["forward"] = partial(function, modules[path].forward)
        yield
    finally:
        for path, forward in before.items():
            vars(modules[path]).pop("forward", None)
            if forward is not None:
                vars(modules[path])["forward"] = forward


def repeated(times: int, leaf: Any) -> Any:
    """A tensor so many times along its first dimension, in memory of its own."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.dim():
        return leaf.clone()
    return leaf.repeat(times, *[1] * (leaf.dim() - 1))


_OF_TORCH = {"_parameters", "_buffers", "_modules", "forward"}


def _states(modules: Mapping[str, nn.Module]) -> Iterator[Any]:
    """What changes if a forward pass writes into its modules: another pass must not leave that out."""
    for module in modules.values():
        yield [(id(buffer), buffer._version) for buffer in module._buffers.values() if buffer is not None]
        for name, value in vars(module).items():
            if name in _OF_TORCH or name.endswith("_hooks"):
                continue
            inside: list[int] = []
            if isinstance(value, dict):
                inside += map(id, value.values())
            elif isinstance(value, list | set | tuple):
                inside += map(id, value)
            yield name, id(value), inside
