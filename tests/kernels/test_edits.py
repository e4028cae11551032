"""Several edits in one compiled pass: every element equals torch's, bit for bit."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.actions.arithmetic import AddNumber, Arithmetic, ClampBetween, MultiplyBy
from hookrun.kernels import edits
from hookrun.kernels.edits import edited
from hookrun.kernels.torch_threads import parallel
from hookrun.runtime import in_parts

needs_compiler = pytest.mark.skipif(edits._library() is None, reason="nothing could be compiled here")

NUMBERS = (2.0, 1 / 3, -0.0, 1e39, -1e-40, math.inf)
EACH: tuple[Arithmetic, ...] = (
    *map(MultiplyBy, NUMBERS),
    *map(AddNumber, NUMBERS),
    *(
        ClampBetween(low, high)
        for low, high in ((-1, 1), (0.0, None), (-0.0, 0.0), (None, 1e39), (-math.inf, -1e-41))
    ),
)
CHAIN = (MultiplyBy(2.5), AddNumber(-0.1), ClampBetween(-1, 1e6), MultiplyBy(1 / 3), AddNumber(1e-41))
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 5e-324, 1e38, -3e38)


def one_after_the_other(functions: tuple[Arithmetic, ...], x: Tensor) -> Tensor:
    new = x.clone()
    for function in functions:
        function(new, new)
    return new


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_element_equals_that_of_one_edit_after_the_other(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.int32 if dtype is torch.float32 else torch.int64
    for size in (1, 15, 2047, 2048, 2049, 400_001):
        any_bits = torch.randint(torch.iinfo(whole).min, torch.iinfo(whole).max, (size,), dtype=whole)
        for x in (
            any_bits.view(dtype),
            torch.randn(size, dtype=dtype),
        ):  # NaN of every kind, then usual numbers
            x[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=dtype)[:size]
            for threads, pool in ((1, None), (3, None), (3, parallel())):
                monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                monkeypatch.setattr(edits, "_pool", pool)
                for functions in (*((each,) for each in EACH), CHAIN):
                    wanted, out = one_after_the_other(functions, x), torch.empty_like(x)
                    assert edited(functions, x, out) and same_bits(out, wanted), (size, functions)
                    mine = x.clone()
                    version = mine._version
                    assert edited(functions, mine, mine) and same_bits(mine, wanted)
                    assert mine._version > version


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_edits_without_the_threads_that_it_does_not_have() -> None:
    x, before = torch.randn(3_000_001), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        here, there = torch.empty_like(x), torch.empty_like(x)
        assert edited(CHAIN, x, here)  # creates torch's threads
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.alarm(60)  # OpenMP would wait forever for threads of the parent
                code = int(not edited(CHAIN, x, there) or there.numpy().tobytes() != here.numpy().tobytes())
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_tensors_that_share_the_memory_do_not_change() -> None:
    x = torch.linspace(-3, 3, 5000)
    before, wanted = x.clone(), one_after_the_other(CHAIN, x)
    lazy = torch._lazy_clone(x)
    assert edited(CHAIN, lazy, lazy) and same_bits(lazy, wanted) and same_bits(x, before)
    part = x[1000:3000]
    assert edited(CHAIN, part, part) and same_bits(part, wanted[1000:3000])
    assert same_bits(x[:1000], before[:1000]) and same_bits(x[3000:], before[3000:])
    with torch.inference_mode():
        inside = before.clone()
        assert edited(CHAIN, inside, inside) and same_bits(inside, wanted)


def test_other_edits_and_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(5000)
    half, out, before = x.half(), torch.empty_like(x), x.clone()
    assert not edited(CHAIN, half, torch.empty_like(half))
    assert not edited(CHAIN, torch._neg_view(x), out)
    assert not edited(CHAIN, torch._lazy_clone(x), out)
    assert not edited((MultiplyBy(math.nan),), x, x)  # which of two NaNs results depends on the processor
    assert not edited((*CHAIN, lambda x, out: out.copy_(x)), x, x)
    monkeypatch.setattr(edits, "_library", lambda: None)  # as with HOOKRUN_KERNELS=0, or without a compiler
    assert not edited(CHAIN, x, x)
    assert same_bits(x, before)


def test_a_library_with_different_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    edits._library.cache_clear()
    monkeypatch.setattr(AddNumber, "numbers", lambda self, kind: (0.25, 0.0))
    try:
        assert edits._library() is None
    finally:
        edits._library.cache_clear()


def test_hooks_give_the_same_results_with_and_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fresh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1.5

    steps = (
        {"action": "scale", "factor": 2.0},
        {"action": "clamp", "min": -1, "max": 1},
        {"action": "add_bias", "value": 0.5},
    )
    spec = {f"h{place}": {"select": "", "hook": "forward", **step} for place, step in enumerate(steps)}
    x = torch.randn(in_parts.SMALLEST + 3)
    with torch.no_grad(), hookrun.hooked(model := Fresh(), spec):
        mine = model(x)
        monkeypatch.setattr(edits, "_library", lambda: None)
        assert same_bits(mine, model(x)) and same_bits(mine, (x * 1.5 * 2).clamp(-1, 1) + 0.5)
