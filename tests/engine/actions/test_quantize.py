"""`quantize`: the values and gradients of torch's fake quantization, with the scales of torch.ao's observers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fake_site import build
from pydantic import ValidationError
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.testing import assert_close

import hookrun
from hookrun.engine.actions.quantize import Quantize

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_torch(dtype: torch.dtype, bits: int, symmetric: bool) -> None:
    torch.manual_seed(bits)
    x = (torch.randn(3, 4, 5, 2) * 3 + 1).to(dtype)
    for keys, channel in (({}, None), ({"per": "channel"}, 1), ({"per": "channel", "dim": -1}, 3)):
        ours = x.clone().requires_grad_()
        theirs = x.clone().requires_grad_()
        new = build(Quantize(bits=bits, symmetric=symmetric, **keys))(ours)
        expected = of_torch(theirs, bits, symmetric, channel)
        # torch sees float64 in float32: its observer, and per tensor the product with the scale
        assert_close(new, expected, rtol=1e-6 if dtype is torch.float64 else 0, atol=0)
        new.sum().backward()
        expected.sum().backward()
        assert torch.equal(ours.grad, theirs.grad)


def test_each_group_of_the_last_dimension_has_a_scale() -> None:
    x = torch.randn(5, 12) * torch.logspace(-9, 9, 5)[:, None]
    new = build(Quantize(bits=4, per="group", group_size=3))(x)
    assert torch.equal(new, of_torch(x.view(20, 3), 4, False, channel=0).view(5, 12))


def test_1_bit_has_two_numbers() -> None:
    x = torch.rand(1000) * 2 - 1
    fine = build(Quantize(bits=16))(x)
    assert (fine - x).abs().max() <= 1.01 / (2**16 - 1)
    coarse = build(Quantize(bits=1))(x.abs())
    assert coarse.unique().tolist() == [0, x.abs().max()]


def test_a_percentile_is_the_element_of_that_rank() -> None:
    x = torch.arange(-50.0, 950).requires_grad_()
    new = build(Quantize(observer="percentile", percentile=99.0))(x)
    scale = (939 + 40) / 255
    low, high = new.detach().aminmax()
    assert low.item() == pytest.approx(-40, abs=scale / 2)
    assert high.item() == pytest.approx(939, abs=scale / 2)
    new.sum().backward()
    assert x.grad[[0, -1]].tolist() == [0, 0]
    assert x.grad[15:-15].eq(1).all()
    bound = build(Quantize(observer="percentile", percentile=99.0, symmetric=True))(x.detach())
    assert_close(bound.max().item(), 939 * 127 / 127.5)


@pytest.mark.parametrize("number", [0.0, 3.0, -2.5, 1e-30])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_constant_tensor_stays_as_it_is(number: float, dtype: torch.dtype) -> None:
    x = torch.full((3, 4), number, dtype=dtype)
    for keys in ({}, {"observer": "percentile"}, {"per": "channel"}):
        assert_close(build(Quantize(**keys))(x.clone()), x)


@pytest.mark.parametrize("observer", ["minmax", "percentile"])
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_infinities_become_the_ends_of_the_finite_range(observer: Any, per: Any) -> None:
    x = torch.tensor([[-1.0, 0.3, math.nan, 2.0, math.inf, -math.inf]]).T.repeat(1, 2)
    new = build(Quantize(observer=observer, per=per))(x.requires_grad_())
    finite = build(Quantize(observer=observer, per=per))(x[[0, 1, 3]])
    assert torch.equal(new[[0, 1, 3, 4, 5]], torch.cat([finite, finite[[2, 0]]]))
    assert new[2].isnan().all()
    new.nansum().backward()
    assert x.grad[[0, 1, 3]].eq(1).all()
    assert x.grad[[4, 5]].eq(0).all()


@pytest.mark.parametrize(
    ("keys", "shape", "what"),
    [
        ({"per": "group", "group_size": 4}, (2, 6), r"shape \[2, 6\] does not have groups of 4"),
        ({"per": "channel"}, (2,), r"shape \[2\] does not have a dimension 1 of channels"),
        ({"per": "channel", "dim": 3}, (2, 2), "does not have a dimension 3"),
    ],
)
def test_a_shape_without_such_parts_is_refused(keys: Any, shape: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        build(Quantize(**keys))(torch.ones(shape))


def test_channels_of_a_gradient_are_its_first_dimension() -> None:
    model = nn.Linear(3, 2)
    spec = {"h": {"select": "**", "hook": "grad", "action": "quantize", "bits": 2, "per": "channel"}}
    x = torch.tensor([[1.0, 2.0, 4.0]])
    with hookrun.hooked(model, spec):
        (model(x) * torch.tensor([1.0, 100.0])).sum().backward()
    assert torch.equal(model.weight.grad, of_torch(x * torch.tensor([[1.0], [100.0]]), 2, False, channel=0))
    assert torch.equal(model.bias.grad, torch.tensor([1.0, 100.0]))


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"bits": 0}, "bits"),
        ({"bits": 17}, "bits"),
        ({"bits": 1, "symmetric": True}, "1 bit has no positive number"),
        ({"group_size": 4}, "goes with `per: group`"),
        ({"per": "group"}, "needs `group_size`"),
        ({"dim": 0}, "goes with `per: channel`"),
        ({"percentile": 99.0}, "goes with `observer: percentile`"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        Quantize(**keys)


def ends(bits: int, symmetric: bool) -> dict[str, Any]:
    """The integers that torch quantizes to."""
    low = -(2 ** (bits - 1)) if symmetric else 0
    kind, scheme = (torch.qint8, "symmetric") if symmetric else (torch.quint8, "affine")
    if bits > 8:
        kind = torch.qint32
    return {"quant_min": low, "quant_max": low + 2**bits - 1, "dtype": kind, "scheme": scheme}


def of_torch(x: Tensor, bits: int, symmetric: bool, channel: int | None = None) -> Tensor:
    """torch's fake quantization with the scale and the zero point of its observer."""
    given = ends(bits, symmetric)
    low = given["quant_min"]
    high = given["quant_max"]
    scheme = given.pop("scheme")
    given["eps"] = torch.finfo(torch.float32).tiny
    if channel is None:
        observer = MinMaxObserver(qscheme=getattr(torch, f"per_tensor_{scheme}"), **given)
    else:
        observer = PerChannelMinMaxObserver(channel, qscheme=getattr(torch, f"per_channel_{scheme}"), **given)
    observer(x.detach().float())
    scale, zero = observer.calculate_qparams()
    if channel is None:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero.int(), low, high)
    return torch.fake_quantize_per_channel_affine(x, scale, zero.int(), channel, low, high)
