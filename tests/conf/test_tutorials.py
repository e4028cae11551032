"""The hook tutorials are experiments, each with the effect of hand-written PyTorch; one is run as a command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun
from hookrun.command.compose.compose import compose_dict
from hookrun.data import load
from hookrun.data.settings import Data
from hookrun.errors import CheckFailed
from hookrun.run.tasks import parse_experiment, prepare

ROOT = Path(__file__).parents[2]
NAMES = sorted(file.stem for file in (ROOT / "conf/experiment/tutorial").glob("*.yaml"))
SMALL = ("compute.threads=1", "compute.device=cpu", "strict=true")


def test_every_row_has_an_experiment_with_a_test() -> None:
    assert sorted({int(name[:2]) for name in NAMES}) == list(range(1, 23))
    rows = re.findall(r"(?:tutorial|in_memory|under_hooks)\((\d+)", Path(__file__).read_text())
    assert {int(row) for row in rows} == set(range(1, 23))
    assert [name for name in NAMES if name.startswith("21")] == [
        f"21_saved_tensors_{form}" for form in ("smaller", "to_cpu", "to_disk")
    ], "the test of row 21 runs these"


@pytest.mark.parametrize("name", NAMES)
def test_a_row_runs_on_a_model_of_its_own(name: str) -> None:
    prepared = prepare(parse_experiment(compose_dict([f"experiment=tutorial/{name}", *SMALL])))
    for hook in prepared.plan.hooks:
        assert hook.matches
    assert prepared.plan.hooks


def rows_of(page: str) -> list[str]:
    """The rows of a page's table from Python to YAML."""
    return re.findall(r"^\| .* \| .* \| `\d\d_\w+` \|$", (ROOT / page).read_text(), re.MULTILINE)


def test_the_page_s_hooks_are_those_of_the_experiments() -> None:
    names = []
    for row in rows_of("conf/README.md"):
        *_, cell, name = (part.strip(" `") for part in row.strip("|").split(" | "))
        names.append(name)
        if cell.startswith("{"):
            hooks = yaml.safe_load((ROOT / f"conf/experiment/tutorial/{name}.yaml").read_text())["hooks"]
            assert yaml.safe_load(cell) in hooks.values(), name
    assert [int(name[:2]) for name in names] == list(range(1, 23))


def test_the_readme_has_some_rows_of_the_page() -> None:
    some = rows_of("README.md")
    assert some
    assert set(some) < set(rows_of("conf/README.md"))


def test_it_runs_as_a_command(tmp_path, model_of) -> None:
    command = [sys.executable, "-m", "hookrun", "experiment=tutorial/01_print_gradient", *SMALL]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "print_b  b  value=[0.2, 0.2, 0.2, 0.2, 0.2]" in done.stdout.splitlines()
    run = hookrun.open_run(tmp_path / "outputs/latest")
    assert run.status["status"] == "done"
    plain = model_of("tutorial/doubling")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    plain().mean().backward()
    optimizer.step()
    weights = load_file(run.path / "checkpoints/last.safetensors")
    assert_close(weights, dict(plain.state_dict()), rtol=0, atol=0)


def test_01_the_gradients_inside_the_module_are_printed(in_memory, capsys) -> None:
    in_memory(1)
    printed = capsys.readouterr().out.splitlines()
    assert "print_b  b  value=[0.2, 0.2, 0.2, 0.2, 0.2]" in printed
    assert "print_a  a  value=[0.4, 0.4, 0.4, 0.4, 0.4]" in printed


def test_02_doubling_b_s_gradient_during_backward_doubles_a_s(in_memory, model_of, on_gradient) -> None:
    _, captures = in_memory(2)
    gradients = captures["gradients"]["a"]
    assert_close(gradients, [torch.full((5,), 0.8)])
    model = model_of("tutorial/doubling")
    on_gradient(model.b, lambda grad: 2 * grad)
    model().mean().backward()
    assert_close(gradients[0], model.a.grad)


def test_03_doubling_the_loss_s_gradient_doubles_all_upstream(in_memory, model_of, on_gradient) -> None:
    _, captures = in_memory(3)
    gradients = captures["gradients"]
    model = model_of("tutorial/regression", seed=2)
    on_gradient(model.loss, lambda grad: 2 * grad)
    model().backward()
    assert_close([gradients[name][0] for name in "wb"], [model.w.grad, model.b.grad])


def test_04_doubling_w_s_gradient_leaves_the_others(in_memory, model_of) -> None:
    _, captures = in_memory(4)
    gradients = captures["gradients"]
    model = model_of("tutorial/regression", seed=2)
    model.w.register_hook(lambda grad: 2 * grad)
    model().backward()
    assert_close([gradients[name][0] for name in "wb"], [model.w.grad, model.b.grad])
    assert_close(captures["gradient_of_y"]["y"][0], model.b.grad)


