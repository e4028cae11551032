"""What one run of a copy of the model shows: in which order modules run, and which dimensions grow with the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    with torch.no_grad():
        calls, outputs, values = _run(model, args, kwargs)
        more, grown, _ = _run(model, *rebuild((args, kwargs), partial(_one_more, _rows((args, kwargs)))))
    same = [(call[:2]) for call in calls] == [call[:2] for call in more]
    found = [
        Call(*call, _grows(small, large) if same else None)
        for call, small, large in zip(calls, outputs, grown, strict=False)
    ]
    keys = hook.spec.keys.target.keys if hook.spec.keys.target is not None else ()
    before = hook.spec.hook_type is FORWARD_PRE
    first, shapes = dict[str, int](), dict[str, Sequence[int]]()
    for call, (inputs, output) in zip(found, values, strict=True):
        if call.path in hook.aliases and call.number == 0:
            first[call.path] = call.start if before else call.end
            value = containers.get(inputs if before else output, keys)
            shapes[call.path] = next((x.shape for x in tensors(value) if x.is_floating_point()), ())
    scores, rows = own_token_scores(values[-1][1]), _rows((args, kwargs))
    modules = dict(model.named_modules())
    heads = [
        call.path
        for call, output in zip(found, outputs, strict=True)
        if output is scores and isinstance(modules[call.path], nn.Linear)
    ]
    numbers = [x.numel() for output in outputs for x in tensors(output) if x is not scores]
    return Scouted(
        tuple(found),
        first,
        shapes,
        heads[0] if len(heads) == 1 and [call.path for call in found].count(heads[0]) == 1 else None,
        max(numbers, default=0) // max(rows, 1),
        0 if scores is None else scores.numel() // max(rows, 1),
    )


def _run(
    model: nn.Module, args: Any, kwargs: Any
) -> tuple[list[tuple[str, int, int, int]], list[Any], list[tuple[Any, Any]]]:
    """(path, number, start, end), output, and (arguments, output) of each call, in the order in which they end."""
    calls, outputs, values = list[tuple[str, int, int, int]](), list[Any](), list[tuple[Any, Any]]()
    time, numbers, open_calls = 0, Counter[str](), list[tuple[str, int, int]]()

    def begins(path: str, *call: Any) -> None:
        nonlocal time
        time += 1
        open_calls.append((path, numbers[path], time))
        numbers[path] += 1

    def ends(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal time
        time += 1
        calls.append((*open_calls.pop(), time))
        outputs.append(output)
        values.append((containers.arguments(args, kwargs), output))

    handles = list[Any]()
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(begins, path), prepend=True))
        handles.append(module.register_forward_hook(partial(ends, path), with_kwargs=True))
    try:
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls, outputs, values


def _rows(call: Any) -> int:
    """How many samples the arguments hold."""
    return next((x.shape[0] for x in tensors(call) if x.dim()), 0)


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
