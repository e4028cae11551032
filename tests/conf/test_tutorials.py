"""What the hook tutorials do by hand-written Python, by experiments alone: their numbers, from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun
from hookrun.cli import main
from hookrun.models import build
from hookrun.spec.experiment import Model
from hookrun.store.reader import Run

ROOT = Path(__file__).parents[2]
NAMES = sorted(file.stem for file in (ROOT / "conf/experiment/tutorial").glob("*.yaml"))
SMALL = ("compute.threads=1", "compute.device=cpu", "strict=true")
Runs = Callable[..., Run]

W, TWICE_W = torch.full((5,), -0.9064), torch.full((5,), -1.8128)
B, TWICE_B = torch.tensor([-1.8891, 0.5235, 0.4592]), torch.tensor([-3.7783, 1.0471, 0.9184])


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Run the experiment of a row, which must end well and fire every hook."""
    monkeypatch.chdir(tmp_path)

    def run(row: int, *overrides: str, name: str = "", code: int = 0) -> Run:
        (found,) = [each for each in NAMES if each.startswith(f"{row:02}_{name}")]
        assert main([f"experiment=tutorial/{found}", *SMALL, *overrides]) == code
        return hookrun.open_run("outputs/latest")

    return run


def model_of(name: str, seed: int = 0) -> nn.Module:
    """The model of a row, as the run makes it."""
    torch.manual_seed(seed)
    return build(Model(name=f"tutorial/{name}"), sample_shape=(1, 8, 8), num_classes=10, trust=frozenset())


def near(found: Tensor, expected: Tensor) -> None:
    """To four decimals."""
    assert_close(found, expected, rtol=0, atol=1e-4)


def test_every_row_has_an_experiment() -> None:
    assert sorted({int(name[:2]) for name in NAMES}) == list(range(1, 23))


@pytest.mark.parametrize("name", NAMES[:2])
def test_it_runs_as_a_command(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hookrun", f"experiment=tutorial/{name}", *SMALL]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert hookrun.open_run(tmp_path / "outputs/latest").status["status"] == "done"


def test_01_the_gradient_of_b_is_printed_and_nothing_changes(tutorial: Runs, capsys: Any) -> None:
    tutorial(1)
    printed = capsys.readouterr().out.splitlines()
    assert "print_b  b  value=[0.2, 0.2, 0.2, 0.2, 0.2]" in printed
    assert "print_a  a  value=[0.4, 0.4, 0.4, 0.4, 0.4]" in printed


def test_02_doubling_b_s_gradient_during_backward_doubles_a_s(tutorial: Runs) -> None:
    gradients = tutorial(2).captures["gradients"]["a"]
    assert_close(gradients[0], torch.full((5,), 0.8))


def test_03_doubling_the_loss_s_gradient_doubles_all_behind_it(tutorial: Runs) -> None:
    run = tutorial(3)
    near(run.captures["gradients"]["w"][0], TWICE_W)
    near(run.captures["gradients"]["b"][0], TWICE_B)
    plain = tutorial(3, "~hooks.double_loss")
    near(plain.captures["gradients"]["w"][0], W)
    near(plain.captures["gradients"]["b"][0], B)
    assert plain.metrics[0]["loss"] == run.metrics[0]["loss"]


def test_04_doubling_w_s_gradient_leaves_the_others_and_the_loss(tutorial: Runs) -> None:
    run, plain = tutorial(4), tutorial(4, "~hooks.double_w")
    near(run.captures["gradients"]["w"][0], TWICE_W)
    near(run.captures["gradients"]["b"][0], B)
    near(run.captures["gradient_of_y"]["y"][0], B)
    assert_close(run.captures["gradients"]["w"][0], 2 * plain.captures["gradients"]["w"][0])
    assert_close(run.captures["gradient_of_y"]["y"][0], plain.captures["gradient_of_y"]["y"][0])
    assert plain.metrics[0]["loss"] == run.metrics[0]["loss"]


def test_05_the_gradient_of_y_is_kept(tutorial: Runs) -> None:
    near(tutorial(5).captures["gradient_of_y"]["y"][0], B)


def test_06_no_gradient_is_outside_of_the_range_and_training_goes_on(tutorial: Runs) -> None:
    seen = "+hooks.seen={select: '**', hook: post_accumulate_grad, action: capture}"
    run = tutorial(6, seen, "train.epochs=2")
    gradients = [run.captures["seen"][name][:] for name in run.captures["seen"]]
    assert len(gradients) == 6
    assert all(gradient.abs().max() <= 0.01 for gradient in gradients)
    assert any(gradient.abs().max() == pytest.approx(0.01) for gradient in gradients)
    losses = [line["loss"] for line in run.metrics if line["split"] == "train"]
    assert losses[1] < losses[0]


def test_07_the_bias_s_gradient_is_zero(tutorial: Runs) -> None:
    assert_close(tutorial(7).captures["gradients"]["fc.bias"][0], torch.zeros(5))
    plain = tutorial(7, "~hooks.zero_bias").captures["gradients"]["fc.bias"][0]
    assert_close(plain, torch.full((5,), -0.2))


def test_08_three_hooks_of_one_module_fire_in_order(tutorial: Runs, capsys: Any) -> None:
    tutorial(8)
    printed = capsys.readouterr().out.splitlines()
    assert "print_flatten  flatten  shape=[160]" in printed
    assert "print_relu  relu  shape=[1, 10, 4, 4]" in printed
    tutorial(8, "+hooks.clamp_relu.priority=1", code=3)  # the check comes before the clamp, and trips
    assert "hook 'check_relu' (output_grad, check) on relu" in capsys.readouterr().err


def test_09_a_backward_hook_shows_the_true_shapes(tutorial: Runs, capsys: Any) -> None:
    tutorial(9)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("shapes  ")]
    assert printed == [
        "shapes  fc grad_input  shape=[160]",
        "shapes  fc grad_output  shape=[5]",
        "shapes  conv grad_input  shape=None",
        "shapes  conv grad_output  shape=[1, 10, 4, 4]",
    ]