def test_05_the_gradient_of_y_is_captured(in_memory, model_of, on_gradient) -> None:
    _, captures = in_memory(5)
    (gradient,) = captures["gradient_of_y"]["y"]
    model = model_of("tutorial/regression", seed=2)
    seen = list[Tensor]()
    on_gradient(model.y, seen.append)
    model().backward()
    assert_close([gradient], seen)


def test_06_no_gradient_is_outside_of_the_range(tutorial) -> None:
    seen = "+hooks.seen={select: '**', hook: post_accumulate_grad, action: capture}"
    run = tutorial(6, seen, "train.epochs=2")
    gradients = [run.captures["seen"][name][:] for name in run.captures["seen"]]
    assert len(gradients) == 6
    for gradient in gradients:
        assert gradient.abs().max() <= 0.01
    assert any(gradient.abs().max() == pytest.approx(0.01) for gradient in gradients)
    losses = [line["loss"] for line in run.metrics if line["split"] == "train"]
    assert losses[1] < losses[0]


def test_07_the_bias_s_gradient_is_zero(in_memory, model_of) -> None:
    _, captures = in_memory(7)
    assert_close(captures["gradients"]["fc.bias"], [torch.zeros(5)])
    model = model_of("tutorial/testnet", seed=2)
    model().backward()
    assert_close(model.fc.bias.grad, torch.full((5,), -0.2))


def test_08_three_hooks_of_one_module_fire_in_order(in_memory, capsys, model_of, on_gradient) -> None:
    before = "+hooks.before={select: relu, hook: output_grad, action: capture, priority: -1}"
    after = "+hooks.after={select: relu, hook: output_grad, action: capture}"
    _, captures = in_memory(8, before, after)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("print_")]
    assert printed[:2] == ["print_flatten  flatten  shape=[160]", "print_relu  relu  shape=[1, 10, 4, 4]"]

    model = model_of("tutorial/testnet", seed=2)
    seen = list[Tensor]()
    for hook in (seen.append, lambda grad: grad.clamp(min=0), seen.append):
        on_gradient(model.relu, hook)
    model().backward()
    assert_close([captures[name]["relu"][0] for name in ("before", "after")], seen)
    assert [bool((grad < 0).any()) for grad in seen] == [True, False]

    in_memory(8, "+hooks.print_relu.what=stats")
    assert " min=0 " in capsys.readouterr().out  # printed after the clamp
    # the check comes before the clamp, and fails
    with pytest.raises(CheckFailed, match=r"hook 'check_relu' \(output_grad, check\) on relu"):
        in_memory(8, "+hooks.clamp_relu.priority=1")


def test_09_a_backward_hook_shows_the_true_shapes(in_memory, capsys) -> None:
    in_memory(9)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("shapes  ")]
    assert printed == [
        "shapes  fc grad_input  shape=[160]",
        "shapes  fc grad_output  shape=[5]",
        "shapes  conv grad_input  shape=None",
        "shapes  conv grad_output  shape=[1, 10, 4, 4]",
    ]


def test_17_gradients_of_the_module_are_autograd_s(in_memory, model_of) -> None:
    model = model_of("tutorial/product")
    seen = list[Tensor]()
    model.function.register_full_backward_hook(
        lambda module, grad_input, grad_output: seen.extend((*grad_input, *grad_output))
    )
    model.function.W.register_hook(seen.append)
    model().mean().backward()
    _, captures = in_memory(17)
    (values,) = captures["of_values"]["function"]
    found = [*values["grad_input"], values["grad_output"], *captures["of_weight"]["function.W"]]
    assert len(seen) == 4
    assert sorted(map(float, found)) == pytest.approx(sorted(map(float, seen)))  # in either order

    output = (again := model_of("tutorial/product"))()
    inputs = [again.x1, again.x2, output, again.function.W]
    assert_close(found, list(torch.autograd.grad(output.mean(), inputs)))


def test_18_nothing_is_edited_in_place(model_of) -> None:
    """Both inputs of a sum receive the very same gradient: scaled in place, each would be scaled twice."""
    model = model_of("tutorial/add")
    given = list[Tensor]()
    model.add.register_forward_hook(lambda module, args, output: output.register_hook(given.append) and None)
    with hookrun.hooked(model, {"triple": dict(select="add", hook="backward", action="scale", factor=3)}):
        model().sum().backward()
    assert_close([model.x1.grad, model.x2.grad, *given], [torch.tensor([n]) for n in (3.0, 3.0, 1.0)])


