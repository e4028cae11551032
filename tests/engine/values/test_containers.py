"""Values as hooks see them: read and rebuilt by path, and never changed in place."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hookrun.engine.values.containers import (
    Placed,
    TargetError,
    arguments,
    call_with,
    describe,
    differentiable,
    exchange,
    get,
    leaves,
    place,
    put,
    put_back,
    readable,
    rebuild,
    reshaped,
    unwrapped,
)

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


def value() -> Any:
    one = torch.ones(2)
    two = torch.zeros(3)
    return OrderedDict(a=Pair(one, [two, None]), b=Frozen(one), c=torch.ones(2, 2).max(0))


def test_every_tensor_has_a_path() -> None:
    whole = value()
    new = torch.full((1,), 7.0)
    before = copy.copy(whole)
    paths = [path for path, leaf in leaves(whole) if isinstance(leaf, Tensor)]
    assert paths == ["a.left", "a.right[0]", "b.x", "c.values", "c.indices"]
    for path in paths:
        keys = [
            int(key) if key.isdigit() else key for key in path.replace("[", ".").replace("]", "").split(".")
        ]
        changed = put(whole, keys, new)
        assert get(changed, keys) is new, path
        assert get(whole, keys) is not new, path
        assert type(changed) is OrderedDict
        assert type(changed["a"]) is Pair
        assert type(changed["b"]) is Frozen
        others = [found for other, found in leaves(changed) if other != path]
        kept = [found for other, found in leaves(whole) if other != path]
        assert all(one is other for one, other in zip(others, kept, strict=True)), path
    assert put(whole, ["a", -1, 0], new)["a"].right[0] is new
    assert put(whole, [], new) is new
    assert whole == before
    for wrong, said in ((["a", "lft"], "left"), (["a", "right", 2], "right"), (["b", "x", 0], "no members")):
        with pytest.raises(TargetError, match=said):
            get(whole, wrong)


def test_an_unchanged_value_is_the_same_object() -> None:
    whole = value()
    assert rebuild(whole, lambda leaf: leaf) is whole
    doubled = rebuild(whole, lambda leaf: leaf * 2 if isinstance(leaf, Tensor) else leaf)
    assert doubled["a"].right[1] is None
    assert doubled["b"].x.tolist() == [2, 2]
    assert doubled is not whole


def test_a_call_becomes_one_value() -> None:
    for args, kwargs in (((1, 2), {}), ((1,), {"x": 3}), ((), {"x": 3})):
        assert call_with(arguments(args, kwargs)) == (args, kwargs)
    assert unwrapped((1,)) == 1
    assert unwrapped((1, 2)) == (1, 2)
    assert unwrapped({"a": (1,), "b": 2}) == {"a": 1, "b": 2}


def test_a_replacement_of_another_structure_is_an_error() -> None:
    x = torch.ones(2, 3)
    assert reshaped(x, x * 2) is None
    assert reshaped(x, x[:1]) == "the action changes the shape from [2, 3] to [1, 3]"
    assert "dtype from torch.float32 to torch.float64" in str(reshaped(x, x.double()))
    assert "device from cpu to meta" in str(reshaped(x, x.to("meta")))
    assert describe((x, {"h": x[0]}, None)) == "([2, 3], {h: [3]}, None)"


def test_under_vmap_the_whole_batch_is_read() -> None:
    seen = list[torch.Tensor | None]()

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(readable(x))
        return x

    batch = torch.arange(6.0).reshape(2, 3)
    torch.vmap(noted, in_dims=1)(batch)
    (found,) = seen
    assert found is not None
    assert found.tolist() == batch.T.tolist()
    assert readable(torch.ones(1, device="meta")) is None
    assert differentiable(torch.ones(1)).requires_grad
    assert differentiable(torch.ones(1), leaf=True).is_leaf
    assert not differentiable(torch.ones(1, dtype=torch.int64)).requires_grad
    assert differentiable("x") == "x"


def test_members_are_replaced_in_place_except_in_tuples() -> None:
    a = torch.zeros(1)
    b = torch.ones(1)
    new = torch.full((1,), 2.0)
    value = {"list": [a, b], "tuple": (a, b), "frozen": Frozen(a)}
    inner = value["list"]
    assert exchange(value, {id(a): new}) is value
    assert value["list"] is inner
    assert value["list"] == [new, b]
    assert value["tuple"] == (new, b)
    assert isinstance(value["frozen"], Frozen)
    assert value["frozen"].x is new
    assert exchange(b, {id(a): new}) is b


def test_tensors_are_restored_where_the_new_ones_still_are() -> None:
    a = torch.zeros(1, requires_grad=True)
    b = torch.zeros(1, requires_grad=True)
    plain = torch.zeros(1)
    news = [torch.ones(1), torch.ones(1)]
    placed = list[Placed]()
    value = {"a": a, "b": b, "plain": plain}
    place(value, iter(news), placed)
    assert value["a"] is news[0]
    assert value["b"] is news[1]
    assert value["plain"] is plain
    value["moved"] = value.pop("a")
    value["b"] = plain  # other code has written there in the meantime
    put_back(placed)
    assert value["moved"] is a
    assert value["b"] is plain
