"""Statistics of small tensors, which are measured together: each record has the statistics of its own tensor."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest
import torch
from hooking import one_hook
from small_nets import Net
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hookrun
from hookrun.engine.actions import stats
from hookrun.engine.runtime.fast import small_tensors

ALL = [name for name in get_args(stats.Statistic) if name != "bytes"]
SUM = one_hook("0", "forward", "stats", of="sum")


def recorded(values: list[Tensor], *, read_each: bool = False, of: list[str] = ALL) -> list[dict[str, Any]]:
    """The records of an Identity that is called with these values."""
    found = list[dict[str, Any]]()
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats", "of": of}}
    with hookrun.hooked(model := nn.Sequential(nn.Identity()), spec) as hooks:
        for value in values:
            model(value)
            hooks.step()
            if read_each:
                found = list(hooks.records)
    return found or hooks.records


def test_every_statistic_is_torch_s_with_shapes_in_any_order(by_torch) -> None:
    sizes = [2, 3, 5, 511, 512, 1024, 1536, 8192, 8193, 20_000]
    generator = torch.Generator().manual_seed(0)
    values = list[Tensor]()
    for number in range(400):  # more rows than a buffer has, and more shapes than there are buffers
        x = torch.randn(sizes[number % 10] + 5 * (number // 100), generator=generator) * 3 + number % 7
        x[::5] = 0
        values.append(x.to([torch.float32, torch.float64, torch.bfloat16, torch.float16][number // 10 % 4]))
    records = recorded(values)
    assert [record["step"] for record in records] == list(range(400))
    assert list(records[0]) == ["hook", "module", "path", "action", "mode", "epoch", "step", "call", *ALL]
    for x, record in zip(values, records, strict=True):
        for name, value in {**by_torch(x), "numel": x.numel()}.items():
            size = {"var": 100, "sum": len(x), "norm": len(x) ** 0.5}.get(name, 10)
            assert record[name] == pytest.approx(value, rel=1e-4, abs=1e-6 * size, nan_ok=True), (
                name,
                len(x),
            )
            assert isinstance(record[name], int) == (name in ("nans", "infs", "numel"))


def test_the_std_of_each_row_is_torch_s() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values = [numbers * scale for scale in (1, 1e-30, 0, 1e20, 1e30, 1e-22, 3)]
    records = recorded(values, of=["std"])
    assert [record["std"] for record in records] == [
        pytest.approx(value.std().item(), rel=1e-4) for value in values
    ]


def test_a_record_does_not_depend_on_when_it_is_read() -> None:
    values = [torch.randn(size) for size in (3, 700, 2048, 8192) for _ in range(70)]
    assert recorded(values, read_each=True) == recorded(values)


@pytest.mark.parametrize("grad", [True, False])
def test_it_is_the_value_when_the_hook_fired(grad: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(8, 4)
    expected = model[0](x).double()
    with torch.set_grad_enabled(grad), hookrun.hooked(model, one_hook("0", "forward", "stats")) as hooks:
        out = model(x)
    assert hooks.records[0]["min"] == pytest.approx(expected.min().item())
    assert hooks.records[0]["min"] < 0
    assert out.requires_grad == grad
    buffers = hooks.sink._statistics._buffers  # type: ignore[attr-defined]
    assert buffers
    for buffer in buffers.values():
        assert not buffer._rows.requires_grad


def test_inference_mode_shares_buffers_with_its_loop() -> None:
    model = nn.Sequential(nn.Identity())
    with hookrun.hooked(model, SUM) as hooks:
        with torch.inference_mode():
            model(torch.ones(3))
        model(torch.ones(3, requires_grad=True) * 2)
        with torch.inference_mode():
            model(torch.ones(3) * 3)
        model(torch.ones(2, 3).t()[:, 0].expand(3) * 4)
    assert [record["sum"] for record in hooks.records] == [3, 6, 9, 12]


def test_other_kinds_of_tensors_are_measured_at_once() -> None:
    with hookrun.hooked(model := nn.Sequential(nn.Identity()), SUM) as hooks:
        torch.vmap(model)(torch.ones(3, 2))
        model(torch.ones(2, dtype=torch.complex64))
        model(torch.ones(5))
    assert [record["sum"] for record in hooks.records] == [[2, 2, 2], 2, 5]


@pytest.mark.filterwarnings("ignore")  # of torch.jit.trace
def test_traces_do_not_use_the_buffers() -> None:
    parts = {"inner": nn.Identity(), "constant": nn.Buffer(torch.arange(4.0))}
    model = Net(lambda m, x: m.inner(x) + m.inner(m.constant), **parts)
    x = torch.ones(4)
    with hookrun.hooked(model, one_hook("inner", "forward_pre", "stats", of=["mean", "std"])) as hooks:
        model(x)
        graphs = [make_fx(lambda x: model(x), pre_dispatch=early)(x * 2) for early in (False, True)]
        graphs.append(torch.jit.trace(model, (x * 2,), check_trace=False))
        torch.func.grad(lambda x: model(x).sum())(x * 2)
        torch.vmap(model)(torch.ones(2, 4) * 2)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(4))
        model(x * 3)
        for graph in graphs:
            graph(x * 99)
        means = [record["mean"] for record in hooks.records]
    of_grad_and_vmap = [2, 1.5, [2, 2], 1.5]
    assert means == [1, 1.5, *[2, 1.5] * 3, *of_grad_and_vmap, 3, 1.5]


@pytest.mark.filterwarnings("ignore")  # of torch.jit.trace
def test_records_can_be_read_during_a_trace_or_a_transform() -> None:
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats", "of": ["mean", "std"]}}
    x = torch.tensor([1.0, 3.0])
    with hookrun.hooked(model := nn.Sequential(nn.Identity()), spec) as hooks:

        def reading(x: Tensor) -> Tensor:
            assert hooks.records[-1]["mean"] == 2
            return x.sum()

        graphs = list[Any]()
        for under in (
            lambda: torch.vmap(reading)(torch.ones(2, 2)),
            lambda: torch.func.grad(reading)(x),
            lambda: graphs.append(make_fx(reading)(x)),
            lambda: graphs.append(torch.jit.trace(reading, (x,), check_trace=False)),
        ):
            model(x)
            under()
        model(x)
        assert [graph(x).item() for graph in graphs] == [4, 4]
        with FakeTensorMode():
            assert [record["std"] for record in hooks.records] == [pytest.approx(2**0.5)] * 5


def test_a_forked_process_has_the_waiting_records() -> None:
    with hookrun.hooked(model := nn.Sequential(nn.Identity()), SUM) as hooks:
        model(torch.ones(3))
        if not (child := os.fork()):
            model(torch.ones(3) * 2)
            os._exit([record["sum"] for record in hooks.records] != [3, 6])
        assert os.waitpid(child, 0)[1] == 0
        model(torch.ones(3, dtype=torch.int64))
        model(torch.ones(3) * 3)
    model(torch.ones(3) * 4)
    assert [record["sum"] for record in hooks.records] == [3, 9]


def test_threads_share_the_buffers() -> None:
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats", "of": ["min", "max", "std"]}}
    with hookrun.hooked(model := nn.Sequential(nn.Identity()), spec) as hooks:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: model(torch.full((64,), float(number))), range(2000)))
        records = hooks.records
    assert sorted(record["min"] for record in records) == list(range(2000))
    for record in records:
        assert record["min"] == record["max"]
        assert record["std"] < 1e-3


@pytest.mark.parametrize("size", [2, 300, 2048, 8192, 20_000, 4 * stats.CPU_BLOCK + 3])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1, 10.0])
def test_a_mean_of_a_million_does_not_affect_a_small_std(by_torch, size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn(size, generator=generator).double() * spread + 1e6).float()
    (record,) = recorded([x], of=["mean", "std"])
    expected = by_torch(x)
    assert record["std"] == pytest.approx(expected["std"], rel=1e-3, abs=1e-4)
    assert record["mean"] == pytest.approx(expected["mean"], rel=1e-6)


def test_infinity_stays_in_its_own_row() -> None:
    values = [torch.tensor(each) for each in ([1.0, math.inf], [1.0, 2.0], [math.nan, 1.0], [-math.inf, 0.0])]
    found = [(each["max"], each["norm"], each["infs"], each["nans"]) for each in recorded(values)]
    assert found[0] == (math.inf, math.inf, 1, 0)
    assert found[1] == (2, pytest.approx(5**0.5), 0, 0)
    assert math.isnan(found[2][0])
    assert found[2][2:] == (0, 1)
    assert found[3][:3] == (0, math.inf, 1)


def test_steps_outside_of_the_schedule_are_not_measured(monkeypatch) -> None:
    taken = list[int]()
    add = small_tensors._Buffer.add
    monkeypatch.setattr(
        small_tensors._Buffer, "add", lambda self, x, start: taken.append(start[6]) or add(self, x, start)
    )
    when = {"step": {"start": 10, "every": 10}}
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats", "when": when}}
    with hookrun.hooked(model := nn.Sequential(nn.Identity()), spec) as hooks:
        for _ in range(40):
            model(torch.ones(3))
            hooks.step()
    assert taken == [10, 20, 30] == [record["step"] for record in hooks.records]
