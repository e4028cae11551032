"""Bad input: one screen with key path, what was asked and the nearest names; exit code 2, before any data is read."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("no_data_is_read")

CAPTURE = {"select": "fc", "hook": "forward", "action": "capture"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+train.epoch=3", "did you mean 'epochs'"),
        ("train.optimizer.name=Adamm", "did you mean 'Adam"),
        ("compute.device=cud", "compute.device: found 'cud'"),
        ("model.name=resnet81", "did you mean 'resnet18'"),
        ("data.name=nist", "did you mean 'mnist'"),
        ("task=trin", "did you mean 'train'"),
        ("model.weights=none.safetensors", "there is no file"),
        ("data=mnist", "data.root"),
    ],
)
def test_settings(refused, override: str, said: str) -> None:
    assert said in refused(override)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"action": "captur"}, "did you mean 'capture'"),
        ({"select": "fcc"}, "did you mean 'fc'"),
        ({"select": "conv*", "expect": 1}, "expected 1 modules, 'conv*' matches 2: conv1, conv2"),
        ({"action": "add_bias", "value": "[1, 2, 3]"}, "does not broadcast"),
        ({"action": "scale", "factor": 2, "index": "'..., 10'"}, "hooks.h: on fc: index ..., 10: "),
        ({"action": "scale", "factor": 2, "target": "logits"}, "'logits' is not in the tensor"),
        ({"hook": "grad", "action": "linear"}, "action 'linear' does not go with hook type 'grad'"),
        ({"action": "replace", "value": "{run: none, capture: c, module: m}"}, "hooks.h.value: "),
    ],
    ids=str,
)
def test_hooks(refused, hook, changes: dict[str, object], said: str) -> None:
    assert said in refused(hook(**CAPTURE | changes))


def test_optimizer_device_and_model_are_reported_together(refused) -> None:
    said = refused("train.optimizer.name=x", "compute.device=y", "model.name=z")
    assert "3 configuration errors" in said


def test_a_missing_package_line_is_reported(refused, tmp_path) -> None:
    folder = tmp_path / "conf/experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("hooks:\n  a: {select: fc, hook: grad, action: print}\n")
    assert "# @package _global_" in refused("--config-dir", "conf", "experiment=mine")
