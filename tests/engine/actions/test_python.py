"""`python`: a user's own function has the same effect on a value as by hand, and no other effect."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_nets import Net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.engine.actions.base import HookContext
from hookrun.engine.hook_types import HOOK_TYPES

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]])
SEEN: list[HookContext] = []
MODULE = "hookrun_test_hooks"


def halve(x: Tensor, by: float = 2.0) -> Tensor:
    return x / by


def look(x: Tensor, *, context: HookContext) -> None:
    SEEN.append(context)


class Centre:
    """Subtracts the mean of the first value that it gets."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.mean: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean()
        return (x - self.mean) * self.scale


def test_on_every_hook_type_it_can_do_what_scale_does() -> None:
    for kind in HOOK_TYPES.values():
        if kind.phase == "installation":
            continue
        select = "0.weight" if kind.on_parameters else "0"
        theirs = spec(halve, hook=kind.name, select=select)
        ours = {"h": {"select": select, "hook": kind.name, "action": "scale", "factor": 0.5}}
        for mine, expected in zip(trained(theirs), trained(ours), strict=True):
            assert torch.allclose(mine, expected, rtol=1e-6, atol=1e-7), kind.name


def test_a_function_may_be_given_as_the_action() -> None:
    model = net()
    bare = model(X)
    for action in (lambda x: x * 0.5, halve, Centre(0.5).__call__, nn.Tanh()):
        hook = {"h": {"select": "1", "hook": "forward", "action": action}}
        expected = action(bare)
        with hookrun.hooked(model, hook):
            assert torch.equal(model(X), expected)
    with pytest.raises(hookrun.SpecError, match="`function` is given as well"):
        hookrun.compile({"h": {"select": "1", "hook": "forward", "action": halve, "function": halve}}, model)


def test_hook_settings_apply_to_the_function() -> None:
    model = net()
    bare = model[0](X)
    with hookrun.hooked(model, spec(halve, args={"by": 4}, index=":, 0")):
        assert torch.equal(model[0](X)[:, 0], bare[:, 0] / 4)
        assert torch.equal(model[0](X)[:, 1:], bare[:, 1:])
    with hookrun.hooked(model, spec(halve, when={"step": [1]})) as hooks:
        assert torch.equal(model(X), torch.relu(bare))
        hooks.step()
        assert torch.equal(model(X), torch.relu(bare / 2))


def test_the_context_describes_the_firing() -> None:
    SEEN.clear()
    model = net()
    bare = model(X)
    with hookrun.hooked(model, spec(look)) as hooks:
        assert torch.equal(model(X), bare)
        hooks.step()
        hooks.epoch()
        model.eval()
        model(X)
    first, second = SEEN
    assert first.hook == "h"
    assert first.hook_type == "forward"
    assert first.path == "0"
    assert first.module == model[0]
    assert first.mode == "train"
    assert first.epoch == 0
    assert first.step == 0
    assert first.call == 0
    assert first.target == ""
    assert second.mode == "eval"
    assert second.epoch == 1
    assert second.step == 1
    with pytest.raises(AttributeError):
        first.step = 3  # type: ignore[misc]


def returns(result: Any) -> Callable[[Tensor], Any]:
    return lambda x: result(x)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("index", [None, "0", "[0, 1]"])
@pytest.mark.parametrize(
    "write", [lambda x: x.mul_(2), lambda x: x[0].zero_(), lambda x: x.detach().view(-1).add_(1)]
)
def test_a_write_in_place_is_refused_in_every_mode(mode: Any, index: str | None, write: Any) -> None:
    model = net()
    hook = spec(lambda x: write(x) * 0)
    if index is not None:
        hook["h"]["index"] = index
    with mode(), pytest.raises(hookrun.HookError, match="in place"), hookrun.hooked(model, hook):
        model(X)


