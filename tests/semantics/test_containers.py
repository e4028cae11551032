"""Containers keep their type; an edit changes the selected tensors alone, and a capture copies the container too."""

from __future__ import annotations

import enum
import inspect
import random
from array import array
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hooking import captured, one_hook
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import random_model
from small_nets import Net
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import hookrun
from hookrun.engine.runtime.snapshot import held, snapshot

Point = namedtuple("Point", ["x", "y"])


class Typed(NamedTuple):
    hidden: Tensor
    cache: Any = None


@dataclass
class Plain:
    logits: Tensor
    states: Any = None
    count: int = 0


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    states: Any = None
    derived: int = field(init=False, default=7)


@dataclass(slots=True)
class Slots:
    logits: Tensor
    states: Any = None


class Config(dict[str, Any]):
    """A dictionary with an attribute."""

    note = "kept"


DOUBLE = {"select": "inner", "hook": "forward", "action": "scale", "factor": 2}


# ---- every type

Make = Callable[[Callable[[float], Tensor]], Any]
"""Makes a value whose floating-point tensors are those that a function gives for a number."""


def t(number: float) -> Tensor:
    return torch.full((2,), float(number))


VALUES: dict[str, Make] = {
    "tensor": lambda t: t(1),
    "tuple": lambda t: (t(1), t(2)),
    "list": lambda t: [t(1), None, t(2)],
    "dict": lambda t: {"a": t(1), "b": {"c": t(2)}},
    "ordered dict": lambda t: OrderedDict(b=t(1), a=t(2)),
    "default dict": lambda t: defaultdict(list, a=t(1)),
    "own dict": lambda t: Config(a=t(1)),
    "namedtuple": lambda t: Point(t(1), t(2)),
    "typed namedtuple": lambda t: Typed(t(1), [t(2)]),
    "dataclass": lambda t: Plain(t(1), (t(2), t(3)), 4),
    "frozen dataclass": lambda t: Frozen(t(1), {"k": t(2)}),
    "slots": lambda t: Slots(t(1), [t(2)]),
    "torch's own": lambda t: torch.stack([t(1), t(3)]).max(dim=0),
    "mixture": lambda t: {"x": [Typed(t(1), Frozen(t(2), (None, t(3))))], "y": (Plain(t(4)), "text", 5)},
}


@pytest.mark.parametrize("name", VALUES)
def test_every_tensor_of_every_container_is_edited(name: str) -> None:
    assert_all_doubled(VALUES[name])


def test_attributes_of_container_subclasses_stay() -> None:
    value = Config(a=t(1))
    value.note = "mine"  # type: ignore[misc]
    found = edited(value)
    assert type(found) is Config
    assert found.note == "mine"
    assert found["a"].tolist() == [2.0, 2.0]
    assert edited(defaultdict(list, a=t(1)))["missing"] == []
    assert edited(Frozen(t(1))).derived == 7


def test_a_model_output_of_hugging_face_stays_consistent() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="transformers is not installed")
    value = outputs.BaseModelOutput(last_hidden_state=t(1), hidden_states=(t(2), t(3)))
    found = edited(value)
    assert type(found) is type(value)
    assert_close(found.last_hidden_state, t(2))
    assert found.last_hidden_state is found["last_hidden_state"] is found[0]
    assert_close(found.hidden_states, (t(4), t(6)))
    assert found.hidden_states is found["hidden_states"]
    one = edited(value, target="hidden_states[-1]")
    assert_close([one.last_hidden_state, *one.hidden_states], [t(1), t(2), t(6)])
    assert one["hidden_states"] is one.hidden_states
    assert_close(value.hidden_states, (t(2), t(3)))


# ---- random nestings


def made_of(kind: Callable[..., Any], *makes: Make) -> Make:
    return lambda t: kind(*(make(t) for make in makes))


def nestings() -> st.SearchStrategy[Make]:
    leaf = st.one_of(
        st.integers(0, 9).map(lambda number: lambda t: t(number)),
        st.integers(0, 9).map(lambda number: lambda _: torch.full((2,), number)),  # integers are not edited
        st.sampled_from([None, "text", 3]).map(lambda plain: lambda _: plain),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda makes: lambda t: [make(t) for make in makes]),
            st.lists(inner, min_size=1, max_size=3).map(
                lambda makes: lambda t: tuple(make(t) for make in makes)
            ),
            st.dictionaries(st.sampled_from(["a", "b c", "0", "d.e"]), inner, min_size=1, max_size=3).map(
                lambda makes: lambda t: {key: make(t) for key, make in makes.items()}
            ),
            st.tuples(inner, inner).map(lambda makes: made_of(Point, *makes)),
            *(inner.map(partial(made_of, kind, lambda t: t(1))) for kind in (Plain, Frozen)),
        ),
        max_leaves=8,
    )


