"""The compiled statistics equal torch's in float64, for every dtype, layout and size."""

from __future__ import annotations

import math
import os
import signal
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.actions import stats
from hookrun.kernels import statistics
from hookrun.kernels.statistics import NAMES, measuring
from hookrun.runtime import records

pytestmark = pytest.mark.skipif(
    statistics._kernel() is None, reason="nothing could be compiled here: no C compiler, or torch before 2.15"
)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (2, 3, 17, 2047, 2048, 2049, 5000, 131_072, 131_073, 700_001)


def found(x: Tensor, of: tuple[str, ...] = NAMES) -> dict[str, Any]:
    measure = measuring(of)
    assert measure is not None
    values = measure(x)
    assert values is not None, (x.dtype, x.shape, x.stride())
    return dict(zip(of, values, strict=True))


def taken(x: Any) -> bool:
    measure = measuring(("mean",))
    assert measure is not None
    return measure(x) is not None


def exact(x: Tensor) -> dict[str, float]:
    """In float64, sums without any rounding."""
    wide = x.double().flatten()
    values, n = wide.tolist(), wide.numel()
    total, mean = math.fsum(values), math.fsum(values) / n
    spread = math.fsum((value - mean) ** 2 for value in values)
    return {
        "mean": mean,
        "std": math.sqrt(spread / (n - 1)),
        "var": spread / (n - 1),
        "min": min(values),
        "max": max(values),
        "norm": math.sqrt(math.fsum(value * value for value in values)),
        "abs_mean": math.fsum(map(abs, values)) / n,
        "abs_max": max(map(abs, values)),
        "sum": total,
        "zeros": values.count(0) / n,
        "nans": 0,
        "infs": 0,
        "bytes": n * x.element_size(),
        "numel": n,
    }


def test_every_statistic_is_exact_in_every_dtype_and_size() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        for dtype in FLOATS if size < 10_000 else FLOATS[:: 1 + size % 2]:
            x = torch.randn(size, generator=generator, dtype=torch.float64) * 3 - 1
            x[::7] = 0
            x = x.to(dtype)
            tolerance = 1e-12 if dtype == torch.float64 else 2**-23
            for name, value in exact(x).items():
                slack = (
                    tolerance * 10 if name in ("mean", "sum") else 0
                )  # in small tensors the mean is near 0
                assert found(x)[name] == pytest.approx(value, rel=tolerance, abs=slack), (name, dtype, size)


def test_a_large_mean_and_a_first_element_far_from_it_lose_no_digits() -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (50, 2048, 5000, 300_000):
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        for mean, spread in ((1e6, 1e-1), (1e6, 1e2), (-3e7, 1e3), (0.0, 1e-20), (1e30, 1e27)):
            for dtype in FLOATS[:2]:
                x = (noise * spread + mean).to(dtype)
                for first in (x[0].item(), 1e8 * spread + mean):
                    x[0] = first
                    expected = x.double().std().item()
                    assert found(x)["std"] == pytest.approx(expected, rel=1e-6), (size, mean, spread, dtype)
                    assert found(x)["norm"] == pytest.approx(x.double().norm().item(), rel=1e-6)
    x = torch.full((4096,), 1e12, dtype=torch.float64)
    x[1::2] += 1
    assert found(x)["var"] == pytest.approx(0.25 * 4096 / 4095, rel=1e-12)


def test_numbers_whose_squares_leave_the_range_of_float64_have_a_std() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (4, 5000, 140_000):
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        for level in (1e200, -1e200, 1e-200, 5e-324):
            values = found(torch.full((n,), level, dtype=torch.float64), ("mean", "std", "var"))
            assert values["mean"] == pytest.approx(level, rel=1e-12)
            assert str(values["std"]) == str(values["var"]) == "0.0"
        for x in (1e160 + 1e150 * noise, 1e-150 * noise, 1e150 * noise):
            std = x.div(1e150).std().item() * 1e150 if x[0].abs() > 1 else x.mul(1e150).std().item() / 1e150
            assert found(x)["std"] == pytest.approx(std, rel=1e-5)
        tiny = 1e-200 * noise
        assert found(tiny)["std"] == tiny.std().item() == 0
    far = torch.tensor([1e200, -1e200] * 3000, dtype=torch.float64)
    assert found(far)["var"] == far.var().item() == math.inf


def test_nan_and_infinity_give_what_torch_gives() -> None:
    for size in (2, 5, 3000, 140_000):
        for dtype in FLOATS:
            for values in ([math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.nan, math.inf]):
                for place in {0, size - len(values)}:
                    x = torch.arange(size, dtype=torch.float64).remainder(100).to(dtype)
                    x[place : place + len(values)] = torch.tensor(values)
                    expected = stats.measuring(NAMES)(x)
                    for name, value in found(x).items():
                        assert value == pytest.approx(float(expected[name]), rel=1e-4, nan_ok=True), (
                            name,
                            values,
                            dtype,
                        )
    largest = torch.tensor([1e200, -1e200, 3.0], dtype=torch.float64)
    assert found(largest)["norm"] == math.inf and found(largest)["min"] == -1e200


def test_every_number_of_half_precision_is_read_as_torch_reads_it() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        numbers = bits.view(dtype)
        pairs = numbers[numbers.isfinite()].unsqueeze(1).expand(-1, 2).contiguous()
        measure = measuring(("min", "max"))
        assert measure is not None
        for pair, value in zip(pairs, pairs[:, 0].double().tolist(), strict=True):
            low, high = measure(pair) or (None, None)
            assert low == high == value
        assert found(numbers)["nans"] == int(numbers.isnan().sum()) > 0
        assert found(numbers)["infs"] == 2


