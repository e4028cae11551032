"""Records that are read later: an unreadable one does not lose the others."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.runtime.records import Memory


class Unreadable(Tensor):
    """A kind of tensor whose elements torch cannot read."""

    def tolist(self) -> Any:
        raise RuntimeError(".tolist() is not supported for tensor subclasses.")


def record(**data: Any) -> dict[str, Any]:
    at = {"mode": "train", "epoch": 0, "step": 0, "call": 0}
    return {"hook": "h", "module": "fc", "path": "", "action": "stats", **at, **data}


def test_an_unreadable_record_is_named_and_the_others_are_kept() -> None:
    sink = Memory()
    sink._pending += [
        record(mean=torch.ones(())),
        record(mean=torch.ones(()).as_subclass(Unreadable)),
        record(mean=2.0),
    ]
    with pytest.raises(hookrun.HookError, match=r"hook 'h' on fc: what it recorded cannot be read: .*tolist"):
        sink.settle()
    assert [each["mean"] for each in sink.records] == [1.0, 2.0]


def test_statistics_of_a_sharded_tensor_are_refused_at_the_module(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        class Sharding(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return distribute_tensor(x, mesh, [Shard(0)])

        model = nn.Sequential(nn.Identity(), Sharding())
        spec = {
            "seen": {"select": "0", "hook": "forward", "action": "stats"},
            "h": {"select": "1", "hook": "forward", "action": "stats"},
        }
        with hookrun.hooked(model, spec) as hooks, pytest.raises(hookrun.HookError, match=r"on 1: .*DTensor"):
            model(torch.ones(2, 2))
        assert [each["hook"] for each in hooks.records] == ["seen"]
    finally:
        dist.destroy_process_group()