def test_in_inference_mode_a_function_may_return_its_value() -> None:
    model = net()
    made = list[Any]()
    model[1].register_forward_hook(lambda module, args, output: made.append(output))
    with torch.inference_mode(), hookrun.hooked(model, spec(lambda x: x)):
        assert model(X) is made[0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (returns(lambda x: x.sum(0)), r"changes the shape from \[2, 3\] to \[3\]"),
        (returns(lambda x: x.double()), "changes the dtype"),
        (returns(lambda x: [x]), "returned an object of type list, expected a tensor or None"),
        (returns(lambda x: 3), "returned an object of type int, expected a tensor or None"),
        (returns(lambda x: x.mul_(2)), "changes its value in place"),
        (returns(lambda x: x.fill_(0) and None), "changes its value in place|cannot|failed"),
        (returns(lambda x: x.nothing), r"failed: AttributeError(.|\n)*test_python\.py"),
    ],
)
def test_forbidden_effects_are_errors(function: Callable[[Tensor], Any], says: str) -> None:
    with pytest.raises(hookrun.CompileError, match=says):
        hookrun.compile(spec(function), net(), example=((X,), {}))
    model = net()
    with pytest.raises(hookrun.HookError, match=says), hookrun.hooked(model, spec(function)):
        model(X)


def test_errors_of_hookrun_in_the_function_are_unchanged() -> None:
    def checked(x: Tensor) -> Tensor:
        raise hookrun.CheckFailed("too large")

    model = net()
    with pytest.raises(hookrun.CheckFailed, match=r"^too large"), hookrun.hooked(model, spec(checked)):
        model(X)