def test_layouts_that_fill_their_memory_are_read_and_others_are_left_to_torch() -> None:
    x = torch.randn(4, 6, 5, 3)
    expected = found(x, ("mean", "std", "min", "max", "norm"))
    whole = [x.transpose(0, 3), x.permute(2, 0, 3, 1), x.to(memory_format=torch.channels_last), x[:, :, None]]
    for same in whole:
        assert found(same, tuple(expected)) == pytest.approx(expected, rel=1e-6)
    part = torch.randn(100)[3:50]
    assert found(part)["sum"] == pytest.approx(part.double().sum().item(), rel=1e-6)
    others = [
        x[:, ::2],
        x[:, :3],
        x[:1].expand(4, 6, 5, 3),
        torch.zeros(1).expand(5),
        torch.ones(3).as_strided((2, 2), (1, 1)),
    ]
    kinds = [torch.ones(3, dtype=torch.int64), torch.ones(3) > 0, torch.ones(3, dtype=torch.complex64)]
    odd = [
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch._neg_view(torch.ones(1)),
        nn.Buffer(torch.ones(1)),
    ]
    small = [torch.empty(0), torch.empty(3, 0), torch.ones(1), torch.tensor(1.0), None, 3, [torch.ones(3)]]
    assert not any(map(taken, [*others, *kinds, *odd, *small]))
    assert taken(nn.Parameter(torch.ones(3))) and taken(torch.ones(3, requires_grad=True) * 2)
    with torch.inference_mode():
        assert taken(torch.ones(3))


def test_reading_does_not_copy_a_copy_on_write_tensor() -> None:
    x = torch.randn(64)
    copy = torch._lazy_clone(x)
    assert taken(x) and taken(copy) and torch._C._is_cow_tensor(copy)  # type: ignore[attr-defined]


def test_a_number_does_not_depend_on_threads_or_on_the_other_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = statistics._kernel()
    assert kernel is not None
    x = torch.randn(3_000_001)
    before = torch.get_num_threads()
    try:
        results = set()
        for threads in (1, 2, 3, 7, 1000):
            torch.set_num_threads(min(threads, 64))
            results.add(kernel.function(("mean", "std", "norm"))(x))
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_parallel", None)  # its own threads, where torch has no OpenMP
        assert kernel.function(("mean", "std", "norm"))(x) in results
    assert {name: found(x, (name,))[name] for name in NAMES} == found(x)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_measures_without_the_threads_that_it_does_not_have() -> None:
    x, before = torch.randn(3_000_001), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        kernel = statistics._kernel()
        assert kernel is not None
        measure = kernel.function(("mean", "std", "norm"))
        here = measure(x)  # creates torch's threads
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.alarm(60)  # OpenMP would wait forever for threads of the parent
                code = int(measure(x) != here)
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


def recorded(model: nn.Module, x: Tensor, **when: Any) -> Any:
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats", **when}}
    hooks = hookrun.hooked(model, spec)
    with hooks:
        for _ in range(4):
            model(x)
            hooks.step()
    return hooks


def test_records_equal_those_without_the_compiled_library(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 6)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True))  # the value when the hook fired
    compiled = recorded(model, x, of=list(NAMES))
    monkeypatch.setattr(statistics, "_kernel", lambda: None)
    plain = recorded(model, x, of=list(NAMES))
    assert compiled.fired == plain.fired == {("s", "0"): 4}
    assert len(plain.records) == 4
    for mine, theirs in zip(compiled.records, plain.records, strict=True):
        assert list(mine) == list(theirs)
        assert {key: type(value) for key, value in mine.items()} == {
            key: type(value) for key, value in theirs.items()
        }
        assert mine == {
            key: pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
            for key, value in theirs.items()
        }


def test_records_of_several_kinds_keep_their_order_and_a_long_loop_is_read_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "MOST_PENDING", 5)
    model = nn.Sequential(nn.Identity())
    with hookrun.hooked(
        model, {"s": {"select": "0", "hook": "forward", "action": "stats", "of": "sum"}}
    ) as hooks:
        expected = list[Any]()
        for number in range(40):
            dtype = (torch.float32, torch.complex64)[number % 3 == 0]  # which torch computes
            model(torch.full((number % 4 + 1,), float(number), dtype=dtype))
            expected.append(number * (number % 4 + 1))
        assert len(hooks.sink._pending) <= 6  # type: ignore[attr-defined]
        assert [record["sum"] for record in hooks.records] == expected


def test_a_schedule_is_evaluated_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def counting(of: Any, start: Any, pending: list[Any], most: int) -> Callable[..., bool]:
        return lambda x, mode, epoch, step, call: bool(asked.append(step)) or True

    monkeypatch.setattr(records, "recording", counting)
    recorded(nn.Sequential(nn.Identity()), torch.ones(3), when={"step": {"every": 2}})
    assert asked == [0, 2]


def test_a_deleted_installation_leaves_no_reference() -> None:
    import gc
    import weakref

    model = nn.Sequential(nn.Identity())
    hooks = recorded(model, torch.ones(3))
    alive = weakref.ref(hooks.sink)
    del hooks
    gc.collect()
    assert alive() is None


def test_results_are_rounded_to_float32_for_float32() -> None:
    x = torch.randn(1000)
    for name, value in found(x).items():
        assert isinstance(value, int) or struct.unpack("f", struct.pack("f", value))[0] == value, name
