"""A forward begins with the outermost call of any module: a loop may call parts of a model, and never the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import normal
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.errors import HookError

X = normal(5, 4)
Y = normal(5, 4, seed=1)


def hook(select: str | list[str] = "*.layer", action: str = "capture", **keys: Any) -> dict[str, Any]:
    return {"select": select, "hook": "forward", "action": action, **keys}


SECOND = {"second": hook(when={"call": [1]})}


def test_calls_count_from_0_in_each_part_that_is_called() -> None:
    model = Pair()
    with hookrun.hooked(model, SECOND) as hooks:
        for _ in range(3):
            model.training_step(X, Y)
    expected = model.image.layer(torch.tanh(model.image.layer(X)))
    assert [calls(hooks, path) for path in ("image.layer", "text.layer")] == [3, 3]
    for seen in hooks.captures["second"]["image.layer"]:
        assert torch.equal(seen, expected)


def test_a_module_that_is_called_alone_is_a_forward_each_time() -> None:
    model = Pair()
    with hookrun.hooked(model, {**SECOND, "first": hook(when={"call": [0]})}) as hooks:
        for _ in range(3):
            model.image.layer(X)
    assert hooks.fired["first", "image.layer"] == 3
    assert hooks.fired["second", "image.layer"] == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_part_is_edited_as_in_its_first_run(reentrant: bool) -> None:
    spec = {"noise": hook(action="noise", std=0.5, when={"call": [1]})}
    gradients = list[list[Tensor]]()
    for value in (None, reentrant):
        model = Pair()
        model.image.reentrant = model.text.reentrant = value
        with hookrun.hooked(model, spec) as hooks:
            for _ in range(2):
                model.training_step(X.clone().requires_grad_(), Y.clone().requires_grad_()).backward()
        assert hooks.fired["noise", "image.layer"] == 2
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == 8
    assert all(map(torch.equal, *gradients))


PASSED: dict[str, Any] = {
    "c": hook("image.layer", when={"call": [0]}),
    "patch": hook("image.last", "replace", value={"hook": "c"}),
}


def test_a_value_is_passed_on_within_the_part_that_is_called() -> None:
    model = Pair()
    with hookrun.hooked(model, PASSED):
        assert torch.equal(model.encode(X), model.image.layer(X))


def test_a_value_of_an_earlier_forward_is_not_there() -> None:
    model = Pair()
    patch = hook("text.last", "replace", value={"hook": "c"})
    with (
        hookrun.hooked(model, {**PASSED, "patch": patch}),
        pytest.raises(HookError, match=r"c has not fired at image\.layer in this forward"),
    ):
        model.training_step(X, Y)


def once_inside(call: Callable[[], object]) -> Callable[[Tensor], None]:
    """A hook's function that makes the call, but not inside that call."""
    running = list[bool]()

    def call_again(x: Tensor) -> None:
        if not running:
            running.append(True)
            call()
            running.clear()

    return call_again


def test_a_forward_inside_a_hook_keeps_outer_values() -> None:
    model = Pair()
    again = hook("image.last", "python", function=once_inside(lambda: model.encode(Y)))
    patch = PASSED["patch"]
    with hookrun.hooked(model, {"c": hook("image.layer"), "again": again, "patch": patch}) as hooks:
        output = model.encode(X)
    assert torch.equal(output, model.image.layer(torch.tanh(model.image.layer(X))))
    assert hooks.fired["c", "image.layer"] == 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_after_one_that_was_broken_off_counts_from_0(error: type[BaseException]) -> None:
    model = Pair()

    def broken(*call: Any) -> None:
        raise error

    with hookrun.hooked(model, {**SECOND, **PASSED}) as hooks:
        handle = model.image.last.register_forward_pre_hook(broken)
        with pytest.raises(error):
            model.encode(X)
        handle.remove()
        model.encode(X)
        model.text(Y)
    assert [calls(hooks, path) for path in ("image.layer", "text.layer")] == [2, 1]