@given(nestings())
@settings(max_examples=200, deadline=None)
def test_in_any_nesting_only_floating_point_tensors_are_edited(make: Make) -> None:
    assert_all_doubled(make)


def paths(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """(target, tensor) for every tensor in a value."""
    match value:
        case Tensor():
            return [(path, value)]
        case dict():
            members = [(f"[{key!r}]", member) for key, member in value.items()]
        case Point():
            members = [(f".{name}" if path else name, getattr(value, name)) for name in value._fields]
        case tuple() | list():
            members = [(f"[{number}]", member) for number, member in enumerate(value)]
        case Plain() | Frozen():
            members = [(f".{name}" if path else name, getattr(value, name)) for name in ("logits", "states")]
        case _:
            return []
    return [found for name, member in members for found in paths(member, path + name)]


@given(nestings(), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_a_target_edits_one_tensor_alone(make: Make, seed: int) -> None:
    value = make(t)
    named = [each for each in paths(value) if each[0] and each[1].is_floating_point()]
    if not named:
        return
    target, chosen = random.Random(seed).choice(named)
    before = {path: tensor.clone() for path, tensor in paths(value)}
    found = dict(paths(edited(value, target=target)))
    for path, tensor in paths(value):
        if path == target:
            assert_close(found[path], chosen * 2)
        else:
            assert found[path] is tensor
        assert torch.equal(tensor, before[path])


# ---- arguments


class Keywords(nn.Module):
    def forward(
        self, x: Tensor, /, y: Tensor, *, scale: Tensor, mask: Tensor | None = None, **rest: Tensor
    ) -> Tensor:
        total = x + 10 * y + 100 * scale + 1000 * sum(rest.values())
        return total if mask is None else total * mask


@pytest.mark.parametrize(
    ("target", "weights"),
    [
        ("[0]", (2, 1, 1, 1)),
        ("y", (1, 2, 1, 1)),
        ("scale", (1, 1, 2, 1)),
        ("extra", (1, 1, 1, 2)),
        (None, (2,) * 4),
    ],
    ids=str,
)
def test_a_target_names_arguments_by_position_or_keyword(
    target: str | None, weights: tuple[int, ...]
) -> None:
    model = Net(lambda m, x: m.inner(x, y=x, scale=x, extra=x, mask=None), inner=Keywords())
    spec = {**DOUBLE, "hook": "forward_pre"} | ({"target": target} if target else {})
    with hookrun.hooked(model, {"h": spec}):
        found = model(t(1))
    assert_close(found, t(sum(w * 10**n for n, w in enumerate(weights))))


def test_forward_pre_sees_calls_with_keyword_arguments_only() -> None:
    model = Net(lambda _, *, a, b: a - b)
    spec = {
        "double": {"select": "", "hook": "forward_pre", "target": "b", "action": "scale", "factor": 2},
        "seen": {"select": "", "hook": "forward_pre", "action": "capture"},
    }
    with hookrun.hooked(model, spec) as hooks:
        assert_close(model(a=t(5), b=t(1)), t(3))
    assert_close(hooks.captures["seen"][""], [{"a": t(5), "b": t(2)}])


# ---- what is refused or copied


@pytest.mark.parametrize(
    "hook",
    [
        {"action": "add_bias", "value": [1, 2, 3]},
        {"action": "scale", "factor": [[1], [2], [3], [4]]},
        {"action": "replace", "value": [[1, 2], [3, 4]], "index": "0"},
        {"action": "linear"},
    ],
    ids=lambda hook: hook["action"],
)
def test_a_changed_shape_names_the_module(hook: dict[str, Any]) -> None:
    """At run time without an example, else when the plan is compiled."""

    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, :1]

    model = nn.Sequential(Halved(2, 2))
    spec = one_hook("0", **hook)
    refused = pytest.raises(hookrun.HookrunError, match=r"hook 'h' \(forward, \w+\) on 0: .*shape")
    with refused, hookrun.hooked(model, spec):
        model(torch.ones(2, 2))
    with pytest.raises(hookrun.CompileError, match="shape"):
        hookrun.compile(spec, model, example=((torch.ones(2, 2),), {}))


def test_an_edited_packed_sequence_stays_a_packed_sequence() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    by_hand = nn.utils.rnn.pack_sequence([2 * torch.ones(3, 2), 2 * torch.ones(1, 2)])
    found = edited(packed, target="data")
    lstm = nn.LSTM(2, 2)
    assert type(found) is type(packed)
    assert_close(found.data, packed.data * 2)
    assert_close(lstm(found)[0].data, lstm(by_hand)[0].data)


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    logits: Tensor
    states: Any


class Registered:
    """A container that is registered with torch's pytree."""

    def __init__(self, x: Tensor, notes: list[int]) -> None:
        self.x = x
        self.notes = notes


pytree.register_pytree_node(
    Registered, lambda each: ([each.x, each.notes], type(each)), lambda children, kind: kind(*children)
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
    "named tuple": (lambda x: Point(x, [1]), lambda v: v.x, lambda v: v.y),
    "dataclass": (lambda x: Plain(x, [1]), lambda v: v.logits, lambda v: v.states),
    "frozen dataclass": (lambda x: Frozen(x, [1]), lambda v: v.logits, lambda v: v.states),
    "dataclass with slots": (lambda x: Slots(x, [1]), lambda v: v.logits, lambda v: v.states),
    "frozen dataclass with slots": (lambda x: FrozenSlots(x, [1]), lambda v: v.logits, lambda v: v.states),
    "registered pytree": (lambda x: Registered(x, [1]), lambda v: v.x, lambda v: v.notes),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_captured_container_keeps_plain_members(kind: str) -> None:
    make, tensor_of, notes_of = CONTAINERS[kind]
    value = make(torch.ones(3, requires_grad=True) * 1)

    def change(value: Any) -> None:
        tensor_of(value).add_(1)
        notes_of(value).append(2)

    kept = kept_of(value, change)
    assert type(kept) is type(value)
    assert kept is not value
    assert tensor_of(kept).tolist() == [1.0] * 3
    assert not tensor_of(kept).requires_grad
    assert notes_of(kept) == [1]
    assert notes_of(value) == [1, 2]
    assert tensor_of(value).tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda v: v.append(2)),
        ({"a": [1]}, lambda v: v["a"].append(2)),
        ([], lambda v: v.append(1)),
        ({1, 2}, lambda v: v.add(3)),
        (bytearray(b"ab"), lambda v: v.extend(b"c")),
        (deque([1], maxlen=3), lambda v: v.append(2)),
        ([frozenset({1})], lambda v: v.append(2)),
        (np.arange(3, dtype=np.float16), lambda v: v.fill(2)),
        (array("h", [1, 2]), lambda v: v.append(3)),
        ([np.ones(3), {"a": (1, [2])}], lambda v: (v[0].fill(2), v[1]["a"][1].append(3))),
    ],
)
def test_containers_without_tensors_are_copied_too(value: Any, change: Callable[[Any], object]) -> None:
    expected = repr(value)
    assert repr(kept_of(value, change)) == expected
    assert repr(value) != expected


