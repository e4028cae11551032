"""What the tutorials do with inputs, outputs and parameters, by experiments and by hand-written PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun
from hookrun.data import load
from hookrun.spec.experiment import Data
from hookrun.store.reader import Run

Runs = Callable[..., Run]
Models = Callable[..., nn.Module]
Outputs = Callable[..., dict[str, Tensor]]


def test_10_the_features_of_a_pooling_layer(in_memory, model_of: Models, outputs_of: Outputs) -> None:
    data = Data(name="fake_images", args={"shape": [3, 10, 10], "val_size": 1})
    image = load(data, "val", seed=0)[0][0][None]
    _, captures = in_memory(10, inputs=(image,))
    features = torch.cat(captures["features"]["pool"])
    assert features.shape == (1, 8, 4, 4)
    model = model_of("tutorial/pooling", sample_shape=(3, 10, 10))
    assert_close(features, outputs_of(model, ["pool"], [image])["pool"])


def test_11_every_child_of_a_resnet_and_its_output_shape(in_memory, outputs_of, capsys: Any) -> None:
    images, model = torch.rand(10, 3, 28, 28), torchvision.models.resnet18()
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


def test_13_the_activations_of_every_leaf(tutorial: Runs, model_of: Models, outputs_of: Outputs) -> None:
    kept = tutorial(13).captures["activations"]

    def leaves(module: nn.Module, path: str = "") -> list[str]:
        """The tutorial's recursion."""
        found = [leaf for name, child in module.named_children() for leaf in leaves(child, f"{path}.{name}")]
        return found or [path.removeprefix(".")]

    model, digits = model_of("tutorial/activations"), load(Data(name="digits"), "val", seed=0)
    assert leaves(model) == list(kept)
    images = torch.stack([digits[i][0] for i in range(len(digits))])
    for name, rows in outputs_of(model, leaves(model), list(images.split(64))).items():
        assert_close(kept[name][:], rows)


def test_14_both_inputs_and_the_output_in_this_order(in_memory, capsys: Any) -> None:
    shown = [
        f"+hooks.{name}={{select: add, hook: {hook}, action: print}}"
        for name, hook in (("shown_inputs", "forward_pre"), ("shown_output", "forward"))
    ]
    model, captures = in_memory(14, *shown)
    assert_close(captures["inputs"]["add"], [(model.x1.detach(), model.x2.detach())])
    assert_close(captures["output"]["add"], [(model.x1 + model.x2).detach()])
    printed = [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines() if "shape=" in line]
    assert printed == ["add [0]  shape=[1]", "add [1]  shape=[1]", "add  shape=[1]"]


def test_15_five_is_added_to_the_output(in_memory, model_of: Models) -> None:
    model = model_of("tutorial/add")
    model.add.register_forward_hook(lambda module, args, output: output + 5)
    _, captures = in_memory(15)
    assert_close(captures["output"]["add"], [model().detach()])
    assert_close(model(), model.x1 + model.x2 + 5)


def test_16_the_module_sees_the_scaled_input_and_the_caller_s_is_unchanged(
    in_memory, model_of: Models
) -> None:
    by_hand = model_of("tutorial/add")
    by_hand.add.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    before = by_hand.x1.detach().clone()
    model, captures = in_memory(16)
    assert_close(captures["inputs"]["add"], [(2 * before, model.x2.detach())])
    assert_close(captures["output"]["add"], [by_hand().detach()])
    assert torch.equal(model.x1, before)


def test_16_a_single_value_is_wrapped_into_a_tuple_as_pytorch_wraps_it(model_of: Models) -> None:
    model, by_hand = model_of("tutorial/doubling"), model_of("tutorial/doubling")
    by_hand.b.register_forward_pre_hook(lambda module, args: 3 * args[0])
    with hookrun.hooked(model, {"triple": dict(select="b", hook="forward_pre", action="scale", factor=3)}):
        assert_close(model(), by_hand())
    assert_close(model(), torch.full((5,), 2.0))


def test_19_every_parameter_of_the_class_is_one(in_memory, model_of: Models) -> None:
    def ones(module: nn.Module) -> None:
        if type(module).__name__.startswith("Function_"):
            for parameter in module.parameters():
                nn.init.ones_(parameter)

    by_hand = model_of("tutorial/functions").apply(ones)
    model, captures = in_memory(19)
    assert_close(captures["output"]["cd.d"][0], by_hand().detach())
    assert_close(model.state_dict(), by_hand.state_dict())
    assert sum(bool((parameter == 1).all()) for parameter in model.parameters()) == 4


def test_20_an_added_parameter_is_computed_with_trained_saved_and_restored(tutorial, model_of) -> None:
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
