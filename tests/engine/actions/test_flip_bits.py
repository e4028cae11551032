"""`flip_bits`: the flips of NumPy, drawn as its parameters say, listed, and repeated bit for bit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hooking import one_hook
from small_nets import Net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.engine.actions import base
from hookrun.engine.runtime import records as sinks

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Records = list[dict[str, Any]]


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.int64)
SHAPES: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(6, 5),
    "not contiguous": lambda: torch.randn(5, 6).t(),
    "expanded": lambda: torch.randn(1, 5).expand(6, 5),
    "channels last": lambda: torch.randn(2, 4, 3, 2).contiguous(memory_format=torch.channels_last),
    "no dimensions": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_flips_are_those_of_integers_in_numpy(shape: str, dtype: torch.dtype) -> None:
    x = (SHAPES[shape]() * 9).to(dtype)
    before = integers(x)
    new, records = flipped(x, rate=0.3)
    expected = before.copy()
    for record in records:
        expected[record["element"]] ^= expected.dtype.type(1 << record["bit"])
    assert (integers(new) == expected).all()
    assert (integers(x) == before).all()
    assert bool(records) is bool(x.numel())
    assert new.dtype is dtype
    values = {record["element"]: (record["before"], record["after"]) for record in records}
    for element, (old, changed) in values.items():
        np.testing.assert_equal(
            (old, changed), (x.reshape(-1)[element].item(), new.reshape(-1)[element].item())
        )


def test_each_bit_flips_at_the_rate_over_10000_draws() -> None:
    model = copying()
    bits = [0, 5, 31]
    elements = 10
    draws = 10_000
    spec = {"select": "0", "hook": "forward", "action": "flip_bits", "rate": 0.01, "bits": bits, "seed": 1}
    with hookrun.hooked(model, {"h": spec}) as hooks:
        for _ in range(draws):
            model(torch.zeros(elements))
        records = hooks.records

    def within_3_sigma(count: int, trials: int) -> bool:
        return abs(count - 0.01 * trials) <= 3 * math.sqrt(trials * 0.01 * 0.99)

    assert within_3_sigma(len(records), elements * len(bits) * draws)
    for key, kinds in (("bit", bits), ("element", range(elements))):
        counts = Counter(record[key] for record in records)
        assert set(counts) == set(kinds)
        for kind in kinds:
            assert within_3_sigma(counts[kind], elements * 3 * draws // len(kinds))


@pytest.mark.parametrize("index", [None, ":, [0, 2]", "[3, 1]", "..., 1:"])
def test_count_is_exact_for_the_whole_tensor(index: str | None) -> None:
    x = torch.randn(4, 5, 3)
    part = {} if index is None else {"index": index}
    picked = np.arange(60).reshape(4, 5, 3)[eval(f"np.s_[{index or '...'}]")]
    new, records = flipped(x, count=7, samples=[10, 11, 12, 13], **part)
    assert len(records) == 7
    assert {record["element"] for record in records} <= set(picked.ravel().tolist())
    assert {(record["element"], record["sample"]) for record in records} == {
        (at, 10 + at // 15) for at in np.flatnonzero(integers(new) != integers(x)).tolist()
    }
    _, records = flipped(x, count=2, per="sample", samples=[10, 11, 12, 13], **part)
    rows = {int(element) // 15 for element in picked.ravel()}
    assert Counter(record["sample"] for record in records) == {10 + row: 2 for row in rows}


def test_the_gradient_is_straight_through() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    stored = model[0].weight.detach().clone()
    x = torch.randn(2, 3, requires_grad=True)
    flips = {"action": "flip_bits", "count": 3, "bits": [20, 31]}
    weight = {"select": "0.weight", "hook": "weight", **flips}
    output = {"select": "0", "hook": "forward", **flips}
    with hookrun.hooked(model, {"weight": weight, "output": output}) as hooks:
        seen = model(x)
        seen.sum().backward()
        lists = {name: [r for r in hooks.records if r["hook"] == name] for name in ("weight", "output")}
    read = integers(stored)
    made = None
    for record in lists["weight"]:
        read[record["element"]] ^= np.uint32(1 << record["bit"])
    read_weight = torch.from_numpy(read.view(np.float32)).view(4, 3)
    made = integers(nn.functional.linear(x, read_weight, model[0].bias))
    for record in lists["output"]:
        made[record["element"]] ^= np.uint32(1 << record["bit"])
    plain = torch.from_numpy(made.view(np.float32)).view(2, 4)
    assert torch.equal(seen, plain.relu())
    assert torch.equal(model[0].weight, stored)
    passed = (plain > 0).float()
    torch.testing.assert_close(x.grad, passed @ read_weight)
    torch.testing.assert_close(model[0].weight.grad, passed.t() @ x.detach())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_lists_nothing_twice(reentrant: bool) -> None:
    def trained(run: Callable[[nn.Module, Tensor], Tensor]) -> tuple[list[Tensor], Records]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        spec = {"select": ["0", "1"], "hook": "forward", "action": "flip_bits", "count": 2, "bits": [22]}
        with hookrun.hooked(model, {"h": spec}) as hooks:
            for _ in range(2):
                run(model, torch.ones(2, 3, requires_grad=True)).sum().backward()
            return [each.grad for each in model.parameters() if each.grad is not None], hooks.records

    plain, records = trained(lambda model, x: model(x))
    again, others = trained(lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    assert all(map(torch.equal, plain, again))
    assert records == others


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rate": 0.1, "bits": [31]}, "bits: float16 has the bits 0 to 15, and not 31"),
        ({"count": 100}, "count: 100 is more than the 96 bits that may be flipped"),
        ({"count": 1, "per": "sample", "hook": "grad", "select": "0.weight"}, "per: sample needs samples"),
        ({"rate": 0.1, "per": "sample"}, "`per` goes with `count`"),
        ({"rate": 0.1, "count": 1}, "give one of rate, count, faults"),
        ({}, "give one of rate, count, faults"),
        ({"rate": 0.1, "bits": []}, "the list is empty"),
        ({"faults": {"run": "x"}, "seed": 1}, "leave out seed"),
    ],
)
def test_what_cannot_be_flipped_is_refused(keys: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3)).half()
    spec = {"select": "0", "hook": "forward", "action": "flip_bits", **keys}
    with pytest.raises(hookrun.HookrunError, match=message), hookrun.hooked(model, {"h": spec}):
        model(torch.ones(2, 3, dtype=torch.float16))


def test_tensors_whose_bits_cannot_be_read_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    spec = {"h": {"select": "0", "hook": "forward", "action": "flip_bits", "count": 1}}
    with hookrun.hooked(model, spec) as hooks:
        with pytest.raises(hookrun.CompileError, match="draws from a generator of its own"):
            hooks.compile()(torch.ones(2, 3))
        with pytest.raises(hookrun.HookError, match="under vmap cannot be flipped"):
            torch.vmap(model)(torch.ones(2, 3))
    for x in (torch.ones(2, dtype=torch.complex64), torch.ones(2, 2).to_sparse()):
        with pytest.raises(hookrun.HookError, match=r"takes real ones|quantized or sparse"):
            flipped(x, count=1)
    assert flipped(torch.tensor([True, False]), count=1)[1] == [], "boolean tensors stay as they are"


def test_a_list_of_faults_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hookrun.HookError, match=r"flips at once, and a hook may make 200,000"):
        flipped(torch.randn(1000, 1000), rate=0.1)
    monkeypatch.setattr(sinks, "MOST_FAULTS", 5)
    with pytest.raises(hookrun.HookError, match=r"hook 'h' on 0: the list of its faults is full"):
        flipped(torch.randn(10), count=6)
    assert base.MOST_FAULTS == 200_000


def copying() -> nn.Sequential:
    """Its output is a copy of its argument in the same order of memory."""
    return nn.Sequential(Net(lambda _, x: x.clone()))


def flipped(x: Tensor, *, samples: list[int] | None = None, **keys: Any) -> tuple[Tensor, Records]:
    """x after flips of its elements, and the records of these."""
    model = copying()
    with hookrun.hooked(model, one_hook("0", "forward", "flip_bits", **keys)) as hooks:
        if samples is not None:
            hooks.samples = torch.tensor(samples)
        return model(x), hooks.records


def integers(x: Tensor) -> np.ndarray[Any, Any]:
    """The elements as unsigned integers of the same bits."""
    flat = x.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().view(WIDTHS[x.element_size()]).copy()