def test_random_draws_must_use_the_hook_s_own_generator() -> None:
    def rash(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    model = net()
    with pytest.raises(hookrun.HookError, match="global generator"), hookrun.hooked(model, spec(rash)):
        model(X)

    def gradient(checkpointed: bool) -> Tensor:
        model = net()
        x = X.clone().requires_grad_()
        state = torch.get_rng_state()
        with hookrun.hooked(model, spec(noisy)):
            out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            out.square().sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


def test_its_generator_draws_anew_at_each_firing_of_every_run() -> None:
    def outputs() -> list[Tensor]:
        model = nn.Identity()
        with hookrun.hooked(model, {"h": {"select": "", "hook": "forward", "action": noisy}}):
            return [each for _ in range(2) for each in model((torch.zeros(3), torch.zeros(3)))]

    state = torch.get_rng_state()
    found = outputs()
    assert len({tuple(each.tolist()) for each in found}) == 4, "for each tensor of each call"
    assert all(map(torch.equal, outputs(), found))
    assert torch.equal(torch.get_rng_state(), state), "the run's own generator is left alone"


def test_a_function_that_needs_data_is_checked_in_the_run() -> None:
    def by_numpy(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().clip(0, 1))

    def by_item(x: Tensor) -> Tensor | None:
        return x * 2 if x.abs().sum().item() > 0 else None

    for function in (by_numpy, by_item):
        model = net()
        expected = torch.relu(function(model[0](X)))
        plan = hookrun.compile(spec(function), model, example=((X,), {}))
        assert "h on 0 cannot run without data" in str(plan)
        assert plan.hooks[0].matches[0].shape == "[2, 3]"
        with plan.install(model):
            assert torch.equal(model(X), expected)


def test_each_module_has_its_own_object_of_a_class() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with hookrun.hooked(model, spec(Centre, select=["0", "1"], args={"scale": 2})):
        first = model[0](X)
        assert torch.allclose(first.mean(), torch.zeros(()), atol=1e-6)
        assert torch.allclose(model[1](first).mean(), torch.zeros(()), atol=1e-6)


@pytest.mark.parametrize(
    ("function", "args", "says"),
    [
        (halve, {"bye": 3}, r"hooks\.h\.args\.bye: .* takes no argument 'bye'; did you mean|there are: by"),
        (halve, {"x": 3}, r"hooks\.h\.args\.x: .* takes no argument 'x'"),
        (look, {"context": 3}, "takes no argument 'context'"),
        (lambda: None, {}, "takes 0 positional arguments, and is called with 1"),
        (lambda x, y: x, {}, r"hooks\.h\.args\.y: is missing"),
        (Centre, {"scales": 1}, r"hooks\.h\.args\.scales"),
        (type("Bare", (), {}), {}, "whose objects cannot be called"),
    ],
)
def test_arguments_are_checked_before_the_run(function: Any, args: dict[str, Any], says: str) -> None:
    with pytest.raises(hookrun.CompileError, match=says):
        hookrun.compile(spec(function, args=args), net())


def test_on_apply_it_gets_the_module() -> None:
    def ones(module: nn.Linear, gain: float) -> None:
        nn.init.constant_(module.weight, gain)

    model = net()
    with hookrun.hooked(model, spec(ones, hook="apply", args={"gain": 3})):
        assert (model[0].weight == 3).all()
    for function, says in (
        (lambda module: 3, "returned an object of type int"),
        (lambda module: module.requires_grad_(False), "freezes"),
        (lambda module: module.nothing, "failed: AttributeError"),
    ):
        with pytest.raises(hookrun.HookrunError, match=says), hookrun.hooked(net(), spec(function, "apply")):
            pass
    with pytest.raises(hookrun.CompileError, match=r"hooks\.h: .*AttributeError"):
        hookrun.compile(spec(lambda module: module.nothing, "apply"), net(), example=((X,), {}))


# --- what the context gives


def masked() -> Net:
    return Net(lambda _, x, *, mask=None: (x if mask is None else x * mask, x + 1))


@pytest.mark.parametrize("hook", ["forward", "forward_pre"])
def test_the_inputs_are_the_arguments_of_the_module_call(hook: str) -> None:
    SEEN.clear()
    model = masked()
    mask = torch.ones(3)
    first = {"select": "", "hook": "forward_pre", "action": "scale", "factor": 2, "target": "[0]"}
    with hookrun.hooked(model, {"first": first, **spec(look, hook=hook, select="", target="[0]")}):
        model(X)
        model(X, mask=mask)
    (plain,), named = (context.inputs for context in SEEN)
    assert torch.equal(plain, X * 2), "as the forward gets them, also where the model has changed the step"
    assert list(named) == [0, "mask"]
    assert torch.equal(named[0], X * 2)
    assert named["mask"] is mask


@pytest.mark.parametrize(
    ("hook", "select"), [("grad", "0.weight"), ("output_grad", "0"), ("weight", "0.weight"), ("apply", "0")]
)
def test_a_hook_that_sees_no_module_call_has_no_inputs(hook: str, select: str) -> None:
    with (
        pytest.raises(hookrun.HookError, match=rf"'h' \({hook}\) on {select}.*only forward and forward_pre"),
        hookrun.hooked(model := net(), spec(lambda x, context: context.inputs and None, hook, select)),
    ):
        model(X.clone().requires_grad_()).sum().backward()


def test_numbers_recorded_in_one_call_are_one_record_as_of_stats() -> None:
    total = torch.zeros(())

    def measure(x: Tensor, context: HookContext) -> None:
        total.add_(1)  # afterwards: what was recorded stays
        context.record("mean", x.mean())
        context.record("calls", total)
        context.record("count", 3)
        context.record("nothing", float("nan"))

    hooks = {**spec(measure, select="", when={"step": {"every": 2}})}
    hooks["s"] = {**hooks["h"], "action": "stats", "of": "mean"}
    del hooks["s"]["function"]
    model = masked()
    found = list[list[dict[str, Any]]]()
    with hookrun.hooked(model, hooks) as installed:
        for _ in range(3):
            model(X)
            installed.step()
    for name in ("h", "s"):
        found.append([record for record in installed.records if record["hook"] == name])
    assert [record["calls"] for record in found[0]] == [1, 2, 3, 4]
    assert [record["path"] for record in found[0]] == ["[0]", "[1]"] * 2, "each tensor of the value"
    for own, theirs in zip(*found, strict=True):
        assert own.pop("count") == 3
        assert own.pop("calls")
        assert own.pop("nothing") != 0
        assert own == {**theirs, "hook": "h", "action": "python", "mean": pytest.approx(theirs["mean"])}


@pytest.mark.parametrize("hook", ["grad", "post_accumulate_grad", "optimizer_step_pre", "weight"])
def test_hooks_on_parameters_record_too(hook: str) -> None:
    def measure(x: Tensor, context: HookContext) -> None:
        context.record("norm", x.norm())

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {**spec(measure, hook, "0.weight"), "s": {"select": "0.weight", "hook": hook, "action": "stats"}}
    with hookrun.hooked(model, hooks) as installed:
        model(X).sum().backward()
        optimizer.step()
    own, theirs = installed.records
    assert own["norm"] == pytest.approx(theirs["norm"])
    assert own["module"] == theirs["module"]


@pytest.mark.parametrize(
    ("name", "number", "says"),
    [
        ("a b", 1, "found the name 'a b'"),
        (3, 1, "found the name 3"),
        ("step", 1, "has 'step' already"),
        ("ok", 1, "has 'ok' already"),
        ("once", 1, "has 'once' already"),
        ("x", True, "'x' is True, expected a real number"),
        ("x", "1", "'x' is '1'"),
        ("x", torch.ones(1), r"'x' is tensor\(\[1.\]\)"),
        ("x", torch.ones((), dtype=torch.bool), r"'x' is tensor\(True\)"),
        ("x", 1j, "'x' is 1j"),
    ],
)
def test_what_is_not_a_real_number_under_a_free_name_is_refused(name: Any, number: Any, says: str) -> None:
    def measure(x: Tensor, context: HookContext) -> None:
        context.record("once", 1)
        context.record(name, number)

    model = net()
    place = r"hook 'h' \(forward, python\) on 0: .*context.record: .*"
    with pytest.raises(hookrun.HookError, match=place + says), hookrun.hooked(model, spec(measure)):
        model(X)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_call_is_recorded_once(use_reentrant: bool) -> None:
    model = net()
    with hookrun.hooked(model, spec(lambda x, context: context.record("mean", x.mean()))) as hooks:
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=use_reentrant).sum().backward()
    assert len(hooks.records) == 1


