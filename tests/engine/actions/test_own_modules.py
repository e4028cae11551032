"""`python` with a torch.nn.Module: its parameters are trained, saved and loaded as parameters of the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from small_nets import Net
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint

import hookrun

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))


class Adapter(nn.Module):
    """A bottleneck beside the identity."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(3, rank, bias=False), nn.Linear(rank, 3)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.up(self.down(value).tanh())


NAMES = ["ad_down_weight", "ad_up_weight", "ad_up_bias"]


def test_it_trains_as_an_adapter_in_hooks_by_hand() -> None:
    model = net()
    plain = net()
    adapters = [Adapter(), Adapter()]
    plan = hookrun.compile(spec(Adapter), model, example=((X,), {}))
    assert (
        "ad: adds ad_down_weight [2, 3], ad_up_weight [3, 2], ad_up_bias [3] to each module, 15 elements"
        in str(plan)
    )
    by_hand = [parameter for adapter in adapters for parameter in adapter.parameters()]
    with plan.install(model) as hooks:
        assert [name for name, _ in hooks.named_parameters()] == [
            f"{n}.{name}" for n in (0, 2) for name in NAMES
        ]
        with torch.no_grad():
            for mine, theirs in zip(by_hand, hooks.parameters(), strict=True):
                mine.copy_(theirs)
        losses = train(model, model.parameters())
    for number, adapter in zip((0, 2), adapters, strict=True):
        plain[number].register_forward_hook(lambda module, args, output, adapter=adapter: adapter(output))
    assert losses == train(plain, [*plain.parameters(), *by_hand])
    assert all(map(torch.equal, by_hand, hooks.parameters()))


def test_modules_start_from_a_seed_of_their_own() -> None:
    def initial(*order: str) -> dict[str, Tensor]:
        model = net()
        state = torch.get_rng_state()
        with hookrun.hooked(model, {name: spec(Adapter)["ad"] for name in order}) as hooks:
            assert torch.equal(torch.get_rng_state(), state)
            return dict(hooks.named_parameters())

    one = initial("ad", "more")
    other = initial("more", "ad")
    assert one.keys() == other.keys()
    for name, each in one.items():
        assert torch.equal(each, other[name])
    assert not torch.equal(one["0.ad_down_weight"], one["2.ad_down_weight"])
    assert not torch.equal(one["0.ad_down_weight"], one["0.more_down_weight"])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("own", [Adapter, lambda: None], ids=["linear", "lstm"])
def test_a_later_installation_uses_the_values_in_the_model(own: Any, assign: bool) -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(3, 3)

        def forward(self, value: Tensor) -> Tensor:
            output: Tensor = self.cells(value)[0]
            return output

    hook = spec(own if own is Adapter else Memory)
    model = net()
    other = net()
    with hookrun.hooked(model, hook):
        train(model, model.parameters())
        expected = model(X)
    with hookrun.hooked(model, hook) as hooks:
        assert torch.equal(model(X), expected)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert copied.state_dict().keys() == model.state_dict().keys()
    with hookrun.hooked(other, hook) as hooks:
        other(X)
        other.load_state_dict(model.state_dict(), assign=assign)
        assert torch.equal(other(X), expected)
        zeros = {name: torch.zeros_like(each) for name, each in other.named_parameters()}
        assert not torch.func.functional_call(other, zeros, (X,)).any()
        assert torch.equal(other(X), expected)
        hooks.uninstall_parameters()
    assert other.state_dict().keys() == net().state_dict().keys()


def test_other_sizes_than_those_in_the_model_are_refused() -> None:
    model = net()
    with hookrun.hooked(model, spec(Adapter)):
        pass
    with pytest.raises(hookrun.HookError, match=r"'ad_down_weight' was added before with shape \[2, 3\]"):
        hookrun.hooked(model, spec(Adapter, args={"rank": 1})).__enter__()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_has_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    class Noisy(Adapter):
        def forward(self, value: Tensor) -> Tensor:
            assert self.training is self.down.training is False
            return nn.functional.dropout(super().forward(value), 0.5, self.training)

    model = net().to(dtype).eval()
    x = X.to(dtype)
    plan = hookrun.compile(spec(Noisy), model, example=((x,), {}))
    with torch.inference_mode(), plan.install(model) as hooks:
        assert model(x).dtype is dtype
    assert {(each.dtype, each.is_inference()) for each in hooks.parameters()} == {(dtype, False)}


