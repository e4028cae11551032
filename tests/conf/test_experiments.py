"""Every experiment runs from the command line and does what its comment says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from run_files import weights
from shipped_needs import needs_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hookrun
from hookrun.cli import main
from hookrun.command.compose.compose import compose_dict
from hookrun.run.tasks import parse_experiment, prepare
from hookrun.store.reader import Run

CONF = Path(__file__).parents[2] / "conf"
SMALL = ["train.epochs=1", "train.limit_batches=2", "compute.threads=1", "compute.device=cpu"]


TESTS = "".join(file.read_text() for file in sorted(Path(__file__).parent.glob("test_*.py")))
ELSEWHERE = re.compile(r'shipped\(\s*"([^"]*)"')
NAMES = [
    file.relative_to(CONF / "experiment").with_suffix("").as_posix()
    for file in (CONF / "experiment").rglob("*.yaml")
    if file.parent.name != "tutorial"
]
NEEDED = set[str]().union(*map(needs_of, NAMES))
OF_OTHER_TESTS = {"lm/padding", "lm/neuron_clamp", *ELSEWHERE.findall(TESTS)}
EXPERIMENTS = sorted(set(NAMES) - NEEDED - OF_OTHER_TESTS)
"""What is run by `shipped("NAME"` in any test, or because another one needs it, is not run a second time."""
HOOK_SETS = {
    file.stem: yaml.safe_load(file.read_text()) or {} for file in sorted((CONF / "hooks").glob("*.yaml"))
}
for name in ("drop_expert", "watch_moe"):  # the small network is not a mixture of experts
    del HOOK_SETS[name]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_hook_of_the_experiment_fires(name: str, shipped) -> None:
    assert shipped(name, *SMALL, "-r").status["status"] == "done"


def together() -> list[str]:
    """Hook sets whose hooks have different names and do not hinder each other: what is frozen has no gradient."""
    names = list[str]()
    for name in sorted(HOOK_SETS.keys() - {"freeze", "add_parameter", "linear", "stop_forward"}):
        if not any(HOOK_SETS[other].keys() & HOOK_SETS[name].keys() for other in names):
            names.append(name)
    return names


def test_hook_sets_run_on_the_small_network(capsys) -> None:
    small = (*SMALL, "train.limit_batches=1", "data.batch_size=8", "strict=true")
    assert main([f"hooks=[{','.join(together())}]", *small]) == 0
    plan, said, _ = capsys.readouterr().out.partition("\nplan ")
    assert said, "the plan is printed before the run"
    for hooks in map(HOOK_SETS.get, together()):
        for name, hook in hooks.items():
            if hook.get("enabled", True):
                assert f" {name} " in plan
    assert "unchecked" not in plan


@pytest.mark.parametrize("name", sorted(HOOK_SETS.keys() - set(together())))
def test_each_other_hook_set_fires_on_the_small_network(name: str) -> None:
    """In one step of training and one pass in evaluation mode."""
    task = "predict" if name == "stop_forward" else "train"
    overrides = [f"hooks={name}", f"task={task}", "compute.device=cpu", "data.batch_size=8"]
    prepared = prepare(parse_experiment(compose_dict(overrides)))
    assert prepared.plan.unchecked is None
    model, data = hookrun.build(overrides=overrides)
    batch = next(iter(data.loader("train")))
    with hookrun.hooked(model, prepared.experiment.hooks, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        output = model(batch.inputs)
        if task == "train":
            nn.functional.cross_entropy(output, batch.target).backward()
            optimizer.step()
        with torch.no_grad():
            model.eval()(batch.inputs)


def test_clip_fc_reaches_95_percent_on_digits(shipped) -> None:
    seen = "+hooks.seen={select: fc, hook: post_accumulate_grad, action: capture}"
    found = shipped("clip_fc", seen)
    gradient = found.captures["seen"]["fc.weight"][0:2]
    assert gradient.abs().max() == pytest.approx(0.01)
    accuracies = [line["accuracy"] for line in found.metrics if line["split"] == "val"]
    assert len(accuracies) == 10
    assert accuracies[-1] >= 0.95


def test_captured_features_are_rows_in_data_order(shipped) -> None:
    found = shipped("capture_features", *SMALL)
    assert found.captures["features"]["relu2"].shape == (128, 128, 4, 4)
    assert found.captures["features"]["fc"].sample_ids.tolist() == list(range(128))
    assert found.predictions is not None
    assert torch.equal(found.predictions[0:128], found.captures["features"]["fc"][0:128])


def test_the_samples_that_excite_a_channel_most_are_found(shipped) -> None:
    seen = "+hooks.seen={select: relu2, hook: forward, action: capture}"
    found = shipped("top_samples", *SMALL, seen)
    values, samples = found.captures["seen"]["relu2"][:].amax((2, 3)).topk(9, dim=0)
    fold = found.folds["units"]["relu2"]
    is_active = fold.top.values[:, -1] > 0  # equal zeros are in the order of the samples
    assert is_active.sum() > 50
    assert torch.equal(fold.top.values, values.T)
    assert torch.equal(fold.top.samples[is_active], samples.T[is_active])


def before_and_after(found: Run, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    before = found.captures["before"][layer]
    after = found.captures["after"][layer]
    return before[:], after[:]


def around(layer: str) -> list[str]:
    """Captures of what a layer returns, before the hooks of the experiment and after them."""
    entry = f"select: {layer}, hook: forward, action: capture"
    return [f"+hooks.before={{{entry}, priority: -1}}", f"+hooks.after={{{entry}, priority: 1}}"]


def test_the_first_convolution_s_output_is_halved(shipped) -> None:
    before, after = before_and_after(shipped("scale_activations", *SMALL, *around("conv1")), "conv1")
    assert torch.equal(after, before / 2)


def test_early_features_cost_about_half_of_the_operations(shipped) -> None:
    found = shipped("early_exit_features", *SMALL, "data.batch_size=4")
    assert [found.captures["features"][layer].shape for layer in ("layer1", "layer2")] == [(8, 64), (8, 128)]
    hooks = yaml.safe_load((CONF / "experiment/early_exit_features.yaml").read_text())["hooks"]
    model = torchvision.models.resnet18(num_classes=10).eval()
    images = torch.randn(1, 3, 64, 64)
    operations = list[int]()
    for hooked in ({}, {"stop": hooks["stop"]}):
        with hookrun.hooked(model, hooked), FlopCounterMode(display=False) as counted, torch.no_grad():
            model(images)
        operations.append(counted.get_total_flops())
    assert round(operations[1] / operations[0], 2) == 0.55, "as the comment says"


def test_ablation_zeroes_the_first_channels_in_validation_only(shipped) -> None:
    seen = "+hooks.seen={select: relu2, hook: forward, action: capture}"
    captured = shipped("zero_ablation", *SMALL, seen).captures["seen"]["relu2"]
    assert captured[0:128][:, :8].abs().sum() > 0, "training"
    assert captured[128:256][:, :8].abs().sum() == 0, "validation"
    assert captured[128:256][:, 8:].abs().sum() > 0


def test_the_added_bias_is_trained(shipped) -> None:
    bias = weights(shipped("add_bias", *SMALL))["flatten.offset_bias"]
    assert bias.abs().sum() > 0


def test_noise_is_only_in_validation(shipped) -> None:
    before, after = before_and_after(shipped("noise_robustness", *SMALL, *around("relu2")), "relu2")
    assert torch.equal(before[:128], after[:128]), "training"
    assert (after - before)[128:].std() == pytest.approx(0.3, rel=0.01)


def test_the_highest_exponent_bit_takes_the_network_down(shipped) -> None:
    effects = shipped("fault_map").effects
    accuracy = dict(zip(effects.axes["module"], effects["exact"], strict=True))
    bits = dict(enumerate(effects.axes["bits"]))
    highest = next(number for number, bit in bits.items() if bit == "[30]")
    low = next(number for number, bit in bits.items() if bit == "[22]")
    for layer in ("conv1", "conv2"):
        assert accuracy[layer][highest] < 0.5
    for layer in accuracy:
        assert accuracy[layer][low] == pytest.approx(0.911, abs=0.02)
    assert accuracy["fc"][-1] < 0.5, "the sign of a score"


def test_a_bound_helps_against_faults_that_are_repeated(shipped) -> None:
    bounded = shipped("replay_faults")
    (source,) = Path("outputs/needs").glob("*/*/faults.jsonl")
    plain = hookrun.open_run(source.parent)
    assert (bounded.path / "faults.jsonl").read_bytes() == source.read_bytes()
    accuracy = [run.metrics[-1]["accuracy"] for run in (plain, bounded)]
    assert accuracy == [pytest.approx(0.50, abs=0.03), pytest.approx(0.85, abs=0.03)]


def test_gradient_norms_are_those_of_the_gradients(shipped) -> None:
    seen = "+hooks.seen={select: fc.weight, hook: grad, action: capture}"
    found = shipped("gradient_norms", *SMALL, seen)
    (line,) = [line for line in found.stats if line["module"] == "fc.weight"]
    gradient = found.captures["seen"]["fc.weight"][0]
    assert line["norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert line["step"] == 0


def test_the_nan_hunt_names_the_module(shipped, capsys) -> None:
    found = shipped("nan_hunt", *SMALL, "train.optimizer.lr=1e30", code=3)
    assert "hook 'outputs' (forward, check) on conv2 (Conv2d), epoch 0, step 1" in capsys.readouterr().err
    assert found.status["status"] == "failed"
    assert all(site["fired"] for site in found.hooks["sites"]), "in the first step, which is finite"


def test_the_parameters_of_a_frozen_backbone_do_not_change(shipped) -> None:
    frozen = weights(shipped("freeze_backbone", *SMALL))
    start = hookrun.build(experiment="freeze_backbone", overrides=SMALL)[0].state_dict()
    assert torch.equal(frozen["conv1.weight"], start["conv1.weight"])
    assert not torch.equal(frozen["fc.weight"], start["fc.weight"])


def test_a_trained_picture_raises_the_activation_of_its_channel(shipped) -> None:
    found = shipped("feature_visualization")
    raised = [-line["loss"] for line in found.metrics if line["split"] == "val"]
    assert raised[-1] > 3 * raised[0] > 0
    picture = found.captures["seen"]["conv1"]
    assert picture[:].shape == (30, 1, 8, 8)
    assert not torch.equal(picture[0], picture[-1])


def test_attributions_are_maps_over_the_inputs(shipped) -> None:
    few = ("data.batch_size=5", "train.limit_batches=2")
    found = shipped("grad_cam", *few)
    assert found.attributions["attributions"].shape == (10, 1, 4, 4)
    page = (found.path / "report.html").read_text(encoding="utf-8")
    assert page.count('class="overlay"') == 10
    assert "data-strength" in page
    tokens = ("model=decoder", "data=names", "task.score=logit_difference")
    found = shipped("integrated_gradients", *tokens, *few)
    page = (found.path / "report.html").read_text(encoding="utf-8")
    assert "attribution of each token" in page
    assert "lowers" in page
    assert shipped("integrated_gradients", *few).metrics[-1]["delta"] < 0.01


def test_the_sweep_is_four_runs(tmp_path: Path, capsys) -> None:
    assert main(["experiment=clip_sweep", "task=plan", *SMALL]) == 0
    bounds = dict.fromkeys(re.findall(r"max=([\d.]+)", capsys.readouterr().out))
    assert list(bounds) == ["0.001", "0.01", "0.1", "1"]
