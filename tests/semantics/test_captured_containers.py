"""A capture copies a value's containers too, or refuses an unknown object by name: captures do not change later."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

import hookrun
from hookrun.prove.trial import compile_plan
from hookrun.runtime.snapshot import held, snapshot

CAPTURE: dict[str, Any] = {"h": {"select": "", "hook": "forward", "action": "capture"}}


def captured(value: Any, change: Callable[[Any], object], spec: dict[str, Any] = CAPTURE) -> Any:
    """The capture of a value that is changed afterwards."""
    model = nn.Identity()
    with hookrun.hooked(model, spec) as hooks:
        model(value)
        with torch.no_grad():
            change(value)
    (kept,) = hooks.captures["h"][""]
    return kept


@dataclass
class Plain:
    x: Tensor
    notes: list[int] = field(default_factory=lambda: [1])


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    notes: list[int] = field(default_factory=lambda: [1])


@dataclass(slots=True)
class Slots:
    x: Tensor
    notes: list[int] = field(default_factory=lambda: [1])


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Tensor
    notes: list[int] = field(default_factory=lambda: [1])


Pair = namedtuple("Pair", ["x", "notes"])


class Registered:
    """A container that is registered with torch's pytree."""

    def __init__(self, x: Tensor, notes: list[int]) -> None:
        self.x = x
        self.notes = notes


pytree.register_pytree_node(
    Registered,
    lambda each: ([each.x, each.notes], None),
    lambda children, _: Registered(*children),
)

CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[[Any], list[int]]]] = {
    "list": (lambda x: [x, [1]], lambda v: v[0], lambda v: v[1]),
    "tuple": (lambda x: (x, [1]), lambda v: v[0], lambda v: v[1]),
    "deque": (lambda x: deque([x, [1]], maxlen=5), lambda v: v[0], lambda v: v[1]),
    "dict": (lambda x: {"x": x, "notes": [1]}, lambda v: v["x"], lambda v: v["notes"]),
    "OrderedDict": (lambda x: OrderedDict(x=x, notes=[1]), lambda v: v["x"], lambda v: v["notes"]),
    "defaultdict": (lambda x: defaultdict(list, x=x, notes=[1]), lambda v: v["x"], lambda v: v["notes"]),
    "UserDict": (lambda x: UserDict(x=x, notes=[1]), lambda v: v["x"], lambda v: v["notes"]),
    "mapping proxy": (lambda x: MappingProxyType({"x": x, "notes": [1]}), lambda v: v["x"], lambda v: v["notes"]),
    "named tuple": (lambda x: Pair(x, [1]), lambda v: v.x, lambda v: v.notes),
    "dataclass": (Plain, lambda v: v.x, lambda v: v.notes),
    "frozen dataclass": (Frozen, lambda v: v.x, lambda v: v.notes),
    "dataclass with slots": (Slots, lambda v: v.x, lambda v: v.notes),
    "frozen dataclass with slots": (FrozenSlots, lambda v: v.x, lambda v: v.notes),
    "registered pytree": (lambda x: Registered(x, [1]), lambda v: v.x, lambda v: v.notes),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_captured_container_is_copied_with_tensors_and_plain_members(kind: str) -> None:
    make, tensor_of, notes_of = CONTAINERS[kind]
    value = make(torch.ones(3, requires_grad=True) * 1)

    def change(value: Any) -> None:
        tensor_of(value).add_(1)
        notes_of(value).append(2)

    kept = captured(value, change)
    assert type(kept) is type(value) and kept is not value
    assert tensor_of(kept).tolist() == [1.0] * 3 and not tensor_of(kept).requires_grad
    assert notes_of(kept) == [1]
    assert notes_of(value) == [1, 2] and tensor_of(value).tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda v: v.append(2)),
        ({"a": [1]}, lambda v: v["a"].append(2)),
        ([], lambda v: v.append(1)),
        ({1, 2}, lambda v: v.add(3)),
        (bytearray(b"ab"), lambda v: v.extend(b"c")),
        (np.ones(3), lambda v: v.fill(2)),
        ([np.ones(3), {"a": (1, [2])}], lambda v: (v[0].fill(2), v[1]["a"][1].append(3))),
    ],
)
def test_containers_without_tensors_are_copied_too(value: Any, change: Callable[[Any], object]) -> None:
    expected = repr(value)
    assert repr(captured(value, change)) == expected
    assert repr(value) != expected


class Colour(enum.Enum):
    RED = 1


def test_a_capture_keeps_plain_values_unchanged() -> None:
    value = [
        None,
        True,
        1,
        2.5,
        1j,
        "a",
        b"b",
        torch.float32,
        torch.device("cpu"),
        torch.Size([1]),
        Colour.RED,
        len,
    ]
    kept = captured(value, lambda value: value.clear())
    assert len(kept) == 12 and kept[:3] == [None, True, 1] and kept[-2:] == [Colour.RED, len]


def test_a_captured_packed_sequence_does_not_follow_later_writes() -> None:
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    kept = captured(packed, lambda value: value.data.zero_())
    assert isinstance(kept, PackedSequence) and bool((kept.data == 1).all())
    assert kept.batch_sizes.tolist() == [2, 2, 1]


