"""`select: "hook:NAME.POINT"`: hooks on what the action of another hook computes within a module's call."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_autoencoders import COUNT, WIDTH, decoded, features_of, saved, tensors_of
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

import hookrun
from hookrun.engine.plan.points import Point

W = tensors_of()
FEATURES = {"select": "hook:sae.features", "hook": "forward"}
SEEN = {"seen": {**FEATURES, "action": "capture"}}


@pytest.fixture
def sae(tmp_path: Path) -> dict[str, Any]:
    """A hook `sae` on the activations of `net`, with the error term."""
    folder = saved(tmp_path / "sae", W)
    return {"sae": hook_of(folder, select="act")}


def hook_of(folder: Path, **keys: Any) -> dict[str, Any]:
    common = {"hook": "forward", "action": "sparse_autoencoder", "error": True}
    return {**common, "weights": {"folder": str(folder)}, **keys}


class Net(nn.Module):
    """A linear layer, its activation, and another linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, WIDTH)
        self.act = nn.Tanh()
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.act(self.fc(x)))
        return result


X = torch.randn(5, 4)


def refusal(spec: dict[str, Any], model: nn.Module | None = None) -> str:
    with pytest.raises(hookrun.CompileError) as error:
        hookrun.compile(spec, model or Net(), example=((X,), {}))
    return str(error.value)


def test_every_kind_of_hook_sees_the_features(sae: dict[str, Any]) -> None:
    model = Net()
    features = features_of(model.act(model.fc(X)), W).detach()
    spec = sae | {
        **SEEN,
        "gradient": {**FEATURES, "hook": "output_grad", "action": "capture"},
        "sum": {**FEATURES, "action": "stats", "of": ["mean"]},
        "bound": {**FEATURES, "action": "check", "max": 1e6},
        "top": {**FEATURES, "action": "fold", "of": ["mean", {"top": 1}]},
        "rest": {"select": "act:sae.error", "hook": "forward", "action": "capture"},
    }
    plan = hookrun.compile(spec, model, example=((X,), {}))
    assert "act:sae.features   Point   forward       capture" in str(plan)
    assert f"[5, {COUNT}]" in str(plan)
    with plan.install(model) as hooks:
        hooks.samples = torch.arange(10, 15)
        output = model(X)
        output.sum().backward()
    assert torch.equal(output, model(X))
    assert torch.equal(hooks.captures["seen"]["act:sae.features"][0], features)
    gradient = hooks.captures["gradient"]["act:sae.features"][0]
    assert_close(gradient, model.out.weight.sum(0).expand(5, -1) @ W["W_dec"].T)
    assert_close(hooks.records[0]["mean"], float(features.mean()))
    fold = hooks.folds["top"]["act:sae.features"]
    assert_close(fold.mean.float(), features.mean(0))
    assert fold.top.samples[:, 0].tolist() == (features.argmax(0) + 10).tolist()
    activations = model.act(model.fc(X))
    assert_close(hooks.captures["rest"]["act:sae.error"][0], activations - decoded(features, W))


def test_an_edit_of_the_error_is_what_is_added(sae: dict[str, Any]) -> None:
    model = Net()
    off = {"select": "hook:sae.error", "hook": "forward", "action": "scale", "factor": 0.0}
    with hookrun.hooked(model, {**sae, "off": off}):
        output = model(X)
    assert_close(output, model.out(decoded(features_of(model.act(model.fc(X)), W), W)))


def test_each_module_has_features_of_its_own(tmp_path: Path) -> None:
    class Both(Net):
        def forward(self, x: Tensor) -> Tensor:
            first = self.act(self.fc(x))
            return super().forward(x) + self.out(self.act(first))

    spec = {"sae": hook_of(saved(tmp_path, W), select=["fc", "act"]), **SEEN}
    model = Both()
    model.same = model.act
    with hookrun.hooked(model, spec) as hooks:
        model(X)
    seen = hooks.captures["seen"]
    assert set(seen) == {"fc:sae.features", "act:sae.features"}
    assert len(seen["act:sae.features"]) == 3, "it is called three times"
    assert seen["same:sae.features"] is seen["act:sae.features"]
    one = {"one": {"select": "fc:sae.features", "hook": "forward", "action": "capture"}}
    plan = hookrun.compile({**spec, **one}, model)
    assert [match.path for match in plan.hooks[2].matches] == ["fc:sae.features"]


def test_the_model_does_not_have_the_points(sae: dict[str, Any]) -> None:
    model = Net()
    names = [name for name, _ in model.named_modules()]
    keys = list(model.state_dict())
    with hookrun.hooked(model, sae | SEEN) as hooks:
        model(X)
        assert [name for name, _ in model.named_modules()] == names
        assert list(model.state_dict()) == keys
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        for other in (copied, loaded):
            assert not any(isinstance(part, Point) for part in other.modules())
            assert_close(other(X), model(X))
        fired = hooks.fired["seen", "act:sae.features"]
        model.double()(X.double())
        assert hooks.fired["seen", "act:sae.features"] == fired + 1
    assert fired == 3, "calls of copies are not among them"


