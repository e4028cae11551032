"""A hook that never fired on a module is reported; `strict: true` fails the run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hooking import one_hook
from small_nets import Net
from torch import nn

import hookrun
from hookrun.cli import main
from hookrun.engine.hook_types import HOOK_TYPES

X = torch.ones(2, 3, 4)
NEVER = "never fired"
IDLE = "fired and found no tensor for its action"


def inactive(model: nn.Module, spec: dict[str, Any], run: Any) -> list[tuple[str, str, str]]:
    """`hooks.inactive` after a run; asserts that leaving the block warned about each such hook, in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hookrun.hooked(model, spec) as hooks:
            run(model)
    told = [str(each.message) for each in caught if issubclass(each.category, hookrun.HookrunWarning)]
    assert [line.split()[0] for line in told] == list(dict.fromkeys(hook for hook, _, _ in hooks.inactive))
    for _, _, why in hooks.inactive:
        assert any(why in line for line in told)
    return hooks.inactive


def test_a_hook_on_the_out_proj_of_attention_is_reported() -> None:
    """Attention reads the weight of out_proj, which trains, but never calls the module."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    found = inactive(model, one_hook(["", "out_proj"]), lambda m: m(X, X, X))
    assert found == [("h", "out_proj", NEVER)]
    assert inactive(model, one_hook("out_proj", "grad"), lambda m: m(X, X, X)[0].sum().backward()) == []


def direct() -> Net:
    """One of its modules is called, of the other one the forward alone."""
    called = nn.Linear(4, 4)
    direct = nn.Linear(4, 4)
    return Net(lambda m, x: m.direct.forward(m.called(x)), called=called, direct=direct)


@pytest.mark.parametrize("hook", ["forward_pre", "forward", "backward", "output_grad", "saved_tensors"])
def test_a_module_whose_forward_is_called_directly_is_reported(hook: str) -> None:
    def run(model: nn.Module) -> None:
        model(X.clone().requires_grad_()).sum().backward()

    assert inactive(direct(), one_hook("*", hook), run) == [("h", "direct", NEVER)]


@pytest.mark.parametrize("hook", ["backward", "backward_pre", "output_grad", "grad", "post_accumulate_grad"])
def test_gradient_hooks_under_no_grad_are_reported(hook: str) -> None:
    def run(model: nn.Module) -> None:
        with torch.no_grad():
            model(X)

    names = ["called.weight", "called.bias"] if HOOK_TYPES[hook].on_parameters else ["called"]
    found = inactive(direct(), one_hook("called", hook), run)
    assert found == [("h", name, NEVER) for name in names]


def branching() -> Net:
    one = nn.Linear(4, 4)
    other = nn.Linear(4, 4)
    return Net(lambda m, x: m.one(x) if x.sum() > 0 else m.other(x), one=one, other=other)


INSIDE = ["layers.0", "layers.0.self_attn", "layers.0.linear1", "layers.0.dropout", "layers.0.norm1"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("train", [True, False])
def test_hooks_on_a_fused_encoder_layer_fire_or_are_reported(train: bool) -> None:
    """In evaluation without gradients torch runs its encoder layer as one operation, which calls no inner module.

    Hooks on the layer or inside it either make torch take the slow path, or are reported: never are they silently
    without effect.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train(train)
    by_hand = dict.fromkeys(INSIDE, 0)
    for path in INSIDE:
        model.get_submodule(path).register_forward_hook(
            lambda *_, path=path: by_hand.update({path: by_hand[path] + 1}) and None
        )
    with warnings.catch_warnings(), hookrun.hooked(model, one_hook(INSIDE)) as hooks, torch.no_grad():
        warnings.simplefilter("ignore", hookrun.HookrunWarning)
        model(X)
    assert {path: hooks.fired["h", path] for path in INSIDE} == by_hand
    assert [path for _, path, _ in hooks.inactive] == [path for path in INSIDE if not by_hand[path]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_hooks_in_a_fused_encoder_layer_are_reported() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    reported = [path for _, path, _ in inactive(layer, one_hook(["linear1", "norm2"]), lambda m: m(X))]
    calls = list[str]()
    layer.linear1.register_forward_hook(lambda *_: calls.append("linear1"))
    layer(X)
    assert ("linear1" in reported) == (not calls), "reported where torch itself does not call it"


def test_a_schedule_that_never_holds_is_reported() -> None:
    assert inactive(direct(), one_hook("called", when={"step": 5}), lambda m: m(X)) == [
        ("h", "called", NEVER)
    ]


def test_each_hook_without_firing_is_reported_per_module() -> None:
    spec = {
        "seen": {"select": "*", "hook": "forward", "action": "capture"},
        "grads": {"select": "one", "hook": "output_grad", "action": "capture"},
    }
    found = inactive(branching(), spec, lambda m: m(X))
    assert sorted(found) == [("grads", "one", NEVER), ("seen", "other", NEVER)]
    assert inactive(branching(), one_hook("*"), lambda m: (m(X), m(-X))) == []


def test_an_edit_of_integers_is_reported_as_idle() -> None:
    model = Net(lambda m, ids: m.table(m.ids(ids)), ids=nn.Identity(), table=nn.Embedding(5, 3))
    spec = {
        "ids": {"select": "ids", "hook": "forward", "action": "scale", "factor": 2},
        "none": {"select": "table", "hook": "backward", "action": "scale", "factor": 2},
        "fine": {"select": "table", "hook": "forward", "action": "scale", "factor": 2},
    }
    found = inactive(model, spec, lambda m: m(torch.tensor([1, 2])).sum().backward())
    assert sorted(found) == [("ids", "ids", IDLE), ("none", "table", IDLE)]


def test_strict_raises_on_leaving_the_block() -> None:
    model = branching()
    refused = pytest.raises(hookrun.HookrunError, match=r"strict: .*\n.*h never fired on other")
    with refused, hookrun.hooked(model, one_hook("*"), strict=True):
        model(X)


def test_the_warning_points_at_the_with_statement() -> None:
    model = branching()
    warned = pytest.warns(hookrun.HookrunWarning, match="h never fired on other")
    with warned as caught, hookrun.hooked(model, one_hook("*")):
        model(X)
    assert caught[0].filename == __file__


def test_pythons_warning_filters_silence_the_warning() -> None:
    model = branching()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore", hookrun.HookrunWarning)
        with hookrun.hooked(model, one_hook("*")) as hooks:
            model(X)
    assert hooks.inactive
    assert not told


def test_a_model_that_never_ran_is_not_reported() -> None:
    model = branching()
    with hookrun.hooked(model, one_hook("*"), strict=True):
        pass
    filled = {"set": {"select": "one", "hook": "apply", "action": "fill", "value": 1}}
    with hookrun.hooked(model, one_hook("*") | filled, strict=True) as hooks:
        pass
    assert hooks.fired["set", "one"] == 1, "at installation, which is not a run"
    with pytest.raises(ValueError, match="mine"), hookrun.hooked(model, one_hook("*"), strict=True):
        model(X)
        raise ValueError("mine")


def test_hooks_are_reported_if_only_a_part_of_the_model_ran() -> None:
    model = direct()
    warned = pytest.warns(hookrun.HookrunWarning, match="h never fired on direct")
    with warned, hookrun.hooked(model, one_hook("*")):
        model.called(X)


UNUSED = "+hooks.never={select: 'type:ReLU', hook: forward, action: scale, factor: 2, when: {step: [999]}}"
COMMAND = ["train.limit_batches=1", "train.epochs=1", "compute.device=cpu", "compute.threads=1", "model=mlp"]


@pytest.mark.parametrize(("strict", "code"), [("false", 0), ("true", 1)])
def test_strict_fails_hooks_that_never_fired(
    strict: str, code: int, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, UNUSED, f"strict={strict}"]) == code
    printed = capsys.readouterr()
    assert "never never fired on layers.1, layers.3" in (printed.out if code == 0 else printed.err)
    assert (printed.out + printed.err).count("never never fired") == 1
    assert hookrun.open_run("outputs/latest").status["status"] == ("done" if code == 0 else "failed")