def test_a_tensor_that_occurs_twice_in_a_value_is_kept_once() -> None:
    x = torch.ones(3)
    kept = captured({"last": x, "all": (x, x)}, lambda value: value["last"].zero_())
    assert kept["last"] is kept["all"][0] is kept["all"][1] and kept["last"].tolist() == [1.0] * 3


# ---- transformers ----------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=16)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def test_a_captured_cache_is_detached_and_does_not_grow() -> None:
    model = gpt2()
    ids = torch.arange(4).reshape(1, 4)
    with hookrun.hooked(model, CAPTURE) as hooks:
        out = model(ids, use_cache=True)
        cache = out.past_key_values
        expected = cache.layers[0].keys.detach().clone()
        model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
    first, second = (kept.past_key_values for kept in hooks.captures["h"][""])
    assert type(first) is type(cache) and first is not cache
    assert first.get_seq_length() == 4 and second.get_seq_length() == 5 == cache.get_seq_length()
    torch.testing.assert_close(first.layers[0].keys, expected, rtol=0, atol=0)
    for kept in (first, second):
        assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in held(kept))
        assert len(list(held(kept))) >= 4
    assert cache.layers[0].keys.grad_fn is not None  # the model's own cache stays in the graph


def test_a_captured_encoder_decoder_cache_does_not_grow() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    first, second = cache_utils.DynamicCache(), cache_utils.DynamicCache()
    first.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    both = cache_utils.EncoderDecoderCache(first, second)
    kept = snapshot(both)
    first.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    assert kept.self_attention_cache.get_seq_length() == 2 and first.get_seq_length() == 3


def test_dtype_applies_to_the_tensors_inside_a_cache() -> None:
    spec = {"h": {**CAPTURE["h"], "dtype": "float16"}}
    model = gpt2()
    with hookrun.hooked(model, spec) as hooks:
        model(torch.arange(4).reshape(1, 4), use_cache=True)
    cache = hooks.captures["h"][""][0].past_key_values
    assert cache.layers[1].values.dtype == torch.float16


def test_a_cache_can_be_captured_from_arguments_and_through_a_target() -> None:
    model = gpt2()
    spec = {
        "h": {"select": "transformer.h.1", "hook": "forward_pre", "action": "capture"},
        "k": {**CAPTURE["h"], "target": "past_key_values.layers[1].keys"},
    }
    with hookrun.hooked(model, spec) as hooks:
        out = model(torch.arange(4).reshape(1, 4), use_cache=True)
    assert len(hooks.captures["h"]["transformer.h.1"]) == 1
    torch.testing.assert_close(hooks.captures["k"][""], [out.past_key_values.layers[1].keys.detach()])


# ---- what is refused -------------------------------------------------------------------------------------------


class Opaque:
    """An object that is not registered with torch's pytree."""

    def __init__(self, x: Tensor) -> None:
        self.logits = x


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "at", "hint"),
    [
        (Opaque, None, "target: logits"),
        (lambda x: (x, Opaque(x)), "[1]", "target: [1].logits"),
        (lambda x: {"a": [Opaque(x)]}, "a[0]", "target: a[0].logits"),
        (lambda x: (x, object()), "[1]", "target: [0]"),
        (lambda x: iter([x]), None, "`target:`"),
        (lambda x: nn.Linear(1, 1), None, "`target:`"),
        (lambda x: np.array([x, None], dtype=object), None, "`target:`"),
    ],
)
def test_an_object_that_cannot_be_copied_is_refused_by_name(make: Any, at: str | None, hint: str) -> None:
    model = nn.Sequential(Returns(make))
    spec = {"h": {"select": "0", "hook": "forward", "action": "capture"}}
    with (
        hookrun.hooked(model, spec) as hooks,
        pytest.raises(
            hookrun.HookError, match=r"hook 'h' \(forward, capture\) on 0: it cannot copy the "
        ) as error,
    ):
        model(torch.ones(2))
    kind = type(make(torch.ones(2)) if at is None else Opaque(torch.ones(1)))
    assert kind.__name__ in str(error.value) or "object" in str(error.value)
    assert hint in str(error.value) and (at is None or repr(at) in str(error.value))
    assert hooks.captures["h"]["0"] == []


def test_with_an_example_an_object_that_cannot_be_copied_is_refused_at_compile_time() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Returns(Opaque))
    spec = hookrun.load_spec({"h": {"select": "1", "hook": "forward", "action": "capture"}})
    with pytest.raises(hookrun.CompileError, match=r"on 1: it cannot copy the Opaque.*target: logits"):
        compile_plan(spec, model, example=((torch.ones(1, 2),), {}))


def test_the_target_that_the_error_suggests_works() -> None:
    model = nn.Sequential(Returns(lambda x: (1, Opaque(x))))
    spec = {"h": {"select": "0", "hook": "forward", "action": "capture", "target": "[1].logits"}}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(2))
    assert hooks.captures["h"]["0"][0].tolist() == [1.0, 1.0]


def test_an_edit_never_replaces_an_attribute_of_an_unknown_object() -> None:
    model = nn.Sequential(Returns(Opaque))
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0, "target": "logits"}}
    with (
        hookrun.hooked(model, spec),
        pytest.raises(hookrun.HookError, match=r"'logits' is not in the Opaque"),
    ):
        model(torch.ones(2))