def test_globs_and_classes_pass_over_points(sae: dict[str, Any]) -> None:
    for select in ("**", "re:.*", "type:Module", {"leaf": True}):
        spec = sae | {"all": {"select": select, "hook": "forward", "action": "capture"}}
        matches = hookrun.compile(spec, Net()).hooks[1].matches
        assert not any(":" in match.path for match in matches), select


def test_points_leave_no_reference_behind(sae: dict[str, Any]) -> None:
    model = Net()
    plan = hookrun.compile(sae | SEEN, model)
    gc.collect()
    gc.disable()
    try:
        with plan.install(model) as hooks:
            model(X).sum().backward()
        (point,) = (site.module for site in hooks.sites if isinstance(site.module, Point))
        gone = weakref.ref(hooks), weakref.ref(point)
        del point
        del hooks
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


# ---- sequences ---------------------------------------------------------------------------------------------------


def test_tokens_of_features_are_those_of_the_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": WIDTH, "vocab_size": 20, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    ids = torch.randint(0, 20, (3, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    last = {"last": {**FEATURES, "action": "capture", "tokens": -1}}
    top = {"top": {**FEATURES, "action": "fold", "of": [{"top": 1}], "tokens": "all"}}
    block = {"block": {"select": "transformer.h.0.mlp", "hook": "forward", "action": "capture"}}
    spec = {"sae": hook_of(saved(tmp_path, W), select="transformer.h.0.mlp"), **last, **top, **block}
    with torch.no_grad(), hookrun.hooked(model, spec) as hooks:
        model(ids, attention_mask=mask)
    features = features_of(hooks.captures["block"]["transformer.h.0.mlp"][0], W)
    path = "transformer.h.0.mlp:sae.features"
    assert_close(hooks.captures["last"][path][0], features[:, -1])
    found = hooks.folds["top"][path].top
    real = features.masked_fill(mask[..., None] == 0, -1)
    values, samples = real.amax(1).max(0)
    assert_close(found.values[:, 0], values)
    alive = values > 0
    assert torch.equal(found.samples[alive, 0], samples[alive])
    places = real[samples[alive], :, alive.nonzero()[:, 0]].argmax(-1)
    starts = (mask == 0).sum(-1)[samples[alive]]
    assert torch.equal(found.positions[alive, 0], places - starts)


def test_a_part_of_a_value_has_no_batch_at_its_points(sae: dict[str, Any]) -> None:
    parts = {"sae": {**sae["sae"], "index": "1:3"}}
    seen = {"seen": {**FEATURES, "action": "capture", "when": {"value": {"of": "norm", "above": 0.0}}}}
    assert "no dimension of the tensor follows the batch" in refusal({**parts, **seen})
    model = Net()
    with hookrun.hooked(model, {**parts, **SEEN}) as hooks:
        model(X)
    assert hooks.captures["seen"]["act:sae.features"][0].shape == (2, COUNT)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("hook:sae.featurs", "did you mean 'hook:sae.features'"),
        ("hook:sea.error", "did you mean 'hook:sae.error'"),
        ("hook:sae", "did you mean 'hook:sae.error' or 'hook:sae.features'"),
        ("hook:plain.features", "did you mean 'hook:sae.features'"),
        ("hook:later.features", "an enabled hook before this one must add it"),
        ("hook:disabled.features", "is disabled: set its `enabled: true`"),
    ],
)
def test_a_point_that_is_not_there_is_refused(selector: str, said: str, sae: dict[str, Any]) -> None:
    others = {
        "plain": {"select": "fc", "hook": "forward", "action": "scale", "factor": 1},
        "disabled": {**sae["sae"], "enabled": False},
    }
    why = refusal({**sae, **others, "h": {"select": selector, "hook": "forward", "action": "capture"}})
    assert "hooks.h.select" in why
    assert said in why


def test_a_hook_that_adds_it_later_is_named(sae: dict[str, Any]) -> None:
    later = refusal({**SEEN, **sae})
    assert "hooks.seen.select: the hook 'sae', which adds it, fires after this one" in later
    assert refusal({"sae": {**sae["sae"], "priority": 1}, **SEEN}) == later
    hookrun.compile({"seen": {**SEEN["seen"], "priority": 1}, **sae}, Net())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"action": "skip"}, "this is a value within the call"),
        ({"action": "stop_forward"}, "this is a value within the call"),
        ({"action": "add_bias", "value": 0.0, "trainable": True}, "it adds parameters"),
        ({"action": "capture", "heads": 0}, "the number of heads of act:sae.features is unknown"),
        ({"action": "init", "hook": "apply", "name": "zeros_"}, "matches no module"),
        ({"action": "clip_norm", "hook": "grad", "max_norm": 1.0}, "matches no parameter"),
    ],
)
def test_what_a_value_cannot_carry_is_refused(keys: dict[str, Any], said: str, sae: dict[str, Any]) -> None:
    assert said in refusal({**sae, "h": {**FEATURES, **keys}})


def test_a_mistake_of_the_adding_hook_is_told_once(sae: dict[str, Any]) -> None:
    broken = {"sae": {**sae["sae"], "weights": {"folder": "none"}}}
    why = refusal({**broken, **SEEN})
    assert why.startswith("1 compile error")
    assert "hooks.sae.weights" in why
