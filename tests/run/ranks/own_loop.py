"""A user's own loop as one of two ranks: hooks before the wrapper, after it, and on the wrapper itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hookrun

SPEC = {
    "clip": {"select": "0", "hook": "grad", "action": "clamp", "min": -0.02, "max": 0.02},
    "late": {"select": "2", "hook": "post_accumulate_grad", "action": "clamp", "min": -0.03, "max": 0.03},
}
PRUNED = {"half": {"select": ["0", "2"], "hook": "apply", "action": "prune", "amount": 0.5}}
WRAPPED = {name: {**hook, "select": f"module.{hook['select']}"} for name, hook in SPEC.items()}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """8 rows of a micro-batch."""
    made = torch.Generator().manual_seed(10 * step + part)
    return torch.randn(8, 4, generator=made) * 3, torch.randn(8, 2, generator=made)


def trained(model: nn.Module, hooks: Any, rank: int | None, parts: int = 1, sync: bool = True) -> list[float]:
    """The weights after three steps; rank: of which the half of the rows is used; None: all of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(parts):
            inputs, targets = rows(step, part)
            if rank is not None:
                inputs = inputs[rank::2]
                targets = targets[rank::2]
            last = part + 1 == parts
            hooks.accumulating = not last
            with model.no_sync() if not (sync or last) else nullcontext():  # type: ignore[operator]
                (nn.functional.mse_loss(model(inputs), targets) / parts).backward()
        optimizer.step()
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return [number for each in whole for number in each.detach().flatten().tolist()]


class Fails(torch.autograd.Function):
    """A module whose backward pass raises an error after the last layer has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")


def between(model: nn.Sequential, wrapped: nn.Module, hooks: Any, rank: int, *, fails: bool) -> list[float]:
    """The gradients of a step, after a backward pass that failed, or with a forward of the bare model before it."""
    inputs, targets = (each[rank::2] for each in rows(0, 0))
    if fails:
        try:
            with wrapped.no_sync():  # type: ignore[operator]
                hidden = model[1](model[0](inputs))  # the hooks recognise the forward of the wrapper
                wrapped(inputs)
                model[2](Fails.apply(hidden)).sum().backward()
        except RuntimeError as error:
            assert "no memory" in str(error)
        model.zero_grad()
    loss = nn.functional.mse_loss(wrapped(inputs), targets)
    if not fails:
        with torch.no_grad():
            model(inputs)
    loss.backward()
    return [number for each in model.parameters() for number in each.grad.flatten().tolist()]  # type: ignore[union-attr]


def cases(rank: int) -> dict[str, float | str]:
    found = dict[str, float | str]()

    def compare(name: str, numbers: list[float], others: list[float]) -> None:
        found[name] = max(abs(one - other) for one, other in zip(numbers, others, strict=True))

    @contextmanager
    def refusal(name: str) -> Iterator[None]:
        try:
            yield
        except hookrun.HookrunError as error:
            found[name] = str(error)

    for parts in (1, 2):
        alone = network()
        with hookrun.hooked(alone, SPEC) as hooks:
            one = trained(alone, hooks, None, parts)
        inside = network()
        with hookrun.hooked(inside, SPEC) as hooks:
            compare(
                f"hooks, then DDP, {parts}", trained(DistributedDataParallel(inside), hooks, rank, parts), one
            )
        later = DistributedDataParallel(network())
        with hookrun.hooked(later.module, SPEC) as hooks:
            compare(f"DDP, then hooks, {parts}", trained(later, hooks, rank, parts), one)
        whole = DistributedDataParallel(network())
        with hookrun.hooked(whole, WRAPPED) as hooks:
            compare(f"hooks on DDP, {parts}", trained(whole, hooks, rank, parts), one)
        for first in ("hooks", "fully_shard"):
            divided = network()
            if first == "fully_shard":
                fully_shard(divided[0])
                fully_shard(divided)
            with hookrun.hooked(divided, SPEC) as hooks:
                if first == "hooks":
                    fully_shard(divided[0])
                    fully_shard(divided)
                compare(f"{first} first, {parts}", trained(divided, hooks, rank, parts), one)
    inside = network()
    with hookrun.hooked(inside, SPEC) as hooks:
        compiled = torch.compile(DistributedDataParallel(inside), backend="eager")
        compare("DDP in torch.compile, 2", trained(compiled, hooks, rank, 2), one)
    inside = network()
    with hookrun.hooked(inside, SPEC) as hooks:
        compiled = torch.compile(inside, backend="eager")
        compiled(rows(0, 0)[0][rank::2])  # the graph is traced before the wrapper is there
        compare("compiled, then DDP, 2", trained(DistributedDataParallel(compiled), hooks, rank, 2), one)
    alone = network()
    with hookrun.hooked(alone, PRUNED) as hooks:
        one = trained(alone, hooks, None, 2)
    inside = network()
    divided = network()
    with hookrun.hooked(inside, PRUNED) as hooks:
        compare("pruned, then DDP", trained(DistributedDataParallel(inside), hooks, rank, 2), one)
    with hookrun.hooked(divided, PRUNED) as hooks:
        fully_shard(divided)
        compare("pruned, then fully_shard", trained(divided, hooks, rank, 2), one)
    plain = network()
    with hookrun.hooked(plain, {"late": SPEC["late"]}) as hooks:
        one = trained(plain, hooks, None, 2)
    unsynced = network()
    with hookrun.hooked(unsynced, {"late": SPEC["late"]}) as hooks:
        compare("no_sync", trained(DistributedDataParallel(unsynced), hooks, rank, 2, sync=False), one)
    bare = network()
    with hookrun.hooked(bare, SPEC):
        inputs, targets = (torch.cat([each[0::2], each[1::2]]) for each in rows(0, 0))
        nn.functional.mse_loss(bare(inputs), targets).backward()
    wanted = [number for each in bare.parameters() for number in each.grad.flatten().tolist()]  # type: ignore[union-attr]
    for name, fails in (
        ("after a failed backward", True),
        ("a look at the model before the backward", False),
    ):
        model = network()
        with hookrun.hooked(model, SPEC) as hooks:
            compare(name, between(model, DistributedDataParallel(model), hooks, rank, fails=fails), wanted)
    unsynced = network()
    with refusal("grad under no_sync"), hookrun.hooked(unsynced, SPEC) as hooks:
        trained(DistributedDataParallel(unsynced), hooks, rank, 2, sync=False)
    wrapped = DistributedDataParallel(network())
    added = {"bias": {"select": "1", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}}
    with refusal("added to a wrapped model"), hookrun.hooked(wrapped.module, added) as hooks:
        trained(wrapped, hooks, rank)
    sharded = network()
    fully_shard(sharded)
    sharded.set_requires_gradient_sync(False)
    with refusal("grad without sync"), hookrun.hooked(sharded, SPEC) as hooks:
        trained(sharded, hooks, rank)
    late = network()
    step = {"step": {**SPEC["clip"], "hook": "optimizer_step_pre"}}
    with refusal("replaced"), hookrun.hooked(late, step):
        late[0].weight = nn.Parameter(torch.zeros(8, 4))
        late(rows(0, 0)[0])
    return found


if __name__ == "__main__":
    rank = int(sys.argv[1])
    port = sys.argv[2]
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    print(json.dumps(cases(rank)), flush=True)
    distributed.destroy_process_group()
