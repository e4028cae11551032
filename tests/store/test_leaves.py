"""Every tensor in a captured value has a path that `target` understands."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hookrun.store.leaves import leaves

a, b, c = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclass
class Output:
    loss: Tensor | None
    states: Any
    cached: bool = True


class ModelOutput(OrderedDict[str, Any]):
    """Some libraries' outputs are dicts and dataclasses at once."""


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (a, [""]),
        ((a, b), ["[0]", "[1]"]),
        ([a, [b, c]], ["[0]", "[1][0]", "[1][1]"]),
        ({"logits": a, "a key": b, 3: c}, ["logits", "['a key']", "[3]"]),
        ({"a key": (a, b)}, ["['a key'][0]", "['a key'][1]"]),
        ((Pair(a, (b, c)),), ["[0].logits", "[0].hidden[0]", "[0].hidden[1]"]),
        (Output(a, {"last": b}), ["loss", "states.last"]),
        (Output(None, (None, b)), ["states[1]"]),
        (ModelOutput(logits=a, hidden=(b,)), ["logits", "hidden[0]"]),
        ({"it's": a, 'say "x"': b}, ['["it\'s"]', "['say \"x\"']"]),
        ((a, None, 3, "text", True), ["[0]"]),
        (None, []),
        ((), []),
    ],
)
def test_the_path_says_where_the_tensor_stands(value: object, paths: list[str]) -> None:
    assert [path for path, _ in leaves(value)] == paths


def test_the_tensors_are_the_value_s_own() -> None:
    assert [tensor for _, tensor in leaves({"x": (a, [b]), "y": c})] == [a, b, c]


def test_a_number_and_a_text_as_keys_are_two_places() -> None:
    assert [path for path, _ in leaves({0: a, "0": b})] == ["[0]", "['0']"]