def test_threads_have_forwards_of_their_own() -> None:
    model = Pair()
    meet = threading.Barrier(2)
    outputs = dict[str, Tensor]()
    model.image.layer.register_forward_hook(lambda *call: (meet.wait(60), None)[1])
    inputs = {"one": X, "other": Y}

    def run(name: str) -> None:
        outputs[name] = model.encode(inputs[name])

    with hookrun.hooked(model, {**SECOND, **PASSED}) as hooks:
        threads = [threading.Thread(target=run, args=(name,)) for name in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert calls(hooks, "image.layer") == 2
    for name, x in inputs.items():
        weight, bias = model.image.layer.parameters()
        assert torch.equal(outputs[name], nn.functional.linear(x, weight, bias))


def test_the_forward_of_a_part_ends_where_a_hook_stops_it() -> None:
    model = Pair()
    stop = {"stop": {**hook("image.layer"), "action": "stop_forward"}, "seen": hook()}
    with hookrun.hooked(model, stop) as hooks:
        assert model.encode(X) is None
        assert torch.equal(model.text(Y), Pair().text(Y))
    assert hooks.fired["seen", "image.layer"] == 1


def test_an_output_that_a_part_writes_in_place_has_its_gradient() -> None:
    model = Pair()
    model.image.in_place = True
    with hookrun.hooked(model, {"g": {**hook("image.layer"), "hook": "output_grad"}}) as hooks:
        model.encode(X).sum().backward()
    first = model.image.layer(X).detach().requires_grad_()
    second = model.image.layer(torch.tanh(first)).detach().requires_grad_()
    model.image.last(second * 2).sum().backward()
    model.image.layer(torch.tanh(first)).backward(second.grad)
    torch.testing.assert_close(hooks.captures["g"]["image.layer"], [second.grad, first.grad])


def test_a_loaded_pruned_weight_is_0_in_the_next_call() -> None:
    model = Pair()
    plain = Pair()
    spec = {"p": {"select": "image.last", "hook": "apply", "action": "prune", "amount": 0.5}}
    prune.l1_unstructured(plain.image.last, "weight", 0.5)
    loaded = normal(4, 4, seed=2)
    with hookrun.hooked(model, spec):
        with torch.no_grad():
            model.image.last.weight.copy_(loaded)
        output = model.encode(X)
    hidden = model.image.layer(torch.tanh(model.image.layer(X)))
    kept = loaded * plain.image.last.weight_mask
    assert torch.equal(output, nn.functional.linear(hidden, kept, model.image.last.bias))


def test_modules_without_hooks_are_left_as_they_are() -> None:
    model = Pair()
    with hookrun.hooked(model, {"seen": hook("image.layer", when={"call": [0]})}):
        followed = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    assert followed == ["", "image", "image.layer"]


def test_rows_of_parts_are_in_the_order_of_batches(tmp_path: Path) -> None:
    model = Pair()
    with hookrun.record(model, {"seen": hook("*.last")}, run_dir=tmp_path / "run") as hooks:
        for _ in range(2):
            model.training_step(X, Y)
        hooks.numbered = 0
        model.encode(X)
    seen = hookrun.open_run(tmp_path / "run").captures["seen"]
    assert seen["image.last"].sample_ids.tolist() == [*range(10), *range(5)]
    assert seen["text.last"].sample_ids.tolist() == [*range(10)]


def test_rows_have_the_same_numbers_around_a_part(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with hookrun.record(model, {"seen": hook("*")}, run_dir=tmp_path / "run"):
        model[1](X)
        model(X)
        model[0](Y)
    seen = hookrun.open_run(tmp_path / "run").captures["seen"]
    assert seen["0"].sample_ids.tolist() == [*range(5, 15)]
    assert seen["1"].sample_ids.tolist() == [*range(10)]


# ---- tokens ------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """Takes ids; the vectors of a position depend on its token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(20, 4), nn.Linear(4, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.out(self.embed(input_ids))  # type: ignore[no-any-return]

    def generate(self, input_ids: Tensor) -> Tensor:
        for _ in range(3):
            input_ids = torch.cat([input_ids, self(input_ids)[:, -1:].argmax(-1)], 1)
        return input_ids


class Adapted(nn.Module):
    """As the models of peft: its own forward takes the tokens too, and `generate` is that of the model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Language()

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        return self.base_model(input_ids=input_ids, **options)  # type: ignore[no-any-return]

    def generate(self, **options: Any) -> Tensor:
        return self.base_model.generate(**options)


IDS = torch.tensor([[0, 3, 4], [5, 6, 7]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])
NEW: dict[str, Any] = {"seen": hook("**.embed", tokens={"phase": "generation"})}


def rows(hooks: Any, hook_name: str = "seen") -> Mapping[str, Any]:
    (captured,) = hooks.captures[hook_name].values()
    return {"values": torch.cat(list(captured)), "ids": captured.token_ids, "at": captured.positions}


def test_a_wrapper_s_generate_has_the_tokens_of_the_model_inside() -> None:
    adapted = Adapted()
    found = list[Mapping[str, Any]]()
    for model in (adapted, adapted.base_model):
        with hookrun.hooked(model, NEW) as hooks:
            generated = model.generate(input_ids=IDS)
        found.append(rows(hooks))
    inner, outer = found
    for key in inner:
        assert torch.equal(inner[key], outer[key])
    new = generated[:, 3:5].t().flatten()  # the last one is not put in
    assert torch.equal(inner["ids"], new)
    assert torch.equal(inner["values"], adapted.base_model.embed(new))


def test_a_wrapper_makes_one_pass_with_its_model() -> None:
    model = Adapted()
    with hookrun.hooked(model, {"seen": hook("**.embed", tokens=0)}) as hooks:
        model(IDS, attention_mask=MASK)
        model.base_model(IDS[:, 1:])
    (captured,) = hooks.captures["seen"].values()
    assert captured.token_ids.tolist() == [3, 5, 3, 6]
    assert captured.sample_ids.tolist() == [0, 1, 2, 3]


def test_tokens_are_those_of_the_part_that_is_called() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = Language(), nn.Linear(20, 2)

        def training_step(self, ids: Tensor) -> Tensor:
            return self.head(self.net(ids))  # type: ignore[no-any-return]

    model = Trained()
    spec = {"seen": hook("net.out", tokens=-1), "edit": hook("net.embed", "scale", factor=0, tokens=-1)}
    with hookrun.hooked(model, spec) as hooks:
        model.training_step(IDS)
        model.training_step(IDS[:, :2])
    assert hooks.captures["seen"]["net.out"].token_ids.tolist() == [4, 7, 3, 6]
    assert torch.equal(torch.cat(hooks.captures["seen"]["net.out"]), model.net.out.bias.expand(4, -1))
    with hookrun.hooked(model, {"seen": hook("head", tokens=-1)}), pytest.raises(HookError, match="tokens"):
        model.training_step(IDS)


def test_a_call_inside_a_hook_has_its_own_tokens() -> None:
    model = Language()
    spec = {
        "seen": hook("out", tokens=0),
        "again": hook("embed", "python", function=once_inside(lambda: model(IDS + 10))),
        "first": hook("embed", tokens=0),
    }
    with hookrun.hooked(model, spec) as hooks:
        model(IDS, attention_mask=MASK)
    assert hooks.captures["seen"]["out"].token_ids.tolist() == [10, 15, 3, 5]
    assert hooks.captures["first"]["embed"].token_ids.tolist() == [10, 15, 3, 5]


def test_arguments_without_names_are_read_at_the_outermost_call() -> None:
    model = nn.ModuleDict({"net": nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4))})
    with hookrun.hooked(model, {"seen": hook("net.1", tokens=-1)}) as hooks:
        for ids in (IDS, IDS[:, :2]):
            model["net"](ids)
    assert hooks.captures["seen"]["net.1"].token_ids.tolist() == [4, 7, 3, 6]


class Part(nn.Module):
    """Runs `layer` twice, then `last`, which writes its input in place if `in_place`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.in_place = False
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def run(self, x: Tensor) -> Tensor:
        x = self.layer(torch.tanh(self.layer(x)))
        return self.last(x.mul_(2) if self.in_place else x)  # type: ignore[no-any-return]


class Pair(nn.Module):
    """Two parts, which its own methods call; like a LightningModule it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = Part(), Part()

    def encode(self, x: Tensor) -> Tensor:
        return self.image(x)  # type: ignore[no-any-return]

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.encode(x) * self.text(y)).sum()


def calls(hooks: Any, path: str) -> int:
    return len(hooks.captures["second"][path])
