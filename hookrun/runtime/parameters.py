"""The hooked parameters: hooks move to shards that replace them; any other replacement is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.optim import Optimizer

from hookrun.errors import HookError
from hookrun.runtime.sharded import is_sharded

Moves = Mapping[int, nn.Parameter]
"""id(parameter) -> the sharded parameter that has replaced it."""


class HookedParameters:
    """The hooked parameters by path.

    It checks the parameters before each optimizer step, since hooks on a replaced parameter would be lost silently.

    places:  path -> the module, the name in it, and the parameter that is hooked
    on_move: called when fully_shard has replaced parameters by shards
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.places = dict[str, tuple[nn.Module, str, nn.Parameter]]()
        self.on_move = list[Callable[[Moves], None]]()

    @property
    def all_there(self) -> bool:
        """Whether every hooked parameter is still the module's parameter of that name."""
        return all(owner._parameters.get(name) is one for owner, name, one in self.places.values())

    def follow(self, optimizer: Optimizer | None = None, *, shards: bool = True) -> None:
        """Move hooks to the shards by which fully_shard has replaced parameters. To be called between two steps.

        shards: false: fully_shard was not called

        Raises HookError if a parameter was replaced by anything else.
        """
        moves = dict[int, nn.Parameter]()
        for path, (owner, name, parameter) in self.places.items():
            now = owner._parameters.get(name)
            if now is parameter:
                continue
            if shards and now is not None and is_sharded(now) and not is_sharded(parameter):
                moves[id(parameter)] = now
                self.places[path] = (owner, name, now)
            elif all(other is not parameter for other in self._model.parameters()):  # it was not just renamed
                raise HookError(
                    f"the parameter {path} was replaced after hooks were installed on it, for example by to_empty or "
                    "quantization: its hooks would be lost; install the hooks afterwards"
                )
        if moves:
            for listener in self.on_move:
                listener(moves)

    def clear(self) -> None:
        """Forget all parameters and listeners."""
        self.places.clear()
        self.on_move.clear()
