"""Runs hooks on parameter gradients after the gradients have been summed over all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from hookrun.runtime.hooked_parameters import Moves
from hookrun.runtime.hooks.base import ParameterHook


class ReducedGradients:
    """Runs parameter hooks on gradients that are summed over all ranks, equal to those of a single process.

    No hook runs during the backward pass, where a tensor hook would see only the rank's own part.

    stands_in: ranks without rows of a batch still run a pass, because collective operations need every rank; see
               `Clock.stands_in`
    """

    def __init__(self, *, stands_in: bool = False) -> None:
        self.stands_in = stands_in
        self._hooks = list[tuple[nn.Parameter, ParameterHook]]()

    def add(self, parameter: nn.Parameter, hook: ParameterHook) -> None:
        """Add a hook on the gradient of a parameter."""
        self._hooks.append((parameter, hook))

    def move(self, moves: Moves) -> None:
        """Replace parameters by the shards that have taken their place."""
        self._hooks = [(moves.get(id(parameter), parameter), hook) for parameter, hook in self._hooks]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The hooked parameters, each once."""
        return list({id(parameter): parameter for parameter, _ in self._hooks}.values())

    @property
    def before_accumulation(self) -> list[nn.Parameter]:
        """The parameters with hooks that see the gradient of each micro-batch."""
        return [parameter for parameter, hook in self._hooks if hook.before_accumulation]

    @property
    def of_each_part(self) -> bool:
        """Whether a hook sees the gradient of each micro-batch before it is added to the others."""
        return bool(self.before_accumulation)

    @torch.no_grad()
    def run(
        self,
        before: Iterable[tuple[nn.Parameter, Tensor | None]] = (),
        only: Collection[int] | None = None,
    ) -> None:
        """Run the hooks, when every `parameter.grad` is summed over all ranks: of this micro-batch or the whole step.

        before: parameters with the gradient of earlier micro-batches, which is added after the `grad` hooks have run
        only:   ids of the parameters whose gradient the backward pass has computed; None: all parameters
        """
        waiting = {id(parameter): (parameter, earlier) for parameter, earlier in before}
        hooked = {id(parameter): (parameter, list[ParameterHook]()) for parameter, _ in self._hooks}
        for parameter, hook in self._hooks:
            if only is None or id(parameter) in only:
                hooked[id(parameter)][1].append(hook)
        # in the order of a backward pass: last layers first
        for parameter, hooks in reversed(hooked.values()):
            for hook in hooks:
                if hook.before_accumulation:
                    hook.reduced(parameter)
            _accumulate(*waiting.pop(id(parameter), (parameter, None)))
            for hook in hooks:
                if not hook.before_accumulation:
                    hook.reduced(parameter)
        for parameter, earlier in waiting.values():
            _accumulate(parameter, earlier)


def _accumulate(parameter: nn.Parameter, earlier: Tensor | None) -> None:
    if earlier is not None:
        parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
