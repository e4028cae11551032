"""Every experiment runs from the command line and does what its comment says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import hookrun
from hookrun.cli import main
from hookrun.store.reader import Run

CONF = Path(__file__).parents[2] / "conf"
SMALL = ["train.epochs=1", "train.limit_batches=2", "compute.threads=1", "compute.device=cpu"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, *overrides: str) -> Run:
    assert main([f"experiment={name}", *SMALL, *overrides]) == 0
    return hookrun.open_run("outputs/latest")


def weights(run: Run, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run.path / f"checkpoints/{name}.safetensors")


EXPERIMENTS = sorted(
    file.relative_to(CONF / "experiment").with_suffix("").as_posix()
    for file in (CONF / "experiment").rglob("*.yaml")
)


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_runs_and_every_hook_fires(name: str, capsys, request: pytest.FixtureRequest) -> None:
    if name.startswith("lm/"):
        request.getfixturevalue("names_model")
        capsys.readouterr()
    assert main([f"experiment={name}", *SMALL, "-r", "strict=true"]) == 0
    printed = capsys.readouterr()
    assert "WARNING" not in printed.out
    assert printed.err == ""
    assert hookrun.open_run("outputs/latest").status["status"] == "done"


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONF / "hooks").glob("*.yaml")))
def test_every_hook_set_fits_the_small_network_and_runs(name: str, capsys) -> None:
    task = "predict" if name == "stop_forward" else "train"
    small = (*SMALL, "train.limit_batches=1", "data.batch_size=8", "strict=true")
    assert main([f"hooks={name}", f"task={task}", *small]) == 0
    hooks = yaml.safe_load((CONF / f"hooks/{name}.yaml").read_text()) or {}
    plan, said, _ = capsys.readouterr().out.partition("\nplan ")
    assert said, "the plan is printed before the run"
    assert all(f" {name} " in plan for name, hook in hooks.items() if hook.get("enabled", True))
    assert "unchecked" not in plan


def test_clip_fc_reaches_95_percent_on_digits() -> None:
    assert main(["experiment=clip_fc", "compute.threads=1", "compute.device=cpu"]) == 0
    accuracies = [
        line["accuracy"] for line in hookrun.open_run("outputs/latest").metrics if line["split"] == "val"
    ]
    assert len(accuracies) == 10
    assert accuracies[-1] >= 0.95


def test_clip_fc_bounds_the_gradient_that_the_optimizer_uses() -> None:
    seen = "+hooks.seen={select: fc, hook: post_accumulate_grad, action: capture}"
    gradient = run("clip_fc", seen).captures["seen"]["fc.weight"][0:2]
    assert gradient.abs().max() == pytest.approx(0.01)


def test_captured_features_are_rows_in_data_order() -> None:
    found = run("capture_features")
    assert found.captures["features"]["relu2"].shape == (128, 128, 4, 4)
    assert found.captures["features"]["fc"].sample_ids.tolist() == list(range(128))
    assert found.predictions is not None
    assert torch.equal(found.predictions[0:128], found.captures["features"]["fc"][0:128])


def test_scaling_by_one_changes_nothing_and_by_half_does() -> None:
    losses = [
        run("scale_activations", f"hooks.scale.factor={factor}").metrics[-1]["loss"] for factor in (1, 0.5)
    ]
    assert losses[0] == run("scale_activations", "+hooks.scale.enabled=false").metrics[-1]["loss"]
    assert losses[0] != losses[1]


def test_early_features_cost_about_half_of_the_operations() -> None:
    found = run("early_exit_features", "data.batch_size=4")
    assert [found.captures["features"][layer].shape for layer in ("layer1", "layer2")] == [(8, 64), (8, 128)]
    hooks = yaml.safe_load((CONF / "experiment/early_exit_features.yaml").read_text())["hooks"]
    model, images, operations = (
        torchvision.models.resnet18(num_classes=10).eval(),
        torch.randn(1, 3, 64, 64),
        list[int](),
    )
    for hooked in ({}, {"stop": hooks["stop"]}):
        with hookrun.hooked(model, hooked), FlopCounterMode(display=False) as counted, torch.no_grad():
            model(images)
        operations.append(counted.get_total_flops())
    assert round(operations[1] / operations[0], 2) == 0.55, "as the comment says"


def test_ablation_zeroes_the_first_channels_in_validation_only() -> None:
    seen = "+hooks.seen={select: relu2, hook: forward, action: capture}"
    captured = run("zero_ablation", seen).captures["seen"]["relu2"]
    assert captured[0:128][:, :8].abs().sum() > 0, "training"
    assert captured[128:256][:, :8].abs().sum() == 0, "validation"
    assert captured[128:256][:, 8:].abs().sum() > 0


def test_the_added_bias_is_trained_and_saved() -> None:
    bias = weights(run("add_bias"))["flatten.offset_bias"]
    assert bias.abs().sum() > 0


def test_noise_is_repeatable_and_only_in_validation() -> None:
    first, second, none = (
        run("noise_robustness"),
        run("noise_robustness"),
        run("noise_robustness", "hooks.noise.std=0"),
    )
    assert first.metrics == second.metrics
    train = [[line for line in each.metrics if line["split"] == "train"] for each in (first, none)]
    assert train[0] == train[1]
    assert first.metrics[-1]["loss"] != none.metrics[-1]["loss"]


def test_gradient_norms_are_those_of_the_gradients() -> None:
    seen = "+hooks.seen={select: fc.weight, hook: grad, action: capture}"
    found = run("gradient_norms", seen)
    (line,) = [line for line in found.stats if line["module"] == "fc.weight"]
    gradient = found.captures["seen"]["fc.weight"][0]
    assert line["norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert line["step"] == 0


def test_the_nan_hunt_names_module_and_step(capsys) -> None:
    assert main(["experiment=nan_hunt", *SMALL, "train.optimizer.lr=1e30"]) == 3
    assert "hook 'outputs' (forward, check) on conv2 (Conv2d), epoch 0, step 1" in capsys.readouterr().err
    assert hookrun.open_run("outputs/latest").status["status"] == "failed"


def test_the_parameters_of_a_frozen_backbone_do_not_change() -> None:
    frozen, trained = (
        weights(run("freeze_backbone")),
        weights(run("freeze_backbone", "+hooks.freeze.enabled=false")),
    )
    start = weights(run("freeze_backbone", "train.optimizer.lr=0", "+train.optimizer.weight_decay=0"))
    assert torch.equal(frozen["conv1.weight"], start["conv1.weight"])
    assert not torch.equal(trained["conv1.weight"], start["conv1.weight"])
    assert not torch.equal(frozen["fc.weight"], start["fc.weight"])


def test_the_sweep_is_four_runs(tmp_path: Path) -> None:
    assert main(["experiment=clip_sweep", *SMALL]) == 0
    jobs = sorted(path.parent for path in tmp_path.glob("multirun/latest/*/plan.json"))
    bounds = [json.loads((job / "plan.json").read_text())["hooks"][0]["params"]["max"] for job in jobs]
    assert bounds == [0.001, 0.01, 0.1, 1.0]
