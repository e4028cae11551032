"""The parameters that hooks are on: another one in the place of one of them is noticed, and a shard is followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from hookrun.errors import HookError
from hookrun.runtime.sharded import is_sharded

Moves = Mapping[int, nn.Parameter]
"""The identity of a parameter -> the shards that stand in its place now."""


class HookedParameters:
    """By path. Whoever holds parameters of its own asks to be told of moves.

    Follows every optimizer: hooks on a parameter that has left the model would be lost without a word.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = dict[str, tuple[nn.Module, str, nn.Parameter]]()
        self._listeners = list[Callable[[Moves], None]]()

    def add(self, path: str, module: nn.Module, parameter: nn.Parameter) -> None:
        """A hook is on the parameter, which the module owns."""
        self._places[path] = (module, path.rpartition(".")[2], parameter)

    def on_move(self, listener: Callable[[Moves], None]) -> None:
        """Call it when parameters have been divided over the ranks since."""
        self._listeners.append(listener)

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def all_there(self) -> bool:
        """Whether every hooked parameter is in its place."""
        return all(owner._parameters.get(name) is one for owner, name, one in self._places.values())

    def follow(self) -> None:
        """Hooks go over to the shards that fully_shard has put in the place of parameters; between two steps.

        Raises HookError where something else is there.
        """
        if self.all_there:
            return
        moves = dict[int, nn.Parameter]()
        for path, (owner, name, parameter) in self._places.items():
            now = owner._parameters.get(name)
            if now is parameter:
                continue
            if now is None or not is_sharded(now) or is_sharded(parameter):
                self._require(path, parameter)
                continue
            moves[id(parameter)] = now
            self._places[path] = (owner, name, now)
        if moves:
            for listener in self._listeners:
                listener(moves)

    def _require(self, path: str, parameter: nn.Parameter) -> None:
        if all(each is not parameter for each in self._model.parameters()):  # else it has another name now
            raise replaced(path)

    def require_all(self) -> None:
        """HookError where one is not in the model any more."""
        if not self.all_there:
            for path, (owner, name, parameter) in self._places.items():
                if owner._parameters.get(name) is not parameter:
                    self._require(path, parameter)

    def before(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        self.follow()

    def after(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""

    def clear(self) -> None:
        """Watch nothing from now on."""
        self._places.clear()
        self._listeners.clear()


def moved(parameters: Iterable[nn.Parameter], moves: Moves) -> tuple[nn.Parameter, ...]:
    """The parameters, each as what stands in its place now."""
    return tuple(moves.get(id(each), each) for each in parameters)


def replaced(path: str) -> HookError:
    """Why hooks on the parameter would do nothing."""
    return HookError(
        f"the parameter {path} was replaced after hooks were installed on it, as to_empty and quantisation do: its "
        "hooks would be lost; install them afterwards"
    )
