"""`clip_norm` computes the same as torch.nn.utils.clip_grad_norm_, without writing to a gradient."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from small_nets import Net
from torch import Tensor, nn

import hookrun
from hookrun.engine.actions.clip_norm import ClipNorm

NORMS = st.sampled_from([1.0, 2.0, 3.0, math.inf])


def clipped_by_torch(grads: Sequence[Tensor], max_norm: float, norm_type: float) -> list[Tensor]:
    parameters = []
    for grad in grads:
        parameter = nn.Parameter(torch.empty_like(grad))
        parameter.grad = grad.clone()
        parameters.append(parameter)
    nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def clipped(grads: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> list[Tensor]:
    clip = ClipNorm(max_norm=max_norm, norm_type=norm_type).build(None)  # type: ignore[arg-type]  # no site needed
    news: list[Tensor] = clip(list(grads))
    return news


@given(
    st.lists(st.sampled_from([(), (1,), (3, 2), (64,)]), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.floats(0.01, 20),
    NORMS,
    st.integers(0, 9),
)
def test_results_are_bit_identical_to_torch_s(shapes, dtype, max_norm, norm_type, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    expected = clipped_by_torch(grads, max_norm, norm_type)
    for new, wanted in zip(clipped(grads, max_norm, norm_type), expected, strict=True):
        assert torch.equal(new, wanted)
        assert new.dtype == dtype


def test_tensors_of_several_dtypes_keep_their_dtypes() -> None:
    grads = [torch.randn(9).bfloat16(), torch.randn(()).bfloat16(), torch.randn(4, dtype=torch.float64)]
    news = clipped(grads, max_norm=0.1)
    assert [new.dtype for new in news] == [grad.dtype for grad in grads]
    for new, wanted in zip(news, clipped_by_torch(grads, 0.1, 2.0), strict=True):
        torch.testing.assert_close(new, wanted)


def test_tensors_of_several_devices_keep_their_devices() -> None:
    with torch._subclasses.FakeTensorMode():
        grads = [torch.ones(3), torch.ones(3, device="meta")]
        assert [new.device.type for new in clipped(grads, max_norm=0.1)] == ["cpu", "meta"]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_empty_tensors_do_not_count(norm_type: float) -> None:
    empty = torch.empty(0)
    full = torch.tensor([3.0, -3.0])
    assert clipped([], 1, norm_type) == []
    assert clipped([empty], 1, norm_type)[0].shape == (0,)
    first, second = clipped([empty, full], 1, norm_type)
    assert first.shape == (0,)
    assert torch.equal(second, clipped([full], 1, norm_type)[0])


def test_nan_propagates_as_in_torch() -> None:
    news = clipped([torch.tensor([math.nan]), torch.ones(2)], max_norm=1)
    for new in news:
        assert bool(new.isnan().all())


@pytest.mark.parametrize("count", [1, 2])
def test_the_gradient_flows_through_the_norm(count: int) -> None:
    xs = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    assert torch.autograd.gradcheck(lambda *xs: tuple(clipped(xs, max_norm=0.5)), xs)


BAD = [("max_norm", bad) for bad in (0, -1, math.inf, math.nan, "1")]


@pytest.mark.parametrize(("key", "bad"), [*BAD, *(("norm_type", bad) for bad in (0, -2, "max", True))])
def test_norms_must_be_numbers_above_0(key: str, bad: Any) -> None:
    with pytest.raises(ValidationError, match=key):
        ClipNorm(**{"max_norm": 1, key: bad})


def test_norm_type_may_be_the_word_inf() -> None:
    assert ClipNorm(max_norm=1, norm_type="inf").norm_type == math.inf


GRADS = {"a.weight": [[3.0, 0.0]], "a.bias": [4.0], "b.weight": [[0.0, 12.0]], "b.bias": [5.0]}
TOGETHER = {None: [tuple(GRADS)], "all": [tuple(GRADS)], "tensor": [(name,) for name in GRADS],
            "module": [("a.weight", "a.bias"), ("b.weight", "b.bias")]}  # fmt: skip


@pytest.mark.parametrize("per", TOGETHER)
def test_per_says_which_gradients_of_a_step_have_one_norm(per: str | None) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    clip = {"select": ["b", "a"], "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 1.0}
    spec = {"clip": clip | ({} if per is None else {"per": per})}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.tensor(GRADS[name])
    with hookrun.hooked(model, spec, strict=True) as hooks:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    for names in TOGETHER[per]:
        theirs = clipped_by_torch([torch.tensor(GRADS[name]) for name in names], 1.0, 2.0)
        for name, wanted in zip(names, theirs, strict=True):
            assert torch.equal(model.get_parameter(name).grad, wanted), name
    assert set(hooks.fired.values()) == {1}
    assert len(hooks.fired) == 4
    assert f"per={per or 'all'}" in str(hookrun.compile(spec, model))


@pytest.mark.parametrize(("per", "norms"), [(None, (0.6, 0.8)), ("module", (0.6, 0.8)), ("tensor", (1, 1))])
def test_per_of_a_module_s_value_of_several_tensors(per: str | None, norms: tuple[float, float]) -> None:
    clip = {"select": "", "hook": "forward", "action": "clip_norm", "max_norm": 1.0}
    model = Net(lambda _, x: (3 * x, 4 * x))
    with hookrun.hooked(model, {"clip": clip | ({} if per is None else {"per": per})}):
        found = model(torch.ones(1))
    torch.testing.assert_close(torch.cat(found), torch.tensor(norms, dtype=torch.float32))


@pytest.mark.parametrize(
    ("hook", "per"),
    [
        ("grad", "all"),
        ("grad", "module"),
        ("post_accumulate_grad", "all"),
        ("forward", "all"),
        ("weight", "module"),
    ],
)
def test_per_is_refused_where_a_firing_sees_fewer_tensors(hook: str, per: str) -> None:
    spec = {"clip": {"select": "fc", "hook": hook, "action": "clip_norm", "max_norm": 1.0, "per": per}}
    kind = "module" if hook == "forward" else "parameter"
    with pytest.raises(
        hookrun.CompileError, match=f"`per: {per}` takes several tensors together, and {hook} sees one {kind}"
    ):
        hookrun.compile(spec, nn.Sequential(OrderedDict(fc=nn.Linear(2, 2))))
