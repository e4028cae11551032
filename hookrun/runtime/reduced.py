"""Hooks on gradients of parameters where several ranks compute a part of each: they run once the sum is there."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from hookrun.runtime.hooked_parameters import Moves
from hookrun.runtime.hooks.base import ParameterHook


class ReducedGradients:
    """Runs the hooks of parameters on gradients that are summed over all ranks, as one process would see them.

    While gradients are computed nothing runs: a tensor hook would see the rank's own part.

    stands_in: a rank without rows of a batch computes one for the others' sake, as `Clock.stands_in` says
    """

    def __init__(self, *, stands_in: bool = False) -> None:
        self.stands_in = stands_in
        self._hooks = list[tuple[nn.Parameter, ParameterHook]]()

    def add(self, parameter: nn.Parameter, hook: ParameterHook) -> None:
        """Run the hook from now on."""
        self._hooks.append((parameter, hook))

    def move(self, moves: Moves) -> None:
        """Shards stand in the place of parameters now."""
        self._hooks = [(moves.get(id(parameter), parameter), hook) for parameter, hook in self._hooks]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are hooked, each once."""
        return list({id(parameter): parameter for parameter, _ in self._hooks}.values())

    @property
    def before_accumulation(self) -> list[nn.Parameter]:
        """Those whose gradient of each micro-batch hooks have to see."""
        return [parameter for parameter, hook in self._hooks if hook.before_accumulation]

    @property
    def of_each_part(self) -> bool:
        """Whether a hook has to see the gradient of each micro-batch before it is added to the others."""
        return bool(self.before_accumulation)

    @torch.no_grad()
    def run(
        self,
        before: Iterable[tuple[nn.Parameter, Tensor | None]] = (),
        only: Collection[int] | None = None,
    ) -> None:
        """Every parameter's `grad` is the sum over all ranks: of this micro-batch, or of the whole step.

        before: parameters with the gradient of the micro-batches before, which is added once `grad` hooks have run
        only:   the identities of the parameters that the backward pass has reached; None: it is not known
        """
        waiting = {id(parameter): (parameter, earlier) for parameter, earlier in before}
        hooked = {id(parameter): (parameter, list[ParameterHook]()) for parameter, _ in self._hooks}
        for parameter, hook in self._hooks:
            if only is None or id(parameter) in only:
                hooked[id(parameter)][1].append(hook)
        for parameter, hooks in reversed(hooked.values()):  # a backward pass reaches the last layers first
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