class Colour(enum.Enum):
    RED = 1


def test_a_capture_keeps_plain_values_unchanged() -> None:
    of_torch = [torch.float32, torch.device("cpu"), torch.Size([1])]
    value = [None, True, 1, 2.5, 1j, "a", b"b", *of_torch, Colour.RED, len]
    kept = kept_of(value, lambda value: value.clear())
    assert len(kept) == 12
    assert kept[:3] == [None, True, 1]
    assert kept[-2:] == [Colour.RED, len]


def test_a_captured_packed_sequence_does_not_follow_later_writes() -> None:
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    kept = kept_of(packed, lambda value: value.data.zero_())
    assert isinstance(kept, PackedSequence)
    assert bool((kept.data == 1).all())
    assert kept.batch_sizes.tolist() == [2, 2, 1]


def test_a_tensor_that_occurs_twice_in_a_value_is_kept_once() -> None:
    x = torch.ones(3)
    kept = kept_of({"last": x, "all": (x, x)}, lambda value: value["last"].zero_())
    assert kept["last"] is kept["all"][0] is kept["all"][1]
    assert kept["last"].tolist() == [1.0] * 3


# ---- transformers ----------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    pytest.importorskip("transformers")
    return random_model("gpt2", "eager")


def cache_name(model: nn.Module) -> str:
    """The name of the KV cache among the arguments and in the output, which transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def test_a_captured_cache_does_not_grow() -> None:
    model = gpt2()
    ids = torch.arange(4).reshape(1, 4)
    name = cache_name(model)
    with hookrun.hooked(model, one_hook()) as hooks:
        cache = model(ids, use_cache=True)[name]
        expected = cache.layers[0].keys.detach().clone()
        model(torch.tensor([[5]]), use_cache=True, **{name: cache})
    first, second = (kept[name] for kept in hooks.captures["h"][""])
    assert type(first) is type(cache)
    assert first is not cache
    assert first.get_seq_length() == 4
    assert second.get_seq_length() == 5 == cache.get_seq_length()
    assert torch.equal(first.layers[0].keys, expected)
    for kept in (first, second):
        for tensor in held(kept):
            assert tensor.grad_fn is None
            assert not tensor.requires_grad
        assert len(list(held(kept))) >= 4
    assert cache.layers[0].keys.grad_fn is not None  # the model's own cache stays in the graph


def test_a_captured_encoder_decoder_cache_does_not_grow() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    first = cache_utils.DynamicCache()
    second = cache_utils.DynamicCache()
    first.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    both = cache_utils.EncoderDecoderCache(first, second)
    kept = snapshot(both)
    first.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    assert kept.self_attention_cache.get_seq_length() == 2
    assert first.get_seq_length() == 3


def test_a_cache_can_be_captured_through_a_target() -> None:
    model = gpt2()
    name = cache_name(model)
    spec = {
        "h": {"select": "transformer.h.1", "hook": "forward_pre", "action": "capture"},
        "k": {"select": "", "hook": "forward", "action": "capture", "target": f"{name}.layers[1].keys"},
        "half": {"select": "", "hook": "forward", "action": "capture", "dtype": "float16"},
    }
    with hookrun.hooked(model, spec) as hooks:
        out = model(torch.arange(4).reshape(1, 4), use_cache=True)
    assert len(hooks.captures["h"]["transformer.h.1"]) == 1
    assert hooks.captures["half"][""][0][name].layers[1].values.dtype == torch.float16
    assert torch.equal(hooks.captures["k"][""][0], out[name].layers[1].keys)


# ---- what is refused -------------------------------------------------------------------------------------------


class Opaque:
    """An object that is not registered with torch's pytree."""

    def __init__(self, x: Tensor) -> None:
        self.logits = x


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
    model = nn.Sequential(Net(lambda _, x: make(x)))
    refused = pytest.raises(
        hookrun.HookError, match=r"hook 'h' \(forward, capture\) on 0: it cannot copy the "
    )
    with hookrun.hooked(model, one_hook("0")) as hooks, refused as error:
        model(torch.ones(2))
    said = str(error.value)
    kind = type(make(torch.ones(2))) if at is None else Opaque
    assert kind.__name__ in said or "object" in said
    assert hint in said
    assert at is None or repr(at) in said
    assert hooks.captures["h"]["0"] == []