def test_checkpointing_changes_nothing() -> None:
    class Inside(Adapter):
        def forward(self, value: Tensor) -> Tensor:
            output: Tensor = checkpoint(super().forward, value, use_reentrant=False)
            return output

    losses = list[list[float]]()
    for own in (Adapter, Inside):
        with hookrun.hooked(model := net(), spec(own)):
            losses.append(train(model, model.parameters()))
    with hookrun.hooked(model := net(), spec(Adapter)):
        losses.append(train(lambda x: checkpoint(model, x, use_reentrant=False), model.parameters()))
    assert losses[0] == losses[1] == losses[2]


def test_it_may_take_the_context() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, value: Tensor, context: Any) -> Tensor:
            context.record("gain", self.gain)
            return value * self.gain

    with hookrun.hooked(model := net(), spec(Gain, select="0")) as hooks:
        model(X)
    assert [record["gain"] for record in hooks.records] == [1.0]


def test_a_given_object_is_shared() -> None:
    model = net()
    own = Adapter()
    hooks = spec(own) | {"g": {"select": "0", "hook": "output_grad", "action": "stats"}}
    plan = hookrun.compile(hooks, model, example=((X,), {}))
    assert own.down.weight.grad is None, "the trial run leaves nothing in it"
    with plan.install(model) as installed:
        assert installed.parameters() == list(own.parameters()), "each once"
        train(model, model.parameters())
    with hookrun.hooked(model, spec(other := Adapter())) as installed:
        for a, b in zip(installed.parameters(), other.parameters(), strict=True):
            assert a is b


class Normed(Adapter):
    """An adapter with an orthogonal matrix, running statistics, and a buffer that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.turn = nn.BatchNorm1d(3), orthogonal(nn.Linear(3, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("constant", torch.ones(3), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + value.detach().mean(0)
        result: Tensor = super().forward(self.turn(self.norm(value)) + self.constant) + self.mean
        return result


BUFFERS = [
    "norm_running_mean",
    "norm_running_var",
    "norm_num_batches_tracked",
    "turn_parametrizations_weight_0_base",
]


def test_persistent_buffers_are_those_of_the_model() -> None:
    model = net()
    plain = net()
    own = [Normed(), Normed()]
    plan = hookrun.compile(spec(Normed), model, example=((X,), {}))
    assert "to each module, 52 elements" in str(plan)
    names = {f"{place}.ad_{name}" for place in (0, 2) for name in ["mean", *BUFFERS]}
    with plan.install(model) as hooks:
        added = model.state_dict().keys() - plain.state_dict().keys()
        assert added - {name for name, _ in hooks.named_parameters()} == names
        for place, by_hand in zip((0, 2), own, strict=True):
            theirs = {name.replace(".", "_"): name for name in by_hand.state_dict()}
            values = {theirs[key]: model[place].state_dict()[f"ad_{key}"] for key in theirs}
            by_hand.load_state_dict(values)
            plain[place].register_forward_hook(lambda module, args, output, by_hand=by_hand: by_hand(output))
        losses = train(model, model.parameters())
    assert losses == train(plain, [*plain.parameters(), *(each for one in own for each in one.parameters())])
    for place, by_hand in zip((0, 2), own, strict=True):
        for name, wanted in by_hand.state_dict().items():
            assert torch.equal(model[place].state_dict()[f"ad_{name.replace('.', '_')}"], wanted)
    assert own[0].mean.any()
    assert own[0].norm.num_batches_tracked == 10
    expected = model.eval()(X)
    with hookrun.hooked(other := net(), spec(Normed)) as hooks:
        other.load_state_dict(hooked_state := {**model.state_dict(), "0.ad_mean": own[0].mean - 1})
        assert not torch.equal(other.eval()(X), expected), "the buffer is used"
        other.load_state_dict(hooked_state | {"0.ad_mean": model.state_dict()["0.ad_mean"]})
        hooks.uninstall_parameters()
    assert other.state_dict().keys() == net().state_dict().keys()


def test_a_shared_object_shares_its_replaced_buffer() -> None:
    model = net()
    plain = net()
    own = Counting()
    theirs = Counting()
    plan = hookrun.compile(spec(own), model, example=((X,), {}))
    assert own.calls == 0, "the trial run leaves nothing in it"
    with plan.install(model):
        for place in (0, 2):
            plain[place].register_forward_hook(lambda module, args, output: theirs(output))
        assert torch.equal(model(X), plain(X))
        assert torch.equal(model(X), plain(X))
    assert own.calls == theirs.calls == 4
    assert model[0].ad_calls is model[2].ad_calls is own.calls


class Counting(nn.Module):
    """Has a buffer and no parameter."""

    def __init__(self, shape: Any = ()) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, value: Tensor) -> Tensor:
        self.calls = self.calls + torch.ones(self.shape)
        return value * self.calls


class Late(Counting):
    """Makes a buffer in its first call."""

    def forward(self, value: Tensor) -> Tensor:
        self.late = value.detach().mean(0)
        return value


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (
            Counting(shape=(3,)),
            r"it replaces its buffer 'calls', \[\] of torch.float32, by \[3\] of torch.float32",
        ),
        (Late(), "it replaces its buffer 'late', NoneType, by"),
    ],
)
def test_a_buffer_that_a_saved_state_would_not_fit_is_an_error(own: Any, says: str) -> None:
    with pytest.raises(hookrun.CompileError, match=says):
        hookrun.compile(spec(own, select="0"), net(), example=((X,), {}))
    with pytest.raises(hookrun.HookError, match=says), hookrun.hooked(model := net(), spec(own, select="0")):
        model(X)


def test_modules_of_the_model_itself_add_nothing() -> None:
    model = net()
    model[2].eval()
    before = list(model.state_dict())
    expected = model[2](torch.relu(model[2](model[0](X))))
    with hookrun.hooked(model, spec(model[2], select="0")) as hooks:
        assert hooks.parameters() == []
        assert list(model.state_dict()) == before
        assert torch.equal(model(X), expected)
        assert not model[2].training


class Holding(Net):
    """One layer."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__(lambda own, value: own.layer(value), layer=layer or nn.LazyLinear(3))