def test_18_upstream_modules_receive_the_scaled_gradients(in_memory, model_of) -> None:
    model = model_of("tutorial/product")
    given = list[Tensor]()

    def triple(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        given.extend(grad_input)
        return tuple(3 * grad for grad in grad_input)

    model.function.register_full_backward_hook(triple)
    model().mean().backward()
    before = "+hooks.before={select: function, hook: backward, action: capture, priority: -1}"
    _, captures = in_memory(18, before)
    gradients = captures["gradients"]
    for name in ("x1", "x2", "function.W"):
        assert_close(gradients[name][0], model.get_parameter(name).grad)
    (seen,) = captures["before"]["function"]
    for number, name in enumerate(("x1", "x2")):
        assert_close(seen["grad_input"][number], given[number])
        assert_close(gradients[name][0], 3 * given[number])


def test_21_gradients_survive_another_form_of_saved_tensors(under_hooks, model_of) -> None:
    plain, data = hookrun.build(
        experiment="tutorial/21_saved_tensors_to_cpu", overrides=["compute.device=cpu"]
    )
    inputs = next(iter(data.loader("train"))).inputs
    plain(inputs).mean().backward()
    floats, integers = saved_by_hand(model_of("cnn"))
    assert min(floats, integers) > 100_000
    forms = {"to_cpu": (0, floats + integers), "to_disk": (0, 0), "smaller": (0.02, floats // 2 + integers)}
    for name, (tolerance, held) in forms.items():
        model, hooks = under_hooks(21, inputs=(inputs,), name=f"saved_tensors_{name}")
        for path, parameter in plain.named_parameters():
            expected = parameter.grad
            assert expected.norm() > 0
            assert (model.get_parameter(path).grad - expected).norm() <= tolerance * expected.norm()
        counted = {
            hook: sum(line["bytes"] for line in hooks.records if line["hook"] == hook)
            for hook in ("saved", "held")
        }
        assert counted == {"saved": floats + integers, "held": held}


def saved_by_hand(model: nn.Module) -> tuple[int, int]:
    """Bytes of what autograd saves in a forward on one batch of digits, parameters aside: floats and integers."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    floats = list[int]()
    integers = list[int]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            (floats if tensor.is_floating_point() else integers).append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.rand(64, 1, 8, 8))
    return sum(floats), sum(integers)


@pytest.mark.parametrize(
    ("overrides", "order", "expected"),
    [((), (0, 1), (0.2 + 1) * 2), (("+hooks.second.priority=-1",), (1, 0), 0.2 * 2 + 1)],
    ids=["the order of the file", "by priority"],
)
def test_22_priority_changes_the_order_of_the_file(
    in_memory, overrides: tuple[str, ...], order: tuple[int, int], expected: float, model_of, on_gradient
) -> None:
    model = model_of("tutorial/doubling")
    steps: list[Callable[[Tensor], Tensor]] = [lambda grad: grad + 1, lambda grad: 2 * grad]
    for number in order:
        on_gradient(model.b, steps[number])
    model().mean().backward()
    _, captures = in_memory(22, *overrides)
    (gradient,) = captures["gradient"]["a"]
    assert_close(gradient, torch.full((5,), 2 * expected))  # b = 2a
    assert_close(gradient, model.a.grad)


def test_10_the_features_of_a_pooling_layer(in_memory, model_of, outputs_of) -> None:
    data = Data(name="fake_images", args={"shape": [3, 10, 10], "val_size": 1})
    image = load(data, "val", seed=0)[0][0][None]
    _, captures = in_memory(10, inputs=(image,))
    features = torch.cat(captures["features"]["pool"])
    assert features.shape == (1, 8, 4, 4)
    model = model_of("tutorial/pooling", sample_shape=(3, 10, 10))
    assert_close(features, outputs_of(model, ["pool"], [image])["pool"])


def test_11_every_child_of_a_resnet_has_its_output_shape(in_memory, outputs_of, capsys) -> None:
    images = torch.rand(10, 3, 28, 28)
    model = torchvision.models.resnet18()
    outputs = outputs_of(model, [name for name, _ in model.named_children()], [images])
    in_memory(11, inputs=(images,))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("shapes  ")]
    assert printed == [f"shapes  {name}  shape={list(rows.shape)}" for name, rows in outputs.items()]


def test_12_on_pictures_in_a_folder_the_rows_are_in_their_order(tutorial, tmp_path, outputs_of) -> None:
    noise = np.random.default_rng(0)
    for name in ("cat", "ant", "bee"):
        for split in ("train", "val"):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(3):
                Image.fromarray(noise.integers(256, size=(28, 28, 3), dtype=np.uint8)).save(
                    folder / f"{number}.png"
                )
    overrides = ("~data.args.shape", "~data.args.val_size", "data.transforms.resize.size=[28,28]")
    run = tutorial(12, "data=image_folder", f"data.root={tmp_path}/pictures", "data.batch_size=4", *overrides)

    files = sorted((tmp_path / "pictures/val").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    images = torch.from_numpy(pixels).movedim(-1, 1) / 255
    torch.manual_seed(0)
    names = ["layer4", "avgpool"]
    expected = outputs_of(torchvision.models.resnet18(num_classes=1000), names, list(images.split(4)))
    for name in names:
        features = run.captures["features"][name]
        assert features.sample_ids.tolist() == list(range(9))
        assert_close(features[:], expected[name])


def test_13_the_activations_of_every_leaf(tutorial, model_of, outputs_of) -> None:
    kept = tutorial(13).captures["activations"]

    def leaves(module: nn.Module, path: str = "") -> list[str]:
        """The tutorial's recursion."""
        found = [leaf for name, child in module.named_children() for leaf in leaves(child, f"{path}.{name}")]
        return found or [path.removeprefix(".")]

    model = model_of("tutorial/activations")
    digits = load(Data(name="digits"), "val", seed=0)
    assert leaves(model) == list(kept)
    images = torch.stack([digits[i][0] for i in range(len(digits))])
    for name, rows in outputs_of(model, leaves(model), list(images.split(64))).items():
        assert_close(kept[name][:], rows)


def test_14_inputs_come_before_the_output(in_memory, capsys) -> None:
    shown = [
        f"+hooks.{name}={{select: add, hook: {hook}, action: print}}"
        for name, hook in (("shown_inputs", "forward_pre"), ("shown_output", "forward"))
    ]
    model, captures = in_memory(14, *shown)
    assert_close(captures["inputs"]["add"], [(model.x1.detach(), model.x2.detach())])
    assert_close(captures["output"]["add"], [(model.x1 + model.x2).detach()])
    printed = [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines() if "shape=" in line]
    assert printed == ["add [0]  shape=[1]", "add [1]  shape=[1]", "add  shape=[1]"]


def test_15_five_is_added_to_the_output(in_memory, model_of) -> None:
    model = model_of("tutorial/add")
    model.add.register_forward_hook(lambda module, args, output: output + 5)
    _, captures = in_memory(15)
    assert_close(captures["output"]["add"], [model().detach()])
    assert_close(model(), model.x1 + model.x2 + 5)


def test_16_the_input_of_the_caller_is_unchanged(in_memory, model_of) -> None:
    by_hand = model_of("tutorial/add")
    by_hand.add.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    before = by_hand.x1.detach().clone()
    model, captures = in_memory(16)
    assert_close(captures["inputs"]["add"], [(2 * before, model.x2.detach())])
    assert_close(captures["output"]["add"], [by_hand().detach()])
    assert torch.equal(model.x1, before)


def test_16_a_single_value_is_wrapped_into_a_tuple(model_of) -> None:
    model = model_of("tutorial/doubling")
    by_hand = model_of("tutorial/doubling")
    by_hand.b.register_forward_pre_hook(lambda module, args: 3 * args[0])
    with hookrun.hooked(model, {"triple": dict(select="b", hook="forward_pre", action="scale", factor=3)}):
        assert_close(model(), by_hand())
    assert_close(model(), torch.full((5,), 2.0))


def test_19_every_parameter_of_the_class_is_one(in_memory, model_of) -> None:
    def ones(module: nn.Module) -> None:
        if type(module).__name__.startswith("Function_"):
            for parameter in module.parameters():
                nn.init.ones_(parameter)

    by_hand = model_of("tutorial/functions").apply(ones)
    model, captures = in_memory(19)
    assert_close(captures["output"]["cd.d"][0], by_hand().detach())
    assert_close(model.state_dict(), by_hand.state_dict())
    assert sum(bool((parameter == 1).all()) for parameter in model.parameters()) == 4


def test_20_an_added_parameter_is_restored(tutorial, model_of) -> None:
    from safetensors.torch import load_file

    model = model_of("tutorial/functions")
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
    again = "+hooks.ones.enabled=false"  # trained values are not filled again
    restored = tutorial(20, again, f"model.weights={saved}", "train.optimizer.lr=0")
    assert load_file(restored.path / "checkpoints/last.safetensors").keys() == trained.keys()
    for name, tensor in load_file(restored.path / "checkpoints/last.safetensors").items():
        assert_close(tensor, trained[name])
