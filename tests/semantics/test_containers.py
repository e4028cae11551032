"""Containers keep their type, and an edit changes only the tensors that it selects."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun
from hookrun.actions import actions
from hookrun.hook_types import FORWARD

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


class Returns(nn.Module):
    """Returns its argument."""

    def forward(self, value: Any) -> Any:
        return value


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Returns()

    def forward(self, value: Any) -> Any:
        return self.inner(value)


DOUBLE = {"select": "inner", "hook": "forward", "action": "scale", "factor": 2}


def edited(value: Any, **keys: Any) -> Any:
    model = Outer()
    with hookrun.hooked(model, {"h": {**DOUBLE, **keys}}):
        return model(value)


# ---- every type


def t(number: float) -> Tensor:
    return torch.full((2,), float(number))


VALUES: dict[str, Any] = {
    "tensor": lambda: t(1),
    "tuple": lambda: (t(1), t(2)),
    "list": lambda: [t(1), None, t(2)],
    "dict": lambda: {"a": t(1), "b": {"c": t(2)}},
    "ordered dict": lambda: OrderedDict(b=t(1), a=t(2)),
    "default dict": lambda: defaultdict(list, a=t(1)),
    "own dict": lambda: Config(a=t(1)),
    "namedtuple": lambda: Point(t(1), t(2)),
    "typed namedtuple": lambda: Typed(t(1), [t(2)]),
    "dataclass": lambda: Plain(t(1), (t(2), t(3)), 4),
    "frozen dataclass": lambda: Frozen(t(1), {"k": t(2)}),
    "slots": lambda: Slots(t(1), [t(2)]),
    "torch's own": lambda: torch.arange(4.0).reshape(2, 2).max(dim=0),
    "mixture": lambda: {"x": [Typed(t(1), Frozen(t(2), (None, t(3))))], "y": (Plain(t(4)), "text", 5)},
}


def doubled(value: Any) -> Any:
    """The expected value, computed by hand."""
    match value:
        case Tensor():
            return value * 2 if value.is_floating_point() else value
        case dict():
            new = type(value)(value.default_factory) if isinstance(value, defaultdict) else type(value)()
            new.update({key: doubled(member) for key, member in value.items()})
            return new
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*map(doubled, value))
        case tuple() | list():
            return type(value)(map(doubled, value))
        case Plain():
            return Plain(doubled(value.logits), doubled(value.states), value.count)
        case Frozen() | Slots():
            return type(value)(doubled(value.logits), doubled(value.states))
    return value


def assert_same(found: Any, expected: Any) -> None:
    """Assert that two values have equal types and contents, member by member."""
    assert type(found) is type(expected)
    match expected:
        case Tensor():
            assert_close(found, expected)
        case dict():
            assert list(found) == list(expected)
            for key in expected:
                assert_same(found[key], expected[key])
        case tuple() | list():
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected, strict=True):
                assert_same(ours, theirs)
        case Plain() | Frozen() | Slots():
            for name in type(expected).__dataclass_fields__:
                assert_same(getattr(found, name), getattr(expected, name))
        case _:
            assert found == expected


@pytest.mark.parametrize("name", VALUES)
def test_every_container_keeps_its_type_and_every_tensor_is_edited(name: str) -> None:
    value, again = VALUES[name](), VALUES[name]()
    found = edited(value)
    assert_same(found, doubled(again))
    assert_same(value, again)  # the module's own output is not written to


@pytest.mark.parametrize("name", VALUES)
def test_a_capture_is_the_container_with_detached_tensors(name: str) -> None:
    model, value = Outer(), VALUES[name]()
    with hookrun.hooked(model, {"h": {"select": "inner", "hook": "forward", "action": "capture"}}) as hooks:
        assert model(value) is value
    assert_same(hooks.captures["h"]["inner"][0], value)
    assert hooks.captures["h"]["inner"][0] is not value


def test_attributes_of_container_subclasses_stay() -> None:
    value = Config(a=t(1))
    value.note = "mine"  # type: ignore[misc]
    found = edited(value)
    assert (type(found), found.note, found["a"].tolist()) == (Config, "mine", [2.0, 2.0])
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


def nestings() -> st.SearchStrategy[Any]:
    leaf = st.one_of(
        st.integers(0, 9).map(lambda number: t(float(number))),
        st.integers(0, 9).map(lambda number: torch.full((2,), number)),  # integers are not edited
        st.none(),
        st.sampled_from(["text", 3]),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(["a", "b c", "0", "d.e"]), inner, min_size=1, max_size=3),
            st.tuples(inner, inner).map(lambda pair: Point(*pair)),
            st.tuples(st.just(t(1)), inner).map(lambda pair: Plain(*pair)),
            st.tuples(st.just(t(1)), inner).map(lambda pair: Frozen(*pair)),
        ),
        max_leaves=8,
    )


@given(nestings())
@settings(max_examples=200, deadline=None)
def test_in_any_nesting_only_floating_point_tensors_are_edited(value: Any) -> None:
    assert_same(edited(value), doubled(value))


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
def test_a_target_edits_one_tensor_and_keeps_all_other_member_objects(value: Any, seed: int) -> None:
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


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Keywords()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, y=x, scale=x, extra=x, mask=None)


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
    model = Caller()
    spec = {**DOUBLE, "hook": "forward_pre"} | ({"target": target} if target else {})
    with hookrun.hooked(model, {"h": spec}):
        found = model(t(1))
    assert_close(found, t(sum(w * 10**n for n, w in enumerate(weights))))


def test_forward_pre_sees_calls_with_keyword_arguments_only() -> None:
    class OnlyKeywords(nn.Module):
        def forward(self, *, a: Tensor, b: Tensor) -> Tensor:
            return a - b

    model = OnlyKeywords()
    spec = {
        "double": {"select": "", "hook": "forward_pre", "target": "b", "action": "scale", "factor": 2},
        "seen": {"select": "", "hook": "forward_pre", "action": "capture"},
    }
    with hookrun.hooked(model, spec) as hooks:
        assert_close(model(a=t(5), b=t(1)), t(3))
    assert_close(hooks.captures["seen"][""], [{"a": t(5), "b": t(2)}])
    by_hand: list[Any] = []
    model.register_forward_pre_hook(lambda _m, args, kwargs: by_hand.append((args, kwargs)), with_kwargs=True)
    model(a=t(5), b=t(2))
    assert_close(by_hand, [((), hooks.captures["seen"][""][0])])


# ---- shape, dtype and device


PARAMETERS: dict[str, dict[str, Any]] = {
    "scale": {"factor": [0.5, 1.5]},
    "clamp": {"min": -0.25, "max": 0.25},
    "replace": {"value": [1, 2]},
    "add_bias": {"value": [0.25, 0.5]},
    "clip_norm": {"max_norm": 0.1},
    "python": {"function": "hookrun.examples:soften"},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("action", sorted(name for name, a in actions().items() if FORWARD in a.hook_types))
def test_every_action_keeps_shape_dtype_and_device(action: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).to(dtype)
    spec = {"select": "0", "hook": "forward", "action": action, **PARAMETERS.get(action, {})}
    x = torch.ones(3, 2, dtype=dtype)
    plain = model(x)
    with hookrun.hooked(model, {"h": spec}):
        found = model(x)
    assert (found.shape, found.dtype, found.device) == (plain.shape, plain.dtype, plain.device)


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
def test_an_action_that_changes_a_shape_is_an_error_that_names_hook_and_module(
    hook: dict[str, Any],
) -> None:
    """The plan is compiled without an example, so the error comes at run time."""

    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, :1]

    model = nn.Sequential(Halved(2, 2))
    spec = {"odd": {"select": "0", "hook": "forward", **hook}}
    with (
        pytest.raises(hookrun.HookrunError, match=r"hook 'odd' \(forward, \w+\) on 0: .*shape"),
        hookrun.hooked(model, spec),
    ):
        model(torch.ones(2, 2))
    with pytest.raises(hookrun.CompileError, match="shape"):
        hookrun.compile(spec, model, example=((torch.ones(2, 2),), {}))


def test_an_edited_packed_sequence_stays_a_packed_sequence() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    model = Outer()
    with hookrun.hooked(model, {"h": {**DOUBLE, "target": "data"}}):
        found = model(packed)
    assert type(found) is type(packed)
    assert_close(found.data, packed.data * 2)
    lstm = nn.LSTM(2, 2)
    assert_close(
        lstm(found)[0].data,
        lstm(nn.utils.rnn.pack_sequence([2 * torch.ones(3, 2), 2 * torch.ones(1, 2)]))[0].data,
    )