def test_an_object_that_cannot_be_copied_is_refused_early() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Net(lambda _, x: Opaque(x)))
    with pytest.raises(hookrun.CompileError, match=r"on 1: it cannot copy the Opaque.*target: logits"):
        hookrun.compile(one_hook("1"), model, example=((torch.ones(1, 2),), {}))


def test_the_target_that_the_error_suggests_works() -> None:
    model = Net(lambda _, x: (1, Opaque(x)))
    assert captured(model, torch.ones(2), target="[1].logits")[0].tolist() == [1.0, 1.0]


def test_an_edit_replaces_no_attribute_of_unknown_objects() -> None:
    model = Net(lambda _, x: Opaque(x))
    refused = pytest.raises(hookrun.HookError, match=r"'logits' is not in the Opaque")
    with hookrun.hooked(model, one_hook("", "forward", "scale", factor=2.0, target="logits")), refused:
        model(torch.ones(2))


def outer() -> nn.Module:
    """A model whose module returns its argument."""
    return nn.Sequential(OrderedDict(inner=nn.Identity()))


def edited(value: Any, **keys: Any) -> Any:
    model = outer()
    with hookrun.hooked(model, {"h": {**DOUBLE, **keys}}):
        return model(value)


def kept_of(value: Any, change: Callable[[Any], object] = lambda value: None) -> Any:
    """The capture of a value that is changed afterwards."""
    model = nn.Identity()
    with hookrun.hooked(model, one_hook()) as hooks:
        model(value)
        with torch.no_grad():
            change(value)
    (kept,) = hooks.captures["h"][""]
    return kept


def assert_all_doubled(make: Make) -> None:
    """Assert that an edit doubles each tensor of a value, keeps all types, and does not write to the value."""
    value = make(t)
    found = edited(value)
    assert type(found) is type(value)
    assert repr(found) == repr(make(lambda number: t(2 * number)))
    assert repr(value) == repr(make(t))