def test_nothing_is_recorded_after_the_call() -> None:
    SEEN.clear()
    model = net()
    with hookrun.hooked(model, spec(look)):
        model(X)
    with pytest.raises(ValueError, match="the call is over"):
        SEEN[0].record("late", 1)


# --- values that Python gives


def test_a_tensor_is_taken_as_it_was_when_the_spec_was_read() -> None:
    model = net()
    value = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    plan = hookrun.compile(
        {"h": {"select": "1", "hook": "forward", "action": "replace", "value": value}}, model
    )
    with torch.no_grad():
        value.zero_()
    with plan.install(model):
        output = model(X)
        output.add_(1)
        assert torch.equal(model(X), torch.tensor([1.0, 2.0, 3.0]).expand(2, 3))
    assert "value=tensor[3] float32" in str(plan)
    for action, hook, key in (("scale", "forward", "factor"), ("fill", "apply", "value")):
        of = {"select": "0", "hook": hook, "action": action}
        given = {"h": of | {key: torch.full((3,), 2.0)}}
        listed = {"h": of | {key: [2.0, 2.0, 2.0]}}
        assert all(map(torch.equal, trained(given), trained(listed))), action


def test_a_function_gives_a_constant_for_the_tensor_at_hand() -> None:
    model = net()
    x = X.clone().requires_grad_()
    hook = {"h": {"select": "1", "hook": "forward", "action": "replace", "value": lambda x: x.mean(0)}}
    expected = model(X).mean(0).expand(2, 3)
    with hookrun.hooked(model, hook):
        output = model(x)
    assert torch.equal(output, expected)
    assert not output.requires_grad
    for function, says in (
        (lambda x: "a", "returned an object of type str, expected a tensor or a number"),
        (lambda x: x.nothing, "failed: AttributeError"),
        (lambda x: x.mul_(2), "changes its value in place"),
    ):
        with pytest.raises(hookrun.CompileError, match=says):
            hookrun.compile({"h": {**hook["h"], "value": function}}, model, example=((X,), {}))
    needing = {"h": {**hook["h"], "value": lambda x: x.detach().numpy().mean().item()}}
    assert "cannot run without data" in str(hookrun.compile(needing, model, example=((X,), {})))
    trainable = {
        "h": {"select": "1", "hook": "forward", "action": "add_bias", "value": halve, "trainable": True}
    }
    with pytest.raises(hookrun.CompileError, match="a parameter starts from numbers"):
        hookrun.compile(trainable, model)


