"""One of two processes that train under DistributedDataParallel: ``python -m benchmarks.ddp_steps RANK PORT ROUNDS``.

Rank 0 prints, as JSON, the seconds of each way in each round, and the largest difference between the weights of hookrun
and those of hand-written hooks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.measure import OURS
from benchmarks.models import leaves, mlp

BARE, BY_HAND = "bare", "by hand"
LIMIT = 0.01
COMPARED = 3
"""Steps after which the weights are compared."""


class Way:
    """Training steps on this rank's rows, without hooks."""

    def __init__(self, rank: int) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        subject = mlp(width=256, batch=64)
        self.model = subject.make()
        self.x = subject.x[rank::2]
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        """Forward, backward, optimizer step."""
        self.optimizer.zero_grad()
        self.wrapped(self.x).square().mean().backward()
        self.before_step()
        self.optimizer.step()
        self.forget()

    def before_step(self) -> None:
        """Change the gradients before the optimizer's step."""

    def forget(self) -> None:
        """Drop the captures of the step."""


class ByHand(Way):
    """Hand-written: forward hooks clone the activations, the reduced gradients are clamped before the step."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.kept = list[Any]()
        for _, module in leaves(self.model):
            module.register_forward_hook(
                lambda module, args, output: self.kept.append(output.detach().clone())
            )

    def before_step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad.clamp_(-LIMIT, LIMIT)

    def forget(self) -> None:
        self.kept.clear()


class Ours(Way):
    """The same with hookrun."""

    def __init__(self, rank: int, stack: ExitStack) -> None:
        super().__init__(rank)
        import hookrun

        names = [name for name, _ in leaves(self.model)]
        spec = {
            "rows": {"select": names, "hook": "forward", "action": "capture"},
            "clip": {"select": "**", "hook": "grad", "action": "clamp", "min": -LIMIT, "max": LIMIT},
        }
        self.hooks = stack.enter_context(hookrun.hooked(self.model, spec))
        self.lists = [self.hooks.captures["rows"][name] for name in names]

    def forget(self) -> None:
        for values in self.lists:
            values.clear()


def main(rank: int, port: str, rounds: int) -> dict[str, Any]:
    """Measure as one of the two processes; returns the times and the difference of the weights."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with ExitStack() as stack:
        ways = {BARE: Way(rank), BY_HAND: ByHand(rank), OURS: Ours(rank, stack)}
        for way in ways.values():
            for _ in range(COMPARED):
                way.step()
        pairs = zip(ways[BY_HAND].model.parameters(), ways[OURS].model.parameters(), strict=True)
        apart = max(float((one - other).detach().abs().max()) for one, other in pairs)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in ways if number % 2 else reversed(ways):
                start = time.perf_counter()
                ways[name].step()
                times[name].append(time.perf_counter() - start)
    distributed.destroy_process_group()
    return {"times": times, "apart": apart}


if __name__ == "__main__":
    found = main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    if sys.argv[1] == "0":
        print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads may outlive the group, and one that frees a tensor while Python ends aborts
