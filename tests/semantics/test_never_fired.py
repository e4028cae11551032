"""Never fired is reported, for every hook and module; `strict: true` fails the run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.cli import main
from hookrun.hook_types import HOOK_TYPES

X = torch.ones(2, 3, 4)
NEVER = "never fired"
IDLE = "fired and found no tensor for its action"


def watched(select: object, hook: str = "forward", **keys: Any) -> dict[str, Any]:
    return {"h": {"select": select, "hook": hook, "action": "capture", **keys}}


def inactive(model: nn.Module, spec: dict[str, Any], run: Any) -> list[tuple[str, str, str]]:
    """What did nothing; leaving the block has warned of each such hook, in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hookrun.hooked(model, spec) as hooks:
            run(model)
    told = [str(each.message) for each in caught if issubclass(each.category, hookrun.HookrunWarning)]
    assert [line.split()[0] for line in told] == list(dict.fromkeys(hook for hook, _, _ in hooks.inactive))
    assert all(any(why in line for line in told) for _, _, why in hooks.inactive)
    return hooks.inactive


def test_the_out_proj_of_attention() -> None:
    """Attention reads its weight, and never calls it."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    found = inactive(model, watched(["", "out_proj"]), lambda m: m(X, X, X))
    assert found == [("h", "out_proj", NEVER)]
    gradients = watched("out_proj", "grad")
    assert (
        inactive(model, gradients, lambda m: m(X, X, X)[0].sum().backward()) == []
    )  # its parameters do train


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(4, 4)
        self.direct = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.direct.forward(self.called(x))


@pytest.mark.parametrize("hook", ["forward_pre", "forward", "backward", "output_grad", "saved_tensors"])
def test_a_direct_call_of_forward(hook: str) -> None:
    def run(model: nn.Module) -> None:
        model(X.clone().requires_grad_()).sum().backward()

    assert inactive(Direct(), watched("*", hook), run) == [("h", "direct", NEVER)]


@pytest.mark.parametrize("hook", ["backward", "backward_pre", "output_grad", "grad", "post_accumulate_grad"])
def test_gradients_under_no_grad(hook: str) -> None:
    def run(model: nn.Module) -> None:
        with torch.no_grad():
            model(X)

    names = ["called.weight", "called.bias"] if HOOK_TYPES[hook].on_parameters else ["called"]
    found = inactive(Direct(), watched("called", hook), run)
    assert found == [("h", name, NEVER) for name in names]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.other(x)


def test_a_branch_that_is_not_taken() -> None:
    assert inactive(Branching(), watched("*"), lambda m: m(X)) == [("h", "other", NEVER)]
    both = inactive(Branching(), watched("*"), lambda m: (m(X), m(-X)))
    assert both == []


INSIDE = ["layers.0", "layers.0.self_attn", "layers.0.linear1", "layers.0.dropout", "layers.0.norm1"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("train", [True, False])
def test_a_fused_fast_path_in_evaluation(train: bool) -> None:
    """In evaluation without gradients torch's encoder layer runs as one operation, which calls no module inside.

    A hook on the layer itself, or on one inside it, is seen by torch or is reported: never is it silently without
    effect.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train(train)
    by_hand = dict.fromkeys(INSIDE, 0)
    for path in INSIDE:
        model.get_submodule(path).register_forward_hook(
            lambda *_, path=path: by_hand.update({path: by_hand[path] + 1}) and None
        )
    with warnings.catch_warnings(), hookrun.hooked(model, watched(INSIDE)) as hooks, torch.no_grad():
        warnings.simplefilter("ignore", hookrun.HookrunWarning)
        model(X)
    assert {path: hooks.fired["h", path] for path in INSIDE} == by_hand
    assert [path for _, path, _ in hooks.inactive] == [path for path in INSIDE if not by_hand[path]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fused_fast_path_skips_hooks_on_what_is_inside() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with torch.no_grad():
        found = inactive(layer, watched(["linear1", "norm2"]), lambda m: m(X))
    paths = [path for _, path, _ in found]
    calls: list[str] = []
    layer.linear1.register_forward_hook(lambda *_: calls.append("linear1"))
    with torch.no_grad():
        layer(X)
    assert ("linear1" in paths) == (not calls), "reported where torch itself does not call it"


def test_a_schedule_that_never_holds() -> None:
    assert inactive(Direct(), watched("called", when={"step": 5}), lambda m: m(X)) == [("h", "called", NEVER)]


def test_each_pair_of_hook_and_module_is_reported_by_itself() -> None:
    spec = {
        "seen": {"select": "*", "hook": "forward", "action": "capture"},
        "grads": {"select": "one", "hook": "output_grad", "action": "capture"},
    }
    found = inactive(Branching(), spec, lambda m: m(X))
    assert sorted(found) == [("grads", "one", NEVER), ("seen", "other", NEVER)]


def test_an_edit_of_integers_or_of_a_gradient_that_is_none_fired_and_did_nothing() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ids = nn.Identity()
            self.table = nn.Embedding(5, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(self.ids(ids))

    spec = {
        "ids": {"select": "ids", "hook": "forward", "action": "scale", "factor": 2},
        "none": {"select": "table", "hook": "backward", "action": "scale", "factor": 2},
        "fine": {"select": "table", "hook": "forward", "action": "scale", "factor": 2},
    }
    found = inactive(Tokens(), spec, lambda m: m(torch.tensor([1, 2])).sum().backward())
    assert sorted(found) == [("ids", "ids", IDLE), ("none", "table", IDLE)]


def test_strict_raises_when_the_block_is_left() -> None:
    model = Branching()
    with (
        pytest.raises(hookrun.HookrunError, match=r"strict: .*\n.*h never fired on other"),
        hookrun.hooked(model, watched("*"), strict=True),
    ):
        model(X)


def test_the_warning_points_at_the_block() -> None:
    model = Branching()
    with (
        pytest.warns(hookrun.HookrunWarning, match="h never fired on other") as caught,
        hookrun.hooked(model, watched("*")),
    ):
        model(X)
    assert caught[0].filename == __file__


def test_python_s_own_filters_silence_it() -> None:
    model = Branching()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore", hookrun.HookrunWarning)
        with hookrun.hooked(model, watched("*")) as hooks:
            model(X)
    assert hooks.inactive and not told


def test_neither_where_the_model_never_ran_nor_while_an_exception_passes() -> None:
    model = Branching()
    with hookrun.hooked(model, watched("*"), strict=True):
        pass
    filled = {"set": {"select": "one", "hook": "apply", "action": "fill", "value": 1}}
    with hookrun.hooked(model, watched("*") | filled, strict=True) as hooks:
        pass
    assert hooks.fired["set", "one"] == 1, "at installation, which is not a run"
    with pytest.raises(ValueError, match="mine"), hookrun.hooked(model, watched("*"), strict=True):
        model(X)
        raise ValueError("mine")


def test_a_model_that_ran_in_parts_alone_has_run() -> None:
    model = Direct()
    with (
        pytest.warns(hookrun.HookrunWarning, match="h never fired on direct"),
        hookrun.hooked(model, watched("*")),
    ):
        model.called(X)


UNUSED = "+hooks.never={select: fc, hook: forward, action: scale, factor: 2, when: {step: [999]}}"
COMMAND = ["train.limit_batches=1", "train.epochs=1", "compute.device=cpu", "compute.threads=1", "model=mlp"]


@pytest.mark.parametrize(("strict", "code"), [("false", 0), ("true", 1)])
def test_a_run_says_it_loudly_and_strict_fails(
    strict: str, code: int, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hook = UNUSED.replace("select: fc", "select: 'type:ReLU'")
    assert main([*COMMAND, hook, f"strict={strict}"]) == code
    printed = capsys.readouterr()
    said = printed.out if code == 0 else printed.err
    assert "never never fired on layers.1, layers.3" in said
    status = hookrun.open_run("outputs/latest").status
    assert status["status"] == ("done" if code == 0 else "failed")
