"""Trains every row of the joint table in columns with several ranks, as one of the ranks, and writes the results."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
from joint_table import COLUMNS, DIFFERS, REFUSED, Column, Row, rows, says
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

import hookrun
from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.clock import RowsOfRank
from hookrun.engine.runtime.reduced import ReducedGradients
from hookrun.engine.runtime.sharded import whole
from hookrun.engine.spec.selector import parse_selector
from hookrun.engine.values.containers import tensors
from hookrun.run.experiment.settings import Fsdp
from hookrun.run.experiment.sharding import shard
from hookrun.run.ranks import share
from hookrun.run.training.rank_gradients import _summed

STEPS, BATCH = 2, 5


def trained(row: Row, column: Column, rank: int, *, sharded_first: bool = False) -> dict[str, Any]:
    """Train a few steps; returns weights, firings, captures and records.

    sharded_first: shard the model before the hooks are installed
    """
    model = row.network(checkpointed=column.checkpointed)
    plan = hookrun.compile({"hooks": row.spec}, model)
    wrap = Fsdp(wrap=parse_selector("block"))
    if sharded_first:
        shard(model, wrap, torch.device("cpu"), column.ranks)
    reduced = ReducedGradients() if column.strategy == "ddp" and column.parts > 1 else None
    with Installation(plan, model, reduced=reduced, standalone=reduced is None) as hooks:
        if column.sharded and not sharded_first:
            shard(model, wrap, torch.device("cpu"), column.ranks)
        call: Any = hooks.compile(backend="eager") if column.compiled else model
        if column.strategy == "ddp":
            call = DistributedDataParallel(model, find_unused_parameters=True)
            call.register_comm_hook(None, _summed)
        mine = share(BATCH, rank, column.ranks)
        hooks.clock.rows = RowsOfRank(mine, BATCH) if column.ranks > 1 else None
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
        for step in range(STEPS):
            for part in range(column.parts):
                hooks.accumulating = part + 1 < column.parts
                x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(10 * step + part))
                inputs = x[mine.start : mine.stop].clone().requires_grad_()
                before = [(each, each.grad) for each in model.parameters()] if reduced is not None else []
                for parameter, _ in before:  # as in a run with several ranks, which sums instead of averaging
                    parameter.grad = None
                (call(inputs).square().sum() / (BATCH * column.parts)).backward()
                if reduced is not None:
                    reduced.run(before)
            optimizer.step()
            optimizer.zero_grad()
            if reduced is not None:
                hooks.step()
        weights = [whole(each).detach() for each in model.parameters()]
        kept = [each for of_module in hooks.captures.get("h", {}).values() for each in of_module]
        return {
            "weights": [each.flatten().tolist() for each in weights],
            "fired": sorted([*key, count] for key, count in hooks.fired.items()),
            "captures": [[_listed(each) for each in tensors(value)] for value in kept],
            "records": [_rounded(record) for record in hooks.records],
        }


def _listed(tensor: Tensor) -> Any:
    return tensor.detach().tolist()


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    """The record with floats rounded to three digits, so that the order of sums does not matter."""
    return {key: float(f"{each:.3g}") if isinstance(each, float) else each for key, each in record.items()}


def column_of(column: Column, rank: int) -> dict[str, Any]:
    """Row number -> its result or its error; rows that are refused in this column are left out."""
    found = dict[str, Any]()
    for number, row in enumerate(rows()):
        if says(row, column)[0] == REFUSED:
            continue
        try:
            found[str(number)] = trained(row, column, rank)
        except Exception as error:
            found[str(number)] = {"error": f"{type(error).__name__}: {error}"}
    return found


def sharded_before(rank: int) -> dict[str, Any]:
    """The same with the model sharded before the hooks are installed: row number -> its result or its refusal."""
    column, found = next(each for each in COLUMNS if each.sharded), dict[str, Any]()
    for number, row in enumerate(rows()):
        if row.hook not in (
            "forward",
            "backward",
            "grad",
            "post_accumulate_grad",
            "optimizer_step_pre",
            "apply",
        ):
            continue
        if says(row, column)[0] not in (REFUSED, DIFFERS):
            try:
                found[str(number)] = trained(row, column, rank, sharded_first=True)
            except hookrun.CompileError as error:
                found[str(number)] = {"refused": str(error)}
    return found


if __name__ == "__main__":
    rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    results = {column.name: column_of(column, rank) for column in COLUMNS if column.ranks > 1}
    results["sharded before"] = sharded_before(rank)
    with open(path, "w") as file:
        json.dump(results, file)
    distributed.destroy_process_group()
