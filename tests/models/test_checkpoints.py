"""Checkpoints that others wrote, Lightning's and those of transformers' folders: read as tensors alone, or refused."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import batch, made, problem, random_model
from safetensors.torch import load_file
from torch import Tensor, nn

import hookrun
from hookrun.cli import main
from hookrun.errors import Problem, SpecError
from hookrun.models import applied_hooks, build, load_weights
from hookrun.models.settings import Model
from hookrun.models.weights import require_weights
from hookrun.store.states.files import save_weights

WEIGHTS = "model.weights"
PREFIX = "model.strip_prefix"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


# --- Lightning


@pytest.mark.parametrize("prefix", ["model.", "net.inner.", "module.model."])
def test_a_checkpoint_of_lightning_is_loaded_without_its_prefix(tmp_path: Path, prefix: str) -> None:
    source = net()
    model = net()
    path = lightning(tmp_path / "last.ckpt", under(prefix, source.state_dict()))
    assert load_weights(model, path, prefix) == {}
    assert equal(model.state_dict(), source.state_dict())


def test_names_without_the_prefix_stay(tmp_path: Path) -> None:
    source = net()
    model = net()
    state = under("model.", source.state_dict()) | {"criterion.weight": torch.ones(2)}
    left = load_weights(model, lightning(tmp_path / "last.ckpt", state), "model.")
    assert equal(left, {"criterion.weight": torch.ones(2)})
    assert equal(model.state_dict(), source.state_dict())


def test_names_without_the_prefix_tell_the_key_that_removes_it(tmp_path: Path) -> None:
    path = lightning(tmp_path / "last.ckpt", under("model.", net().state_dict()))
    told = refused(lambda: load_weights(net(), path))
    assert told.where == WEIGHTS
    assert "begin with 'model.', those of the model do not: 'model.0.weight'" in told.what
    assert told.hint == "set model.strip_prefix=model."


@pytest.mark.parametrize(
    ("prefix", "near"),
    [
        ("modle.", "'model.'"),
        ("model", "'model.'"),
        ("model.0.weight", "'model.0.'"),
        ("", "there are: model."),
    ],
)
def test_a_prefix_that_no_name_has_is_refused(tmp_path: Path, prefix: str, near: str) -> None:
    path = lightning(tmp_path / "last.ckpt", under("model.", net().state_dict()))
    told = refused(lambda: load_weights(net(), path, prefix))
    assert told.where == PREFIX
    assert f"no name in {path} begins with {prefix!r}" in told.what
    assert near in told.what


def test_two_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    state = net().state_dict()
    path = lightning(tmp_path / "last.ckpt", under("model.", state) | {"0.bias": state["0.bias"]})
    told = refused(lambda: load_weights(net(), path, "model."))
    assert told.where == PREFIX
    assert "a name both with and without 'model.'" in told.what


@pytest.mark.parametrize("weights", [None, "IMAGENET1K_V1"])
def test_a_prefix_needs_a_file(weights: str | None) -> None:
    config = Model(name="resnet18", weights=weights, strip_prefix="model.")
    told = refused(lambda: require_weights(config, published=True))
    assert told.where == PREFIX
    assert "model.weights is not one" in told.what


class Own:
    """A class of the user's, whose pickle makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(("held", "name"), [(Own, "mkdir"), (Path, "pathlib.")])
def test_pickled_hyper_parameters_are_never_run(
    tmp_path: Path, held: Callable[[Path], object], name: str
) -> None:
    more = {"hyper_parameters": {"folder": held(tmp_path / "made")}}
    path = lightning(tmp_path / "last.ckpt", under("model.", net().state_dict()), **more)
    told = refused(lambda: load_weights(net(), path, "model."))
    assert told.where == WEIGHTS
    assert f"{path} could not be read as tensors alone: it holds a " in told.what
    assert name in told.what
    assert "which would run code" in told.what
    assert "torch.load(FILE, weights_only=False)['state_dict']" in told.hint
    assert not (tmp_path / "made").exists()


