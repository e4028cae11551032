"""Tensors are replaced inside containers that others may hold too, and restored under their keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hookrun.runtime.hooks.places import Placed, exchange, place, put_back


@dataclass(frozen=True)
class Frozen:
    x: Tensor


def test_members_are_replaced_in_place_except_in_tuples() -> None:
    a, b, new = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    value = {"list": [a, b], "tuple": (a, b), "frozen": Frozen(a)}
    inner = value["list"]
    assert exchange(value, {id(a): new}) is value and value["list"] is inner
    assert value["list"] == [new, b] and value["tuple"] == (new, b)
    assert isinstance(value["frozen"], Frozen) and value["frozen"].x is new
    assert exchange(b, {id(a): new}) is b


def test_tensors_are_restored_where_the_new_ones_still_are() -> None:
    a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
    plain, news, placed = torch.zeros(1), [torch.ones(1), torch.ones(1)], list[Placed]()
    value = {"a": a, "b": b, "plain": plain}
    place(value, iter(news), placed)
    assert value["a"] is news[0] and value["b"] is news[1] and value["plain"] is plain
    value["moved"] = value.pop("a")
    value["b"] = plain  # other code has written there in the meantime
    put_back(placed)
    assert value["moved"] is a and value["b"] is plain