def test_10_the_features_of_a_pooling_layer(tutorial: Runs) -> None:
    assert tutorial(10).captures["features"]["pool"].shape == (1, 8, 4, 4)


RESNET = {
    "conv1": [10, 64, 14, 14],
    "bn1": [10, 64, 14, 14],
    "relu": [10, 64, 14, 14],
    "maxpool": [10, 64, 7, 7],
    "layer1": [10, 64, 7, 7],
    "layer2": [10, 128, 4, 4],
    "layer3": [10, 256, 2, 2],
    "layer4": [10, 512, 1, 1],
    "avgpool": [10, 512, 1, 1],
    "fc": [10, 1000],
}


def test_11_every_child_of_a_resnet_and_its_output_shape(tutorial: Runs, capsys: Any) -> None:
    tutorial(11)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("shapes  ")]
    assert printed == [f"shapes  {name}  shape={shape}" for name, shape in RESNET.items()]


def test_12_two_layers_features(tutorial: Runs) -> None:
    run = tutorial(12)
    for name in ("layer4", "avgpool"):
        assert run.captures["features"][name].shape == (10, 512, 1, 1)
        assert run.captures["features"][name].sample_ids.tolist() == list(range(10))


def test_12_on_real_data_the_rows_are_in_its_order(tutorial: Runs) -> None:
    digits = ("data=digits", "~data.args.shape", "~data.args.val_size", "data.batch_size=50")
    run = tutorial(
        12, *digits, "model=cnn", "model.args.num_classes=null", "hooks.features.select=[relu2,fc]"
    )
    features = run.captures["features"]["fc"]
    assert features.sample_ids.tolist() == list(range(359))
    assert run.predictions is not None
    assert_close(features[:], run.predictions[:])


def test_13_the_activations_of_every_leaf(tutorial: Runs) -> None:
    kept = tutorial(13, "data.batch_size=100").captures["activations"]
    shapes = {"conv": (10, 4, 4), "relu": (10, 4, 4), "fc1": (5,), "seq.0": (3,), "seq.1": (10,)}
    assert {path: kept[path].shape[1:] for path in kept} == shapes
    assert_close(kept["relu"][0:7], kept["conv"][0:7].relu())


def test_14_both_inputs_and_the_output_in_this_order(tutorial: Runs) -> None:
    model = model_of("add")
    run = tutorial(14)
    inputs = run.captures["inputs"]["add"]
    assert_close(inputs["[0]"][0], model.x1.detach())
    assert_close(inputs["[1]"][0], model.x2.detach())
    assert_close(run.captures["output"]["add"][0], (model.x1 + model.x2).detach())


def test_14_in_memory_the_inputs_are_one_entry(tmp_path: Path) -> None:
    model = model_of("add")
    with hookrun.hooked(model, hookrun.load_spec(experiment="tutorial/14_inputs_and_output")) as hooks:
        model()
    assert_close(hooks.captures["inputs"]["add"], [(model.x1.detach(), model.x2.detach())])
    assert_close(hooks.captures["output"]["add"], [(model.x1 + model.x2).detach()])


def test_15_five_is_added_to_the_output(tutorial: Runs) -> None:
    model = model_of("add")
    assert_close(tutorial(15).captures["output"]["add"][0], (model.x1 + model.x2 + 5).detach())


def test_16_the_module_sees_the_scaled_input_and_the_caller_s_is_unchanged() -> None:
    model = model_of("add")
    before = model.x1.detach().clone()
    with hookrun.hooked(model, hookrun.load_spec(experiment="tutorial/16_scale_input")) as hooks:
        model()
    assert_close(hooks.captures["inputs"]["add"], [(2 * before, model.x2.detach())])
    assert_close(hooks.captures["output"]["add"], [(2 * before + model.x2).detach()])
    assert torch.equal(model.x1, before)


