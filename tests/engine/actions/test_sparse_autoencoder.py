"""`sparse_autoencoder`: the formulas of SAELens, the error term, and the folders that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_autoencoders import (
    BIASES,
    COUNT,
    KEPT,
    WIDTH,
    decoded,
    encoded,
    features_of,
    saved,
    tensors_of,
)
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun

each_architecture = pytest.mark.parametrize("architecture", BIASES)


def arguments_of(architecture: str) -> dict[str, Any]:
    """The keys of cfg.json that one architecture needs."""
    return {"architecture": architecture} | ({"k": KEPT} if architecture == "topk" else {})


def hook(folder: Path, **keys: Any) -> dict[str, Any]:
    """A hook on the only module."""
    common = {"select": "0", "hook": "forward", "action": "sparse_autoencoder"}
    return {**common, "weights": {"folder": str(folder)}, **keys}


def passed(x: Any, folder: Path, edits: dict[str, Any] | None = None, **keys: Any) -> Any:
    """What the module passes on; `edits` are hooks on the features."""
    spec = {"sae": hook(folder, **keys)}
    for name, edit in (edits or {}).items():
        spec[name] = {"select": "hook:sae.features", "hook": "forward", **edit}
    model = nn.Sequential(nn.Identity())
    with hookrun.hooked(model, spec):
        return model(x)


def refusal(folder: Path, x: Tensor | None = None) -> str:
    """Why the plan is refused."""
    example = None if x is None else ((x,), {})
    with pytest.raises(hookrun.CompileError) as error:
        hookrun.compile({"sae": hook(folder)}, nn.Sequential(nn.Identity()), example=example)
    return str(error.value)


# ---- formulas ----------------------------------------------------------------------------------------------------


@each_architecture
def test_it_reconstructs_as_saelens_does(architecture: str, tmp_path: Path) -> None:
    w = tensors_of(architecture)
    x = torch.randn(3, 4, WIDTH)
    folder = saved(tmp_path, w, **arguments_of(architecture))
    assert_close(passed(x, folder), decoded(features_of(x, w, architecture), w))
    folder = saved(tmp_path, w, apply_b_dec_to_input=False, **arguments_of(architecture))
    assert_close(passed(x, folder), decoded(encoded(x, w, architecture), w))


@each_architecture
def test_with_the_error_no_bit_changes(architecture: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, **arguments_of(architecture))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(3, WIDTH).to(dtype)
        x[0, :2] = torch.tensor([0.0, -0.0])
        new = passed(x, folder, error=True)
        assert new.dtype is dtype
        assert torch.equal(new.view(torch.uint8), x.view(torch.uint8)), dtype


def test_the_error_is_added_to_edited_features(tmp_path: Path) -> None:
    w = tensors_of()
    x = torch.randn(5, WIDTH)
    features = features_of(x, w)
    feature = int(features.sum(0).argmax())
    edited = features.clone()
    edited[1, feature] = 0
    folder = saved(tmp_path, w)
    off = {"off": {"action": "replace", "value": 0.0, "index": f"1, {feature}"}}
    new = passed(x, folder, off, error=True)
    assert_close(new, decoded(edited, w) + (x - decoded(features, w)))
    assert not torch.equal(new[1], x[1])
    assert torch.equal(new[[0, 2, 3, 4]], x[[0, 2, 3, 4]]), "rows without an edit keep every bit"
    assert_close(passed(x, folder, off), decoded(edited, w))


def test_its_gradient_passes_the_features_alone(tmp_path: Path) -> None:
    w = tensors_of()
    x = torch.randn(5, WIDTH, requires_grad=True)
    seen = torch.randn(5, WIDTH)
    (new,) = torch.autograd.grad(passed(x, saved(tmp_path, w), error=True), x, seen)
    (by_hand,) = torch.autograd.grad(decoded(features_of(x, w), w), x, seen)
    assert_close(new, by_hand)


def test_forward_mode_has_the_same_gradient(tmp_path: Path) -> None:
    spec = {
        "sae": hook(saved(tmp_path, normalize_activations="layer_norm"), error=True),
        "half": {"select": "hook:sae.features", "hook": "forward", "action": "scale", "factor": 0.5},
    }
    model = nn.Sequential(nn.Identity())
    x = torch.randn(WIDTH)
    with hookrun.hooked(model, spec):
        assert_close(torch.func.jacfwd(model)(x), torch.func.jacrev(model)(x))


def layer_norm(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    mean = x.mean(-1, keepdim=True)
    deviation = (x - mean).std(-1, keepdim=True)
    return (x - mean) / (deviation + 1e-5), lambda made: made * deviation + mean


def constant_norm(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    factor = WIDTH**0.5 / x.norm(dim=-1, keepdim=True)
    return x * factor, lambda made: made / factor


@pytest.mark.parametrize(
    ("name", "normalised"), {"layer_norm": layer_norm, "constant_norm_rescale": constant_norm}.items()
)
def test_normalisations_are_undone(name: str, normalised: Any, tmp_path: Path) -> None:
    w = tensors_of()
    x = torch.randn(3, WIDTH) * 3 + 1
    normal, undo = normalised(x)
    new = passed(x, saved(tmp_path, w, normalize_activations=name))
    assert_close(new, undo(decoded(features_of(normal, w), w)))


def test_zeros_have_no_norm_as_in_saelens(tmp_path: Path) -> None:
    w = tensors_of()
    x = torch.randn(3, WIDTH)
    x[1] = 0
    normal, undo = constant_norm(x)
    new = passed(x, saved(tmp_path, w, normalize_activations="constant_norm_rescale"))
    assert new[1].isnan().all()
    assert_close(new, undo(decoded(features_of(normal, w), w)), equal_nan=True)


def test_topk_may_compare_by_decoder_norms(tmp_path: Path) -> None:
    w = tensors_of("topk")
    x = torch.randn(3, WIDTH)
    norms = w["W_dec"].norm(dim=-1)
    scaled = w | {"W_enc": w["W_enc"] * norms, "b_enc": w["b_enc"] * norms}
    folder = saved(tmp_path, w, rescale_acts_by_decoder_norm=True, **arguments_of("topk"))
    assert_close(passed(x, folder), decoded(features_of(x, scaled, "topk") / norms, w))


def test_heads_are_joined_and_taken_apart(tmp_path: Path) -> None:
    w = tensors_of()
    x = torch.randn(3, 4, 2, WIDTH // 2)
    joined = x.flatten(-2)
    made = decoded(features_of(joined, w), w)
    folder = saved(tmp_path, w, reshape_activations="hook_z")
    assert_close(passed(x, folder), made.view(x.shape))
    assert_close(passed(joined, folder), made)


def test_folders_of_earlier_versions_are_read(tmp_path: Path) -> None:
    w = tensors_of("topk")
    x = torch.randn(3, 2, WIDTH // 2)
    earlier: dict[str, Any] = {
        "architecture": None,
        "metadata": None,
        "reshape_activations": None,
        "apply_b_dec_to_input": None,
        "hook_point": "blocks.3.attn.hook_z",
        "dtype": "torch.float32",
        "normalize_activations": False,
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": KEPT},
        "finetuning_scaling_factor": False,
        "l1_coefficient": 0.1,
    }
    folder = saved(tmp_path, w | {"scaling_factor": torch.ones(COUNT)}, **earlier)
    made = decoded(features_of(x.flatten(-2), w, "topk"), w)
    assert_close(passed(x, folder), made.view(x.shape))


# ---- values ------------------------------------------------------------------------------------------------------


def test_the_first_tensor_of_several_is_meant(tmp_path: Path) -> None:
    w = tensors_of()
    x = torch.randn(3, WIDTH)
    other = torch.randn(2, 5)
    number = torch.tensor([1, 2])
    new = passed((number, x, other), saved(tmp_path, w))
    assert_close(new[1], decoded(features_of(x, w), w))
    assert new[0] is number
    assert new[2] is other
    plan = hookrun.compile(
        {"sae": hook(tmp_path)}, nn.Sequential(nn.Identity()), example=(((number, x, other),), {})
    )
    assert "takes the first tensor at [1]" in str(plan)


def test_it_computes_in_its_dtype_under_autocast(tmp_path: Path) -> None:
    w = tensors_of()
    x = torch.randn(3, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = passed(x, saved(tmp_path, w))
        half = passed(x.bfloat16(), tmp_path)
    assert_close(wide, decoded(features_of(x, w), w))
    assert_close(half, decoded(features_of(x.bfloat16().float(), w), w).bfloat16())


def test_it_can_be_part_of_a_compiled_graph(tmp_path: Path) -> None:
    x = torch.randn(3, WIDTH)
    folder = saved(tmp_path)
    off = {"select": "hook:sae.features", "hook": "forward", "action": "scale", "factor": 0.5}
    model = nn.Sequential(nn.Identity())
    spec = {"sae": hook(folder), "off": off}
    with hookrun.hooked(model, spec) as hooks:
        compiled = hooks.compile(backend="eager", fullgraph=True)
        assert_close(compiled(x), passed(x, folder, {"off": {"action": "scale", "factor": 0.5}}))
        assert hooks.fired["off", "0:sae.features"] == 1


def test_other_weights_are_another_plan(tmp_path: Path) -> None:
    w = tensors_of()

    def digest(tensors: dict[str, Tensor], **config: Any) -> str:
        spec = {"sae": hook(saved(tmp_path, tensors, **config))}
        return hookrun.compile(spec, nn.Sequential(nn.Identity())).hash

    same = digest(w)
    assert digest(w, l1_coefficient=2.0) == same
    assert digest(w | {"b_dec": w["b_dec"] + 1e-6}) != same
    assert digest(w, apply_b_dec_to_input=False) != same


# ---- folders that are refused ------------------------------------------------------------------------------------


def test_both_widths_are_named_if_they_differ(tmp_path: Path) -> None:
    why = refusal(saved(tmp_path), torch.randn(3, WIDTH + 1))
    assert f"[3, {WIDTH + 1}]" in why
    assert f"d_in = {WIDTH}" in why
    assert "blocks.1.hook_resid_post" in why


@pytest.mark.parametrize("kind", ["grad", "weight", "optimizer_step_pre"])
def test_it_does_not_go_on_parameters(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    spec = {"sae": hook(saved(tmp_path), hook=kind)}
    with pytest.raises(
        hookrun.CompileError, match=f"'sparse_autoencoder' does not go with hook type '{kind}'"
    ):
        hookrun.compile(spec, model)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architecture": "transcoder"}, "architecture: found 'transcoder'"),
    "another activation function": ({"activation_fn_str": "tanh-relu"}, "activation_fn: found 'tanh-relu'"),
    "a factor that is not there": (
        {"normalize_activations": "expected_average_only_in"},
        "sae.fold_activation_norm_scaling_factor",
    ),
    "the same in an earlier version": ({"normalize_activations": True}, "expected_average_only_in"),
    "whitening": ({"normalize_activations": "covariance_whitening"}, "sae.fold_activation_whitening"),
    "another normalisation": ({"normalize_activations": "l2"}, "normalize_activations: found 'l2'"),
    "a width that is no number": ({"d_in": "NaN"}, "d_in"),
    "another width": ({"d_in": WIDTH + 1}, f"'W_enc': [{WIDTH}, {COUNT}]"),
    "no k": ({"architecture": "topk"}, "k is 0"),
    "more than all features": ({"architecture": "topk", "k": COUNT + 1}, f"k is {COUNT + 1}"),
    "another dtype": ({"dtype": "float8"}, "dtype: found 'float8'"),
    "nothing": ({"d_sae": None}, "d_sae: is missing"),
}


@pytest.mark.parametrize(("config", "why"), REFUSED.values(), ids=REFUSED)
def test_a_configuration_is_refused_by_name(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors_of(), **config)
    assert why in refusal(folder)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    w = tensors_of()
    assert "'b_mag': [16]" in refusal(saved(tmp_path, w, architecture="gated"))
    factor = {"scaling_factor": torch.full((COUNT,), 2.0)}
    assert "'scaling_factor': [16]" in refusal(saved(tmp_path, w | factor, finetuning_scaling_factor=True))
    for broken in (w["b_enc"] / 0, torch.zeros(COUNT, dtype=torch.int64)):
        assert "b_enc, of torch." in refusal(saved(tmp_path, w | {"b_enc": broken}))


def test_only_plain_files_of_a_folder_are_read(tmp_path: Path) -> None:
    assert "has no file cfg.json" in refusal(tmp_path / "none")
    folder = saved(tmp_path / "sae")
    weights = folder / "sae_weights.safetensors"
    weights.rename(folder / "sae_weights.pt")
    assert "has no file sae_weights.safetensors" in refusal(folder)
    assert "a pickle (.pt)" in refusal(folder)
    weights.symlink_to(folder / "sae_weights.pt")
    assert "no link is followed" in refusal(folder)
    weights.unlink()
    weights.write_bytes((folder / "sae_weights.pt").read_bytes()[:200])
    assert "is not a whole safetensors file" in refusal(folder)
    with (folder / "cfg.json").open("w") as file:
        file.truncate(100_000_000)
    assert "100,000,000 bytes" in refusal(folder)
    (folder / "cfg.json").write_text("[1]")
    assert "holds no mapping" in refusal(folder)
    assert "File name too long" in refusal(tmp_path / ("x" * 300))
    assert "has no file cfg.json" in refusal(Path("~nobody of this name/sae"))


def test_a_folder_is_named_by_a_mapping() -> None:
    spec = {"sae": hook(Path("x"), weights="sae")}
    with pytest.raises(hookrun.SpecError, match=r"hooks\.sae\.weights: found 'sae', expected a mapping"):
        hookrun.load_spec(spec)