def test_the_command_line_names_a_misspelt_key(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    config = Model(name="mlp", args={"in_features": 64, "num_classes": 10})
    model = build(config, sample_shape=None, num_classes=None, trust=frozenset())
    state = under("model.", model.state_dict())
    common = ["model=mlp", "data=digits", "task=plan", "compute.device=cpu"]
    lightning(tmp_path / "last.ckpt", state)
    assert main([*common, "model.weights=last.ckpt", "model.strip_prefix=model."]) == 0
    assert f"weights: {tmp_path / 'last.ckpt'}" in capsys.readouterr().out
    assert main([*common, "model.weights=last.ckpt", "model.strip_prefx=model."]) == 2
    assert "did you mean 'model.strip_prefix'?" in capsys.readouterr().err
    lightning(tmp_path / "more.ckpt", state | {"criterion.weight": torch.ones(2)})
    assert main([*common, "model.weights=more.ckpt", "model.strip_prefix=model."]) == 2
    assert "criterion.weight" in capsys.readouterr().err


# --- folders of transformers


def without_safetensors(folder: Path, model: Any, shards: int) -> Path:
    """The folder of a model as transformers wrote it before safetensors; returns what `model.weights` names."""
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    state = model.state_dict()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    files = {
        name: f"pytorch_model-{number % shards + 1:05}-of-{shards:05}.bin"
        for number, name in enumerate(state)
    }
    for file_name in set(files.values()):
        torch.save({name: state[name] for name in files if files[name] == file_name}, folder / file_name)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return index


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_with_pytorch_model_bin_is_the_model(tmp_path: Path, shards: int) -> None:
    pytest.importorskip("transformers")
    model = random_model("gpt2", "eager")
    inputs = batch("gpt2")
    file = without_safetensors(tmp_path / "model", model, shards)
    assert torch.equal(made(path=str(tmp_path / "model"))(**inputs).logits, model(**inputs).logits)
    other = random_model("gpt2", "eager")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert load_weights(other, str(file)) == {}
    assert torch.equal(other(**inputs).logits, model(**inputs).logits)


def test_an_index_of_safetensors_is_read_as_one_of_pickles_is(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = random_model("llama", "eager")
    other = random_model("llama", "sdpa")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert load_weights(other, str(tmp_path / "model.safetensors.index.json")) == {}
    assert equal(other.state_dict(), model.state_dict())


def test_a_pickle_of_more_than_tensors_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = without_safetensors(tmp_path / "model", random_model("gpt2", "eager"), 1)
    torch.save(torch.load(file) | {"bomb": Own(tmp_path / "made")}, file)
    message = problem(path=str(tmp_path / "model"))
    assert "model.args.path: " in message
    assert "mkdir, which would run code" in message
    assert not (tmp_path / "made").exists()
    state = torch.load(without_safetensors(tmp_path / "other", random_model("gpt2", "eager"), 1))
    torch.save(
        state | {"transformer.wte.weight": torch.zeros(40, 32, dtype=torch.int8)},
        tmp_path / "other/pytorch_model.bin",
    )
    assert "torch.int8 in the file and floating point in the model" in problem(path=str(tmp_path / "other"))


def test_an_index_names_files_beside_it_only(tmp_path: Path) -> None:
    index = tmp_path / "inner" / "pytorch_model.bin.index.json"
    index.parent.mkdir()
    source = net()
    model = net()
    torch.save(source.state_dict(), tmp_path / "away.bin")
    index.write_text(json.dumps({"weight_map": {"0.weight": "../away.bin"}}))
    told = refused(lambda: load_weights(model, str(index)))
    assert told.what == f"there is no file {index.parent / 'away.bin'}, which {index.name} names"
    shutil.move(tmp_path / "away.bin", index.parent / "away.bin")
    assert load_weights(model, str(index)) == {}
    assert equal(model.state_dict(), source.state_dict())
    for content in ("[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000):
        index.write_text(content)
        told = refused(lambda: load_weights(net(), str(index)))
        assert f"{index} could not be read as an index" in told.what, content


# --- files that take more memory than they have bytes


def packed(path: Path) -> None:
    """Every part of the file compressed: zeros become a thousandth."""
    torch.save({"a": torch.zeros(2**20)}, path)
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as source:
        parts = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def partly_packed(path: Path) -> None:
    """The pickle compressed, so that its bytes do not show what it calls, and an unused part that is as large."""
    filled(path)
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as source:
        parts = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            packing = zipfile.ZIP_DEFLATED if name.endswith(".pkl") else zipfile.ZIP_STORED
            archive.writestr(name, content, packing)


class Calls:
    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def filled(path: Path) -> None:
    torch.save({"a": Calls(bytearray, 10**10)}, path)


def filled_in_the_old_format(path: Path) -> None:
    torch.save({"a": Calls(bytearray, 10**10)}, path, _use_new_zipfile_serialization=False)


def filled_before_an_archive(path: Path) -> None:
    filled_in_the_old_format(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/data.pkl", b"")


def converted(path: Path) -> None:
    repeated = torch.zeros(1).expand(10**10)
    call = Calls(torch._utils._rebuild_device_tensor_from_cpu_tensor, repeated, torch.float64, "cpu", False)
    torch.save({"a": call}, path)


def repeated(path: Path) -> None:
    torch.save(net().state_dict() | {"0.weight": torch.zeros(1, dtype=torch.int8).expand(10**12)}, path)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (partly_packed, "its parts are compressed, or overlap"),
        (packed, "its parts are compressed, or overlap"),
        (filled, "it holds a bytearray"),
        (filled_in_the_old_format, "it holds a bytearray"),
        (filled_before_an_archive, "it holds a bytearray"),
        (converted, "it holds a _rebuild_device_tensor_from_cpu_tensor"),
        (repeated, "or repeat them (expand): 0.weight"),
    ],
)
@pytest.mark.parametrize(
    "model", [net, lambda: nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3))], ids=["net", "lazy"]
)
def test_a_small_file_that_would_fill_memory_is_refused(
    tmp_path: Path, write: Callable[[Path], None], said: str, model: Callable[[], nn.Module]
) -> None:
    path = tmp_path / "w.ckpt"
    write(path)
    assert path.stat().st_size < 20_000
    assert said in refused(lambda: load_weights(model(), str(path))).what


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    source = net()
    model = net()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(source.state_dict(), tmp_path / "w.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    load_weights(model, str(tmp_path / "w.pt"))
    assert equal(model.state_dict(), source.state_dict())


def test_a_file_of_an_old_version_of_torch_is_read(tmp_path: Path) -> None:
    source = net()
    model = net()
    torch.save(source.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert load_weights(model, str(tmp_path / "old.bin")) == {}
    assert equal(model.state_dict(), source.state_dict())


def test_a_checkpoint_names_the_apply_hooks_that_have_fired(tmp_path) -> None:
    ones = {"select": "0", "hook": "apply", "action": "fill", "value": 1}
    seen = {"select": "0", "hook": "forward", "action": "print"}
    plan = hookrun.compile({"ones": ones, "seen": seen}, net())
    path = tmp_path / "last.safetensors"
    save_weights(net(), path, applied=plan.applied())
    assert applied_hooks(str(path)) == {plan.hooks[0].spec.identity}
    assert set(load_file(path)) == set(net().state_dict())
    save_weights(net(), path)
    assert applied_hooks(str(path)) == frozenset()


def lightning(path: Path, state: dict[str, Tensor], **more: Any) -> str:
    """A checkpoint as Lightning lays it out."""
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    content = {
        "epoch": 1,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.1",
        "state_dict": state,
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {
            "ModelCheckpoint": {"best_model_score": torch.tensor(0.5), "best_model_path": "x.ckpt"}
        },
        "optimizer_states": [optimizer],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save({**content, **more}, path)
    return str(path)


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def refused(act: Callable[[], object]) -> Problem:
    with pytest.raises(SpecError) as caught:
        act()
    [problem] = caught.value.errors
    return problem
