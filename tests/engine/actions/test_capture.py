"""`capture` stores each value, whole or reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_site import FakeSite
from pydantic import ValidationError
from torch import nn

import hookrun
from hookrun.engine.actions.base import TokenRows
from hookrun.engine.actions.capture import Capture


def kept(value: Any, **keys: Any) -> Any:
    action = Capture(**keys)
    site = FakeSite(action)
    action.build(site)(value)
    return site.kept[-1]


X = torch.linspace(-2, 3, 48).reshape(2, 4, 3, 2)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("mean", X.mean((1, 2, 3))),
        ({"mean": [2, 3]}, X.mean((2, 3))),
        ({"mean": -1}, X.mean(-1)),
        ("norm", X.flatten(1).norm(dim=1)),
        ({"norm": [1]}, X.norm(dim=1)),
    ],
)
def test_reductions_store_less_of_each_tensor(reduce: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(kept(X, reduce=reduce), expected)
    found = kept({"a": (X, None)}, reduce=reduce)
    torch.testing.assert_close(found["a"][0], expected)
    assert found["a"][1] is None
    assert kept(None) is None


def test_the_largest_elements_are_kept_with_their_indices() -> None:
    found = kept(X, reduce={"topk": 1}, dtype="float16")
    assert torch.equal(found.values, X.amax(-1, keepdim=True).half())
    assert found.values.dtype == torch.float16
    assert torch.equal(found.indices, X.argmax(-1, keepdim=True))
    (nested, nothing) = kept({"a": (X, None)}, reduce={"topk": 2})["a"]
    assert torch.equal(X.gather(-1, nested.indices), nested.values)
    assert nothing is None


def test_a_random_projection_preserves_lengths() -> None:
    x = torch.randn(20, 500, generator=torch.Generator().manual_seed(0))
    found = kept(x, reduce={"project": 400})
    assert found.shape == (20, 400)
    torch.testing.assert_close(kept(x[3:5], reduce={"project": 400}), found[3:5])
    torch.testing.assert_close(found.norm(dim=1), x.norm(dim=1), rtol=0.15, atol=0)
    assert kept(X, reduce={"project": 5}).shape == (2, 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64"])
def test_dtype_is_the_dtype_in_which_tensors_are_stored(dtype: str) -> None:
    found = kept((X, torch.arange(3)), dtype=dtype)
    assert found[0].dtype == getattr(torch, dtype)
    assert torch.equal(found[0].float(), X.to(getattr(torch, dtype)).float())
    assert found[1].dtype == torch.int64


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "float8_e5m2"])
def test_dtype_is_that_of_both_parts_of_a_complex_tensor(dtype: str) -> None:
    x = torch.complex(X, -X).conj()
    if dtype not in ("float16", "float32"):
        with pytest.raises(ValueError, match=f"no complex tensor has parts in torch.{dtype}: use float16"):
            kept(x, dtype=dtype)
        return
    found = kept(x, dtype=dtype)
    parts = [part.to(getattr(torch, dtype)) for part in (x.real, x.imag)]
    assert found.is_complex()
    assert torch.equal(torch.view_as_real(found), torch.stack(parts, -1))


def test_rows_are_chosen_before_they_are_reduced() -> None:
    x = torch.arange(20.0).reshape(5, 4)
    numbers = torch.arange(5)
    found = kept((x, numbers), keep={"every": 2}, reduce="mean", dtype="float64")
    assert torch.equal(found[0], x[::2].mean(1).double())
    assert torch.equal(found[1], numbers[::2])


def test_a_batch_without_a_chosen_sample_is_not_stored() -> None:
    action = Capture(keep={"every": 2})
    site = FakeSite(action)
    action.build(site)(torch.empty(0, 3))
    assert site.kept == []


@pytest.mark.parametrize(
    ("reduce", "said"),
    [
        ({"mean": [5]}, "has no dimension 5"),
        ({"norm": -3}, "has no dimension -3"),
        ({"topk": 9}, "fewer than 9"),
    ],
    ids=str,
)
def test_an_impossible_reduction_is_refused_by_name(reduce: Any, said: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    spec = {"h": {"select": "0", "hook": "forward", "action": "capture", "reduce": reduce}}
    says = rf"'h' \(forward, capture\) on 0: reduce: .*\[2, 3\] .*{said}"
    with pytest.raises(hookrun.HookError, match=says), hookrun.hooked(model, spec):
        model(torch.ones(2, 4))
    with pytest.raises(hookrun.CompileError, match=said):
        hookrun.compile(spec, model, example=((torch.ones(2, 4),), {}))


def test_a_reduced_value_is_detached() -> None:
    assert not kept(X.clone().requires_grad_(), reduce="mean").requires_grad


BAD = {
    "reduce": [
        {},
        {"mean": 1, "norm": 1},
        {"median": 1},
        {"topk": 0},
        {"project": 1.5},
        {"mean": []},
        "median",
    ],
    "keep": [{}, {"every": 0}, {"every": 2, "reservoir": 3}, "all", {"first": 3}],
}


@pytest.mark.parametrize(
    ("key", "bad"), [(key, bad) for key, values in BAD.items() for bad in values], ids=str
)
def test_a_reduction_or_a_choice_is_one_of_those_it_may_be(key: str, bad: Any) -> None:
    with pytest.raises(ValidationError, match=key):
        Capture(**{key: bad})


@pytest.mark.parametrize(
    ("keep", "said"), [({"every": 2}, "every 2"), ({"reservoir": 9}, "reservoir 9")], ids=str
)
def test_its_text_names_the_choice(keep: Any, said: str) -> None:
    assert str(Capture(keep=keep).keep) == said


def test_a_part_of_the_rows_has_all_their_columns() -> None:
    columns = [torch.arange(start, start + 3) for start in (0, 10, 20, 30, 40)]
    picked = torch.tensor([2, 0])
    part = TokenRows(*columns).at(picked)
    for name, column in zip(TokenRows.__slots__, columns, strict=True):
        assert torch.equal(getattr(part, name), column[picked]), name
    assert TokenRows(*columns[:4]).at(picked).keys is None