def test_16_from_the_command_line(tutorial: Runs) -> None:
    model = model_of("add")
    assert_close(tutorial(16).captures["output"]["add"][0], (2 * model.x1 + model.x2).detach())


def test_17_the_gradients_of_inputs_output_and_weight_are_autograd_s(tutorial: Runs) -> None:
    model = model_of("product")
    output = model()
    grads = torch.autograd.grad(output.mean(), [model.x1, model.x2, output, model.function.W])
    run = tutorial(17)
    values = run.captures["of_values"]["function"]
    found = [values[path][0] for path in ("grad_input[0]", "grad_input[1]", "grad_output")]
    assert_close([*found, run.captures["of_weight"]["function.W"][0]], list(grads))


def test_18_what_is_upstream_receives_the_scaled_gradients(tutorial: Runs) -> None:
    model = model_of("product")
    model().mean().backward()
    gradients = tutorial(18).captures["gradients"]
    assert_close(gradients["x1"][0], 3 * model.x1.grad)
    assert_close(gradients["x2"][0], 3 * model.x2.grad)
    assert_close(gradients["function.W"][0], model.function.W.grad)


def test_19_every_parameter_of_the_class_is_one(tutorial: Runs) -> None:
    model = model_of("functions")
    assert_close(tutorial(19).captures["output"]["cd.d"][0], model.x)  # (x + 1 - 1) * 1 / 1
    with hookrun.hooked(model, hookrun.load_spec(experiment="tutorial/19_fill_parameters")):
        assert all(bool((parameter == 1).all()) for parameter in model.parameters())


def test_20_an_added_parameter_is_computed_with_trained_saved_and_restored(tutorial: Runs) -> None:
    from safetensors.torch import load_file

    model = model_of("functions")
    expected = model.x
    for _ in range(4):
        expected = expected @ torch.ones(2, 2) + 1
    seen = "+hooks.seen={select: '**.d', hook: forward, action: capture, when: {mode: train}}"
    run = tutorial(20, seen, "train.optimizer.lr=0.1")
    assert_close(run.captures["seen"]["cd.d"][0], expected)

    saved = run.path / "checkpoints/last.safetensors"
    trained = load_file(saved)
    # the mean's gradient: 1/4 for each of two rows
    assert_close(trained["cd.d.b"], torch.full((2,), 1 - 0.1 * 0.5))
    again = "+hooks.ones.enabled=false"  # what was trained is not filled anew
    restored = tutorial(20, again, f"model.weights={saved}", "train.optimizer.lr=0")
    assert load_file(restored.path / "checkpoints/last.safetensors").keys() == trained.keys()
    for name, tensor in load_file(restored.path / "checkpoints/last.safetensors").items():
        assert_close(tensor, trained[name])


@pytest.mark.parametrize(("name", "tolerance"), [("to_cpu", 0), ("to_disk", 0), ("smaller", 0.02)])
def test_21_saved_tensors_in_another_form_give_the_same_gradients(
    tutorial: Runs, name: str, tolerance: float
) -> None:
    seen = "+hooks.seen={select: '**', hook: post_accumulate_grad, action: capture}"
    row = f"saved_tensors_{name}"
    run, plain = tutorial(21, seen, name=row), tutorial(21, seen, "~hooks.pack", name=row)
    for path in plain.captures["seen"]:
        expected = plain.captures["seen"][path][0]
        assert (run.captures["seen"][path][0] - expected).norm() <= tolerance * expected.norm()

    def held(hook: str) -> int:
        return sum(line["bytes"] for line in run.stats if line["hook"] == hook)

    assert held("saved") > 100_000
    assert (
        held("held") == {"to_cpu": held("saved"), "to_disk": 0, "smaller": held("saved") - shrunk(run)}[name]
    )


def shrunk(run: Run) -> int:
    """Half the bytes of what was saved in floating point; integers stay as they are."""
    return sum(
        line["bytes"] // 2 for line in run.stats if line["hook"] == "saved" and line["bytes"] != INDICES
    )


INDICES = 64 * 8
"""Bytes of the labels, and of nothing else that is saved."""


def test_22_the_order_is_the_file_s_and_priority_changes_it(tutorial: Runs) -> None:
    """(0.2 + 1) * 2 or 0.2 * 2 + 1 reaches b = 2a."""
    gradient = tutorial(22).captures["gradient"]["a"][0]
    assert_close(gradient, torch.full((5,), 2 * (0.2 + 1) * 2))
    gradient = tutorial(22, "+hooks.second.priority=-1").captures["gradient"]["a"][0]
    assert_close(gradient, torch.full((5,), 2 * (0.2 * 2 + 1)))
