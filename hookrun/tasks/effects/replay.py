"""Forward passes that do not compute again what runs before a hook: finished modules return their stored outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hookrun.tasks.effects.scout import Call, Scouted
from hookrun.values.containers import rebuild


@dataclass
class _Stored:
    """An output of the unedited pass.

    end: when it was there, on the clock of that pass
    """

    output: Any
    grows: tuple[bool, ...]
    end: int


class Replay:
    """Stores outputs in the unedited pass over a batch, and returns them in later passes over the same batch.

    The outputs are those of `forward` itself: forward hooks run on them again. A module is called for its stored output
    only as long as the calls come in the order of the unedited pass; afterwards everything is computed.

    entries: when a pass may begin to differ, by the path of the hooked module that runs first
    """

    def __init__(self, model: nn.Module, scouted: Scouted, paths: Collection[str]) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._first = {path: scouted.first[path] for path in paths if path in scouted.first}
        self._before = {path: _outermost(scouted.calls, end) for path, end in self._first.items()}
        self._wanted = {(call.path, call.number): call for calls in self._before.values() for call in calls}
        self._stored = dict[tuple[str, int], _Stored]()
        self._reached = dict[str, int]()
        self._time = 0
        self._keeps_state: bool | None = None

    def entry(self, paths: Sequence[str]) -> str | None:
        """Which of the hooked modules runs first; None: not known."""
        there = [path for path in paths if path in self._first]
        return min(there, key=self._first.__getitem__) if len(there) == len(paths) and there else None

    def order(self, path: str | None) -> int:
        """A sort key: when the module runs."""
        return -1 if path is None else self._first[path]

    def reach(self, path: str) -> None:
        """Note that the hook at the module fires in the unedited pass."""
        self._time += 1
        self._reached.setdefault(path, self._time)

    @contextmanager
    def storing(self) -> Iterator[None]:
        """The unedited pass over a batch."""
        self._stored.clear()
        self._reached.clear()
        numbers = Counter[str]()

        def store(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            number = numbers[path]
            numbers[path] += 1
            output = forward(*args, **kwargs)
            self._time += 1
            call = self._wanted.get((path, number))
            if call is not None and call.grows is not None:
                self._stored[path, number] = _Stored(rebuild(output, _copied), call.grows, self._time)
            return output

        before = _states(self._modules) if self._keeps_state is None else None
        with _forwards(self._modules, {path: partial(store, path) for path, _ in self._wanted}):
            yield
        if before is not None:
            self._keeps_state = before != _states(self._modules)

    @contextmanager
    def from_entry(self, path: str | None, copies: int) -> Iterator[None]:
        """A pass over `copies` of the batch, one after the other, that computes only what runs after the entry."""
        if path is None or self._keeps_state or path not in self._reached:
            yield
            return
        found = [((call.path, call.number), self._modules[call.path]) for call in self._before[path]]
        ahead = [
            (module, stored)
            for key, module in found
            if (stored := self._stored.get(key)) is not None and stored.end < self._reached[path]
        ]
        ahead.reverse()

        def answer(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if ahead and ahead[-1][0] is module:
                return _repeated(ahead.pop()[1], copies)
            return forward(*args, **kwargs)

        with _forwards(self._modules, {key[0]: partial(answer, module) for key, module in found}):
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
    own = dict[str, Any]()
    try:
        for path, function in instead.items():
            attributes = vars(modules[path])
            own[path] = attributes.get("forward")
            attributes["forward"] = partial(function, modules[path].forward)
        yield
    finally:
        for path, forward in own.items():
            if forward is None:
                del vars(modules[path])["forward"]
            else:
                vars(modules[path])["forward"] = forward


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _repeated(stored: _Stored, copies: int) -> Any:
    """The output for that many copies of the batch, in memory of its own."""
    grows = iter(stored.grows)

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        times = copies if next(grows) else 1
        return leaf.repeat(times, *[1] * (leaf.dim() - 1)) if leaf.dim() else leaf.clone()

    return rebuild(stored.output, repeated)


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
