"""A bundle from a stranger: a file of any content is refused with its name, and nothing outside the folder is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import hookrun
from hookrun.errors import SpecError
from hookrun.store.bundles import form_of

HOOK = {
    "select": "fc1",
    "hook": "forward",
    "action": "add_bias",
    "value": {"file": "tensors.safetensors", "key": "v"},
}
VALUE = torch.arange(8.0)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle that fits the tiny model."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    write_hooks(folder, {"edit": HOOK})
    save_file({"v": VALUE}, folder / "tensors.safetensors")
    write_model(folder)
    (folder / "README.md").write_text("")
    return folder


def write_hooks(folder: Path, hooks: Any) -> None:
    (folder / "hooks.yaml").write_text(yaml.safe_dump({"hooks": hooks}))


def write_model(folder: Path, **changes: Any) -> None:
    record = {
        "version": 1,
        "class": "Sequential",
        "seed": 0,
        "hooks": {"edit": [{"path": "fc1", "class": "Linear", "shape": "[2, 8]"}]},
        "modules": [],
        "tensors": {"v": form_of(VALUE, hashed=True)},
        "call": {"args": [{"dtype": "float32", "shape": [2, 4]}], "kwargs": {}},
    }
    (folder / "model.json").write_text(json.dumps(record | changes))


def test_the_bundle_itself_is_fine(bundle: Path) -> None:
    model = hookrun.testing.tiny_model()
    x = torch.ones(2, 4)
    expected = model.fc2((model.fc1(x) + VALUE).relu())
    with hookrun.hooked(model, hookrun.load_bundle(bundle)):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"value": {"file": "/etc/passwd", "key": "v"}},
        {"value": {"file": "../other.safetensors", "key": "v"}},
        {"value": {"file": "./tensors.safetensors", "key": "v"}},
        {"value": {"file": "tensors.safetensors", "key": "v", "minus": {"file": "/tmp/x.safetensors"}}},
        {"value": {"file": "tensors.safetensors", "key": "w"}},
        {"value": {"file": "tensors.safetensors"}},
        {"value": {"run": "previous", "capture": "seen"}},
        {
            "value": {
                "file": "tensors.safetensors",
                "key": "v",
                "minus": {"run": "outputs/latest", "capture": "x"},
            }
        },
        {"value": "${oc.env:HOME}"},
        {"value": 1, "select": "${vars.x}"},
        {"action": "python", "function": "os:system", "value": None},
        {"_target_": "os.system"},
        {"action": "python", "function": "x:y", "args": {"weights": {"folder": "/etc"}}, "value": None},
        {"value": {"_target_": "os.system"}},
        {"action": "sparse_autoencoder", "weights": {"folder": "/etc"}, "value": None},
        {"action": "flip_bits", "faults": {"run": "outputs/latest"}, "value": None},
    ],
)
def test_a_hook_that_leads_out_is_refused(changes: dict[str, Any], bundle: Path) -> None:
    hook = {key: value for key, value in {**HOOK, **changes}.items() if value is not None}
    write_hooks(bundle, {"edit": hook})
    with pytest.raises(SpecError, match=re.escape(str(bundle / "hooks.yaml"))):
        hookrun.load_bundle(bundle)


def test_a_name_with_control_characters_is_not_printed(bundle: Path) -> None:
    write_hooks(bundle, {"a\x1b[31m": HOOK})
    with pytest.raises(SpecError) as raised:
        hookrun.load_bundle(bundle)
    assert "\x1b" not in str(raised.value)


def _pickled(folder: Path) -> None:
    torch.save({"v": VALUE}, folder / "tensors.safetensors")


def _other_values(folder: Path) -> None:
    save_file({"v": VALUE + 1}, folder / "tensors.safetensors")


def _more_tensors(folder: Path) -> None:
    save_file({"v": VALUE, "w": VALUE + 1}, folder / "tensors.safetensors")


def _huge_header(folder: Path) -> None:
    (folder / "tensors.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")


def _offsets_outside(folder: Path) -> None:
    header = json.dumps({"v": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / "tensors.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def _sparse(folder: Path) -> None:
    os.truncate(folder / "model.json", 100 * 2**20)


def _large_model(folder: Path) -> None:
    (folder / "model.json").write_text('{"class": "' + "a" * 40 * 2**20 + '"}')


def _nan(folder: Path) -> None:
    write_model(folder, seed=float("nan"))


def _large_call(folder: Path) -> None:
    write_model(folder, call={"args": [{"dtype": "float32", "shape": [2**40]}], "kwargs": {}})


def _strange_dtype(folder: Path) -> None:
    write_model(folder, call={"args": [{"dtype": "load", "shape": [2]}], "kwargs": {}})


def _alias_bomb(folder: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (folder / "hooks.yaml").write_text("\n".join([*lines, "hooks: *a8"]))


def _twice(folder: Path) -> None:
    text = (folder / "hooks.yaml").read_text()
    (folder / "hooks.yaml").write_text(text + text)


def _no_hooks(folder: Path) -> None:
    (folder / "hooks.yaml").write_text("hooks:\n")


def _outside(folder: Path) -> None:
    write_model(folder, files={"/etc/passwd": "0" * 64})


def _more_keys(folder: Path) -> None:
    text = (folder / "hooks.yaml").read_text()
    (folder / "hooks.yaml").write_text(f"{text}trust: [os]\n")


def _linked(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return link


def _pipe(name: str) -> Callable[[Path], None]:
    def pipe(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return pipe


def _missing(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


FILES = ("hooks.yaml", "model.json", "tensors.safetensors")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *((change, "tensors.safetensors") for change in (_pickled, _other_values, _more_tensors)),
        *((change, "tensors.safetensors") for change in (_huge_header, _offsets_outside)),
        *(
            (change, "model.json")
            for change in (_sparse, _large_model, _nan, _large_call, _strange_dtype, _outside)
        ),
        *((change, "hooks.yaml") for change in (_alias_bomb, _twice, _more_keys, _no_hooks)),
        *((make(name), name) for name in FILES for make in (_linked, _pipe, _missing)),
    ],
)
def test_a_file_that_is_not_a_bundles_is_refused(
    change: Callable[[Path], None], name: str, bundle: Path
) -> None:
    change(bundle)
    with pytest.raises(SpecError) as raised:
        hookrun.load_bundle(bundle)
    assert name in str(raised.value)
    with pytest.raises(SpecError, match=r"hooks_from|hooks\.yaml"):
        hookrun.load_spec({"hooks_from": str(bundle)})