def test_the_hash_of_the_plan_follows_what_was_given() -> None:
    def plan_hash(**keys: Any) -> str:
        hook = {"select": "1", "hook": "forward", **keys}
        return hookrun.compile({"h": hook}, net()).hash

    def by(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * factor

    assert plan_hash(action=by(2)) == plan_hash(action=by(2)) != plan_hash(action=by(3))
    one = torch.ones(3)
    other = torch.zeros(3)
    same = plan_hash(action="replace", value=one)
    assert same == plan_hash(action="replace", value=one.clone()) != plan_hash(action="replace", value=other)


def test_what_is_neither_is_refused() -> None:
    for value in (torch.ones(2, device="meta"), torch.eye(2).to_sparse(), object()):
        with pytest.raises(hookrun.SpecError, match=r"hooks\.h\.value: found"):
            hookrun.compile(
                {"h": {"select": "1", "hook": "forward", "action": "replace", "value": value}}, net()
            )
    for function in (3, None, torch.ones(2), "a b", "mypkg.hooks:Net.method", "os.system()"):
        with pytest.raises(hookrun.SpecError, match=r"hooks\.h\.function"):
            hookrun.compile(spec(function), net())


# --- by trusted name


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of functions in the current directory."""
    file = tmp_path / f"{MODULE}.py"
    file.write_text("def halve(x, by=2):\n    return x / by\n")
    monkeypatch.chdir(tmp_path)
    yield file
    sys.modules.pop(MODULE, None)


def test_a_function_by_name_needs_trust(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    named = spec(f"{MODULE}:halve", args={"by": 4})
    with pytest.raises(hookrun.CompileError, match=rf"HOOKRUN_TRUST={MODULE}"):
        hookrun.compile(named, model)
    assert MODULE not in sys.modules
    monkeypatch.setenv("HOOKRUN_TRUST", MODULE)
    expected = torch.relu(model[0](X) / 4)
    plan = hookrun.compile(named, model, example=((X,), {}))
    with plan.install(model):
        assert torch.equal(model(X), expected)
    code = plan.to_dict()["hooks"][0]["code"]["function"]
    assert code["function"] == f"{MODULE}:halve"
    assert code["hashed"] == f"the source of the module {MODULE}"
    assert f"hooks.h.function {MODULE}:halve ({code['sha256'][:12]})" in str(plan)
    own.write_text("def halve(x, by=2):\n    return x / by * 2 / 2  # changed\n")
    sys.modules.pop(MODULE)
    assert hookrun.compile(named, model).hash != plan.hash


class Made:
    """Counts its objects."""

    objects = 0

    def __init__(self) -> None:
        Made.objects += 1

    def __call__(self, x: Tensor) -> Tensor:
        return x


def test_a_plan_makes_one_object_of_a_class() -> None:
    Made.objects = 0
    hookrun.compile(spec(Made), net())
    assert Made.objects == 1


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


def spec(function: Any, hook: str = "forward", select: Any = "0", **keys: Any) -> dict[str, Any]:
    return {"h": {"select": select, "hook": hook, "action": "python", "function": function, **keys}}


def noisy(x: Tensor, context: HookContext) -> Tensor:
    return x + torch.randn(x.shape, generator=context.generator(x))


def trained(spec: dict[str, Any]) -> tuple[Tensor, ...]:
    """The output, and the parameters after a step, with hooks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookrun.hooked(model, spec):
        output = model(x := X.clone().requires_grad_())
        output.square().sum().backward()
        optimizer.step()
    assert x.grad is not None
    return output.detach(), x.grad, *(parameter.detach().clone() for parameter in model.parameters())
