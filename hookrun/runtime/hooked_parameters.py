"""The hooked parameters: hooks move to shards that replace them; any other replacement is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from hookrun.errors import HookError
from hookrun.runtime.sharded import is_sharded

Moves = Mapping[int, nn.Parameter]
"""id(parameter) -> the sharded parameter that has replaced it."""


class HookedParameters:
    """The hooked parameters by path. Objects that refer to parameters register a listener for moves.

    It checks the parameters before each optimizer step, since hooks on a replaced parameter would be lost silently.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = dict[str, tuple[nn.Module, str, nn.Parameter]]()
        self._listeners = list[Callable[[Moves], None]]()

    def add(self, path: str, module: nn.Module, parameter: nn.Parameter) -> None:
        """Note that a parameter of this module is hooked."""
        self._places[path] = (module, path.rpartition(".")[2], parameter)

    def on_move(self, listener: Callable[[Moves], None]) -> None:
        """Call the listener when fully_shard has replaced parameters by shards."""
        self._listeners.append(listener)

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def all_there(self) -> bool:
        """Whether every hooked parameter is still the module's parameter of that name."""
        return all(owner._parameters.get(name) is one for owner, name, one in self._places.values())

    def follow(self) -> None:
        """Move hooks to the shards by which fully_shard has replaced parameters. To be called between two steps.

        Raises HookError if a parameter was replaced by anything else.
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
        if all(each is not parameter for each in self._model.parameters()):  # a renamed one is still there
            raise replaced(path)

    def require_all(self) -> None:
        """Raise HookError if a hooked parameter is no longer in the model."""
        if not self.all_there:
            for path, (owner, name, parameter) in self._places.items():
                if owner._parameters.get(name) is not parameter:
                    self._require(path, parameter)

    def before(self, optimizer: Optimizer) -> None:
        """Check the parameters before an optimizer's step."""
        self.follow()

    def after(self, optimizer: Optimizer) -> None:
        """Nothing to do after an optimizer's step."""

    def clear(self) -> None:
        """Forget all parameters and listeners."""
        self._places.clear()
        self._listeners.clear()


def moved(parameters: Iterable[nn.Parameter], moves: Moves) -> tuple[nn.Parameter, ...]:
    """The parameters, each replaced by its shard if it was moved."""
    return tuple(moves.get(id(each), each) for each in parameters)


def replaced(path: str) -> HookError:
    """The error for a hooked parameter that was replaced, so that its hooks would do nothing."""
    return HookError(
        f"the parameter {path} was replaced after hooks were installed on it, for example by to_empty or quantization: "
        "its hooks would be lost; install the hooks afterwards"
    )
