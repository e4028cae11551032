"""Records are read together and later; rows keep their tokens; hooks that did nothing are described."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
from small_nets import Net
from torch import Tensor, nn

import hookrun
from hookrun.engine.actions.base import TokenRows
from hookrun.engine.runtime.install import describe_inactive
from hookrun.engine.runtime.records import CapturedRows, Memory


class Unreadable(Tensor):
    """A kind of tensor whose elements torch cannot read."""

    def tolist(self) -> Any:
        raise RuntimeError(".tolist() is not supported for tensor subclasses.")


def record(**data: Any) -> dict[str, Any]:
    at = {"mode": "train", "epoch": 0, "step": 0, "call": 0}
    return {"hook": "h", "module": "fc", "path": "", "action": "stats", **at, **data}


def test_an_unreadable_record_keeps_the_others() -> None:
    sink = Memory()
    sink._pending += [
        record(mean=torch.ones(())),
        record(mean=torch.ones(()).as_subclass(Unreadable)),
        record(mean=2.0),
    ]
    with pytest.raises(hookrun.HookError, match=r"hook 'h' on fc: what it recorded cannot be read: .*tolist"):
        sink.settle()
    assert [each["mean"] for each in sink.records] == [1.0, 2.0]


def test_statistics_of_a_sharded_tensor_are_refused(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharding = Net(lambda _, x: distribute_tensor(x, mesh, [Shard(0)]))
        model = nn.Sequential(nn.Identity(), sharding)
        spec = {
            "seen": {"select": "0", "hook": "forward", "action": "stats"},
            "h": {"select": "1", "hook": "forward", "action": "stats"},
        }
        with hookrun.hooked(model, spec) as hooks, pytest.raises(hookrun.HookError, match=r"on 1: .*DTensor"):
            model(torch.ones(2, 2))
        assert [each["hook"] for each in hooks.records] == ["seen"]
    finally:
        dist.destroy_process_group()


def rows(*numbers: int, keys: list[int] | None = None) -> TokenRows:
    of = torch.tensor(numbers)
    return TokenRows(of * 0, of, of + 1, of - 1, None if keys is None else torch.tensor(keys))


def test_descriptions_of_rows_are_concatenated_over_entries() -> None:
    captured = CapturedRows(find_decoder=lambda: "t{}".format)
    assert captured.sample_ids.tolist() == captured.text == []
    for each in (rows(2, 0), rows(1, keys=[7])):
        captured.append(torch.zeros(len(each.numbers)))
        captured.note(each)
    assert captured.sample_ids.tolist() == [2, 0, 1]
    assert captured.positions.tolist() == [3, 1, 2]
    assert captured.keys.tolist() == [-1, -1, 7]
    assert captured.text == ["t1", "", "t0"]  # the token of sample 0 is unknown
    for again in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert again.text == captured.text
        assert again.keys.tolist() == captured.keys.tolist()
        assert len(again) == 2
        assert torch.equal(again[0], captured[0])


def test_describe_inactive_is_one_line_for_each_hook() -> None:
    lines = describe_inactive([("a", "x", "never fired"), ("a", "", "never fired"), ("b", "y", "no tensor")])
    assert lines == ["a never fired on x, (root)", "b no tensor on y"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Flatten())


def checks(policy: str) -> dict[str, object]:
    return {"sound": {"select": "*", "hook": "forward", "action": "check", "policy": policy}}


def test_the_last_good_module_is_of_the_current_pass() -> None:
    model = net()
    with hookrun.hooked(model, checks("error")) as hooks:
        model(torch.ones(2, 4))
        assert not hooks.records, "checks that pass"
        with torch.no_grad():
            model[2].weight[0, 0] = float("nan")
        with pytest.raises(
            hookrun.CheckFailed,
            match=r"on 2 \(Linear\), epoch 0, step 0: .* found nan; last good: 1 \(ReLU\)",
        ):
            model(torch.ones(2, 4))
        assert [record["class"] for record in hooks.records] == ["Linear"]
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    first = pytest.raises(hookrun.CheckFailed, match=r"on 0 \(Linear\), .* found nan$")
    with first, hookrun.hooked(model, checks("error")):
        model(torch.ones(2, 4))


def test_reading_an_earlier_failure_keeps_the_last_good_module() -> None:
    model = net()[:3]
    with hookrun.hooked(model, checks("error")) as hooks:
        model[1].register_forward_hook(lambda *_: hooks.state_dict() and None)  # reads the records
        with torch.no_grad():
            model[2].weight[0, 0] = float("nan")
        for _ in range(2):
            with pytest.raises(hookrun.CheckFailed):
                model(torch.ones(2, 4))
            hooks.step()
        assert [record["last_good"] for record in hooks.records] == ["1 (ReLU)"] * 2


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_results_that_are_read_later_name_the_same_module(policy: str) -> None:
    model = net()
    with hookrun.hooked(model, checks(policy)) as hooks:
        model(torch.ones(2, 4))
        assert hooks.records == []
        assert hooks.stopped is None
        with torch.no_grad():
            model[2].weight[0, 0] = float("nan")
        model(torch.ones(2, 4))
        model(torch.full((2, 4), float("nan")))
        found = [(each["module"], each["class"], each["last_good"]) for each in hooks.records]
        stopped = "hook 'sound' on 2 (Linear): expected" if policy == "stop" else "None"
        assert str(hooks.stopped).startswith(stopped)
    assert found[:2] == [("2", "Linear", "1 (ReLU)"), ("3", "Flatten", "1 (ReLU)")]
    assert found[2] == ("0", "Linear", None), "what passed in the pass before is not before it"