class Statistics(Holding):
    """Has buffers of no shape yet."""

    def __init__(self) -> None:
        super().__init__(nn.LazyBatchNorm1d(affine=False))


class Extra(Adapter):
    """Has a state that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class Alike(Adapter):
    def __init__(self) -> None:
        super().__init__()
        self.up_bias = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("own", "hook", "says"),
    [
        (Extra, "forward", "keeps '_extra_state' beside its parameters and buffers"),
        (Holding, "forward", "has 'layer.weight' without a shape"),
        (Statistics, "forward", "has 'layer.running_mean' without a shape"),
        (Alike, "forward", "whose names differ in . and _ only"),
        (Adapter, "grad", "is trained on forward and forward_pre only"),
        (Adapter, "apply", "is trained on forward and forward_pre only"),
    ],
)
def test_what_a_checkpoint_would_lack_is_refused(own: Any, hook: str, says: str) -> None:
    with pytest.raises(hookrun.CompileError, match=rf"hooks\.ad\.function: .*{says}"):
        hookrun.compile(spec(own, hook=hook), net())


def test_a_name_that_is_taken_is_refused() -> None:
    model = net()
    model[0].ad_up_bias = 3
    with pytest.raises(hookrun.CompileError, match="on 0: the module has an attribute 'ad_up_bias' already"):
        hookrun.compile(spec(Adapter), model)
    bias = {"select": "0", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}
    with pytest.raises(hookrun.CompileError, match="an earlier hook adds a parameter 'ad_up_bias' already"):
        hookrun.compile({**spec(Adapter), "ad_up": bias}, net())


def test_hooks_on_its_parameters_act_on_them() -> None:
    zero = {"select": "0.ad_up_weight", "hook": "grad", "action": "scale", "factor": 0}
    with hookrun.hooked(model := net(), {"zero": zero, **spec(Adapter)}) as hooks:
        model(X).sum().backward()
    assert [bool(parameter.grad.any()) for parameter in hooks.parameters()] == [True, False, *[True] * 4]  # type: ignore[union-attr]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


def spec(function: Any, select: Any = ("0", "2"), hook: str = "forward", **keys: Any) -> dict[str, Any]:
    return {"ad": {"select": list(select), "hook": hook, "action": "python", "function": function, **keys}}


def train(model: Callable[[Tensor], Tensor], parameters: Iterable[Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(list(parameters), lr=0.05)
    losses = list[float]()
    for _ in range(10):
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
